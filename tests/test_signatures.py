"""Public signatures: shapes in letters of one glossary, results with types, and annotations that are true of every legal call."""

import inspect
import re
from typing import Any, assert_type, get_args, get_type_hints

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ejkernel_eqx as ejx
from ejkernel_eqx import _shapes, models, nn, paged
from ejkernel_eqx.attention.signature import AttentionInputs, DotProductInputs, FlashInputs
from ejkernel_eqx.dispatch import PlatformName
from ejkernel_eqx.latent.absorbed import AbsorbedInputs
from ejkernel_eqx.nn.signatures import BatchInputs, Inputs
from ejkernel_eqx.paged.signature import DecodeInputs, PackedInputs, RaggedInputs, UnifiedInputs
from tests import functional_stub

METHODS = {
    f"{cls.__name__}.{name}": getattr(cls, name)
    for cls in functional_stub.operations()
    for name in ("__call__", "step")
    if hasattr(cls, name)
}
METHODS |= {
    f"nn.{cls.__name__}.{name}": getattr(cls, name)
    for cls in vars(nn).values()
    if inspect.isclass(cls)
    for name in ("__call__", "step", "append", "accept", "copy_pages", "copy_states")
    if any(name in vars(base) for base in cls.__mro__)
}
GLOSSARY = {
    letter
    for line in (_shapes.__doc__ or "").splitlines()
    if line.startswith("| `")
    for letter in re.findall(r"`\*?(\w+)\b[^`]*`", line.split("|")[1])
}


def returned(function: Any) -> set[type]:
    """The classes of this package in what a function returns."""

    def classes(word: Any) -> set[type]:
        of_ours = inspect.isclass(word) and word.__module__.startswith(ejx.__name__)
        return {word} if of_ours else {cls for part in get_args(word) for cls in classes(part)}

    return classes(get_type_hints(inspect.unwrap(function)).get("return"))


@pytest.mark.parametrize("room", [nn, models, paged], ids=lambda room: room.__name__)
def test_what_is_returned_can_be_imported(room):
    exported = [getattr(ejx, name) for name in dir(ejx)]
    public = {
        value for value in (*exported, *vars(nn).values(), *vars(models).values()) if inspect.isclass(value)
    }
    missing = set()
    for name, cls in vars(room).items():
        members = inspect.getmembers(cls, inspect.isroutine) if inspect.isclass(cls) else [(name, cls)]
        for member, function in members:
            if callable(function) and str(getattr(function, "__module__", "")).startswith(ejx.__name__):
                shown = not member.startswith("_") or member == "__call__"
                missing |= {(name, cls.__name__) for cls in returned(function) - public} if shown else set()
    assert not missing


def test_platforms_have_their_names():
    assert set(get_args(PlatformName)) == {platform.value for platform in ejx.Platform}


@pytest.mark.parametrize("name", METHODS)
def test_shapes_are_of_the_glossary(name):
    signature = inspect.signature(METHODS[name])
    words = [str(p.annotation) for p in list(signature.parameters.values())[1:]]
    assert all("Any" not in word.replace("Annotated", "") or "Sequence" in word for word in words)
    assert signature.return_annotation is not Any
    text = " ".join([*words, str(signature.return_annotation)])
    shapes = [shape for shape in re.findall(r"\], '([^']*)'\]", text) if shape != "..."]
    letters = set(re.findall(r"[A-Za-z]+", " ".join(shapes)))
    assert letters and letters <= GLOSSARY, letters - GLOSSARY


@pytest.mark.parametrize(
    "method, named, decides",
    [
        (ejx.FlashAttention.__call__, FlashInputs, "return_lse"),
        (ejx.MultiHeadLatentAttention.__call__, AttentionInputs, "return_lse"),
        (ejx.AbsorbedLatentAttention.__call__, AbsorbedInputs, "return_lse"),
        (ejx.PagedAttention.__call__, DecodeInputs, "return_lse"),
        (ejx.PrefillPagedAttention.__call__, PackedInputs, "return_lse"),
        (ejx.RaggedPagedAttention.__call__, RaggedInputs, "return_lse"),
        (ejx.RaggedDecodeAttention.__call__, DecodeInputs, "return_lse"),
        (ejx.UnifiedAttention.__call__, UnifiedInputs, "return_lse"),
        (ejx.ScaledDotProductAttention.__call__, DotProductInputs, "return_residual"),
        (nn.MultiHeadAttention.__call__, Inputs, "return_lse"),
    ],
)
def test_named_arguments_are_those_of_the_call(method, named, decides):
    parameters = inspect.signature(method).parameters.values()
    written = {p.name: str(p.annotation) for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert written.pop(decides) == "<class 'bool'>"
    written.pop("batch", None)
    assert {name: str(word) for name, word in get_type_hints(named, include_extras=True).items()} == written


def numpy(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_arrays_of_numpy_and_lists_are_legal():
    """The annotations are checked here."""

    def calls():
        q = numpy(6, 2, 8)
        ejx.FlashAttention()(q, q, q, cu_seqlens=[0, 3, 6], alibi_slopes=[0.5, 1.0], sinks=[0.0, 1.0])
        arrays: dict[str, Any] = {"cu_seqlens": np.array([0, 3, 6]), "alibi_slopes": numpy(2) * 0 + 1}
        ejx.FlashAttention()(q, q, q, **arrays)
        ejx.Attention()(q, q, q, mask=[[True] * 6] * 6, q_lengths=np.int64(4), q_offset=0)
        ejx.ScaledDotProductAttention()(q, q, q, mask=np.tri(6, dtype=bool), query_seq_lengths=np.array(4))
        ejx.RaggedDecodeAttention()(q[:1], q[None], q[None], [0], np.array([6]))
        ejx.GatedLinearAttention()(q, q, q, -np.exp(q), segment_ids=[0] * 6)
        ejx.LinearAttention()(q, q, q, g=-np.exp(q[..., 0]), cu_seqlens=(0, 6))
        ejx.LightningAttention(slopes=None)(q, q, q, slopes=np.ones(2, np.float32))
        ejx.DeltaRule()(q, q, q, np.abs(q[..., 0]))
        ejx.GatedDeltaRule()(q, q, q, -np.exp(q[..., 0]), np.abs(q[..., 0]))
        x, state = numpy(6, 4), -np.exp(numpy(4, 3))
        ejx.StateSpaceV1()(x, np.exp(x), state, x[:, :3], x[:, :3], D=numpy(4))
        ejx.CausalConv1d()(x, numpy(4, 3), numpy(4))
        ejx.GatedRMSNorm()(x, x, numpy(4))
        ejx.MeanPooling()(x, mask=[True] * 5 + [False], lengths=np.int32(4))
        ejx.MeanPooling("max", chunk_size=2)(x, cu_seqlens=[0, 4, 6])
        ejx.MeanPooling(num_segments=3)(x, segment_ids=np.array([0, 0, 1, 2, 1, 1], np.uint8))
        lstm: dict[str, Any] = dict(
            initial_state=(numpy(1), numpy(1)), lengths=np.int64(5), resets=[True] + [False] * 5
        )
        ejx.Recurrent()(x, numpy(4, 1), **lstm)
        ejx.GroupedMatmul()(x, numpy(2, 4, 3), [2, 3], numpy(2, 3), row_indices=np.array([0, 5, 1, 1, 2, 0]))

    eqx.filter_eval_shape(calls)  # traced alone: nothing is compiled


def test_the_arguments_of_a_batch_are_among_those_of_a_call():
    every, some = (get_type_hints(named, include_extras=True) for named in (Inputs, BatchInputs))
    assert some and all(str(word) == str(every.get(name)) for name, word in some.items())


def test_layers_take_arrays_of_numpy():
    """Ids and lengths may be unsigned."""

    def calls():
        key, x = jax.random.key(0), numpy(2, 6, 8)
        real, ids = np.ones((2, 6), bool), np.zeros((2, 6), np.uint32)
        attention = nn.MultiHeadAttention(8, num_heads=2, rope=nn.RotaryEmbedding(4), key=key)
        attention(
            x, positions=np.arange(6), segment_ids=ids, mask=np.ones((6, 6), bool), bias=numpy(1, 1, 6, 6)
        )
        attention(x, attention.init_cache(2, 6), padding_mask=real)
        attention(x[0], cu_seqlens=np.array([0, 4, 6], np.uint16))
        cross = nn.MultiHeadAttention(8, num_heads=2, causal=False, v_embed_dim=4, key=key)
        cross(x, kv_input=x, v_input=x[..., :4], kv_padding_mask=real)
        nn.RotaryEmbedding(4)(x.reshape(2, 6, 2, 4), offset=np.array([0, 3]), lengths=np.int32(9))
        layer = nn.Mamba1Mixer(8, key=key)
        layer(x, layer.init_state(2), padding_mask=real, segment_ids=ids)
        layer(x[0], cu_seqlens=np.array([0, 6]))
        nn.ShortConvolution(8, key=key).step(x[:, 0], numpy(3, 3, 8), state_indices=np.array([2, 0]))
        nn.GatedRMSNorm(8)(x, x)
        lstm = nn.LSTM(8, 4, key=key)
        lstm(x, lstm.init_state(2), lengths=np.array([6, 2], np.uint8), resets=~real)
        nn.GRU(8, 4, key=key)(x[0], cu_seqlens=np.array([0, 4, 6], np.uint16))
        experts = nn.MixtureOfExperts(8, 4, num_experts=3, top_k=2, key=key)
        experts(x, padding_mask=real)
        for cache in (nn.KVCache.init(2, 6, 2, 4), nn.RollingKVCache.init(2, 6, 2, 4)):
            cache.append(x.reshape(2, 6, 2, 4), x.reshape(2, 6, 2, 4), mask=real)

    eqx.filter_eval_shape(calls)  # traced alone: nothing is compiled


def test_a_wrong_shape_is_said_by_the_operation():
    """Not by the checker, whose message has no remedy."""
    q = jnp.ones((6, 2, 8))
    with pytest.raises(ValueError, match="add the missing"):
        ejx.GatedLinearAttention()(q[0], q, q, q)
    with pytest.raises(ValueError, match="k: expected"):
        ejx.GatedLinearAttention()(q, q[:3], q, -q)
    with pytest.raises(ValueError, match="q: "):
        ejx.FlashAttention()(q[0, 0], q, q)
    with pytest.raises(ValueError, match=r"x: expected .* with E = 8"):
        nn.Mamba1Mixer(8, key=jax.random.key(0))(q[..., :4])
    with pytest.raises(ValueError, match="platform: expected one of 'cuda'"):
        ejx.FlashAttention(platform="tritn")  # pyright: ignore


def test_results_have_types():
    """Those that a type checker finds, which checks this file too, are those that come; an array is no pair."""
    q = jnp.ones((6, 2, 8))

    def calls():
        out = assert_type(ejx.FlashAttention()(q, q, q), Array)
        assert isinstance(out, jax.Array)
        both = assert_type(ejx.FlashAttention()(q, q, q, mask=None, return_lse=True), tuple[Array, Array])
        assert len(both) == 2
        assert_type(ejx.flash_attention(q, q, q, causal=True), Array)
        assert_type(ejx.flash_attention(q, q, q, causal=True, return_lse=True), tuple[Array, Array])
        assert_type(ejx.attention(q, q, q), tuple[Array, Array])
        assert_type(ejx.scaled_dot_product_attention(q, q, q, return_residual=True), tuple[Array, Array])
        sparse = ejx.BlockSparseAttention(ejx.Mask.strided(2))(q, q, q, return_lse=True)
        assert len(assert_type(sparse, tuple[Array, Array])) == 2
        assert_type(ejx.block_sparse_attention(q, q, q, mask=~ejx.Mask.causal()), Array)
        assert_type(ejx.gated_linear_attention(q, q, q, -q), tuple[Array, Array])
        assert_type(ejx.gated_rms_norm(q), Array)
        assert_type(ejx.mean_pooling(q), Array)
        assert_type(ejx.grouped_matmul(q[0], jnp.ones((1, 8, 3)), [2]), Array)
        cache = ejx.PagedKVCache.init(2, 3, 2, 8).bind(jnp.array([[0, 1]]), jnp.array([6]))
        appended = ejx.RaggedPagedAttention(append=True)(q, cache, q, q, query_start_loc=jnp.array([0, 6]))
        assert_type(appended, tuple[Array, ejx.PagedKVCache])
        assert isinstance(appended[1], ejx.PagedKVCache)

    eqx.filter_eval_shape(calls)  # traced alone: nothing is compiled


def test_results_of_layers_have_types():

    def calls():
        key, x = jax.random.key(0), jnp.ones((1, 6, 8))
        layer = nn.MultiHeadAttention(8, num_heads=2, sliding_window=4, key=key)
        assert_type(layer(x), Array)
        assert_type(layer(x, return_lse=True), tuple[Array, Array])
        dense, rolling = layer.init_cache(1, 6), layer.init_cache(1, rolling=True)
        assert_type(layer(x, dense), tuple[Array, nn.KVCache])
        both = assert_type(layer(x, dense, return_lse=True), tuple[Array, nn.KVCache, Array])
        assert isinstance(both[1], nn.KVCache)
        found = assert_type(layer(x, rolling), tuple[Array, nn.RollingKVCache])
        assert isinstance(found[1], nn.RollingKVCache)
        tables: Any = {"page_table": jnp.array([[0, 1]]), "lengths": jnp.array([6])}
        batch = ejx.RaggedBatch(jnp.array([0, 6]), **tables, page_size=4, max_query_len=6, num_tokens=6)
        pages = layer.init_paged_cache(2, 4)
        assert_type(layer(x[0], pages, batch=batch), tuple[Array, ejx.PagedKVCache])
        paged = layer(x[0], pages, batch=batch, return_lse=True)
        assert isinstance(assert_type(paged, tuple[Array, ejx.PagedKVCache, Array])[1], ejx.PagedKVCache)
        mixer = nn.Mamba1Mixer(8, key=key)
        assert_type(mixer(x), Array)
        assert_type(mixer(x, mixer.init_state(1)), tuple[Array, nn.RecurrentState])
        assert_type(mixer.conv1d(jnp.ones((6, 16))), Array)
        assert_type(nn.GatedRMSNorm(8)(x), Array)
        experts = nn.MixtureOfExperts(8, 4, num_experts=3, top_k=2, key=key)
        assert_type(experts(x), Array)
        found = assert_type(experts(x, return_statistics=True), tuple[Array, nn.RouterStatistics])
        assert isinstance(found[1], nn.RouterStatistics)

    eqx.filter_eval_shape(calls)  # traced alone: nothing is compiled
