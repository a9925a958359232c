"""Operations and layers under JAX's strict settings, which hold in all tests and which a user may switch on: no promotion between dtypes or
ranks. All are traced with their gradients; nothing is compiled."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import INTERPRET, normal, qkv
from tests.cells import cases as cells
from tests.convolution import cases as convolution
from tests.nn import paged_layers, recurrent_layers
from tests.normalization import cases as normalization
from tests.pooling import cases as pooling
from tests.recurrence import operations

B, T, H, K, D = 2, 12, 4, 2, 16
PLATFORMS = pytest.mark.parametrize("platform", ["xla", INTERPRET])
IDS = jnp.array([[0] * 5 + [1] * 7, [0] * 9 + [-1] * 3])
LENGTHS = jnp.array([12, 7])


@pytest.fixture(autouse=True)
def strict_ranks():
    """Also where the rest of the suite runs without."""
    with jax.numpy_rank_promotion("raise"):
        yield


def trace(function: Any, *args: Any, **kwargs: Any) -> None:
    """The function and its gradient in all floats of its arguments."""

    def loss(given: Any) -> Any:
        out = function(*given[0], **given[1])
        floats = jax.tree.leaves(eqx.filter(out, eqx.is_inexact_array))
        return sum((jnp.sum(x.astype(jnp.float32)) for x in floats), jnp.zeros(()))

    floats, others = eqx.partition((args, kwargs), eqx.is_inexact_array)
    assert all(
        x.shape == dx.shape
        for x, dx in zip(
            jax.tree.leaves(floats),
            jax.tree.leaves(
                jax.eval_shape(jax.grad(lambda floats: loss(eqx.combine(floats, others))), floats)
            ),
            strict=True,
        )
    )


CALLS: dict[str, dict[str, Any]] = {
    "window": dict(mask=ejx.Mask.sliding_window(4, 0)),
    "segments": dict(segment_ids=IDS),
    "segments of all rows": dict(segment_ids=IDS[0]),
    "lengths": dict(q_lengths=LENGTHS, kv_lengths=LENGTHS),
    "offsets": dict(q_offset=jnp.array([0, 3])),
    "prefix": dict(mask=ejx.Mask.prefix(jnp.array([3, 5])) & ejx.Mask.from_lengths(9, LENGTHS)),
    "chunks": dict(mask=ejx.Mask.chunked(4) & ejx.Mask.causal()),
    "dense": dict(mask=ejx.Mask.from_dense(np.tri(T, dtype=bool)) & ejx.Mask.from_segments(IDS)),
    "types": dict(mask=ejx.Mask.token_types(IDS) & ejx.Mask.from_segments(IDS[0])),
    "runs of types": dict(
        mask=ejx.Mask.token_types(IDS[0], runs=True) & ejx.Mask.from_lengths(None, LENGTHS)
    ),
    "two segments": dict(mask=ejx.Mask.from_segments(IDS[0]) & ejx.Mask.from_segments(IDS)),
    "bias, sinks, slopes": dict(bias=normal(3, T, T), sinks=normal(4, H, 2), alibi_slopes=normal(5, H)),
    "bias of rows": dict(bias=normal(3, B, 1, 1, T), sinks=normal(4, H)),
    "dropout": dict(key=jax.random.key(0), inference=False),
}


@pytest.mark.few(3)
@PLATFORMS
@pytest.mark.parametrize("name", CALLS)
def test_attention(platform, name):
    options: dict[str, Any] = {"causal": name in ("offsets", "lengths", "dropout"), "platform": platform}
    options |= {"dropout_rate": 0.1} if name == "dropout" else {}
    trace(ejx.FlashAttention(**options), **qkv(B, t=T, s=T), **CALLS[name])
    mask = CALLS[name].get("mask")
    if mask is not None:
        assert mask.as_array(T, T).shape[-2:] == (T, T)


@PLATFORMS
def test_packed_and_merged_attention(platform):
    op = ejx.FlashAttention(causal=True, platform=platform)
    trace(op, **qkv(t=T, s=T), cu_seqlens=jnp.array([0, 5, 12]))

    def halves(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        parts = [
            op(q, k[:, part], v[:, part], return_lse=True, q_offset=0) for part in (slice(0, 6), slice(6, 12))
        ]
        return ejx.merge_attention(*parts, sinks=sinks)

    trace(halves, **qkv(B, t=T, s=T), sinks=normal(4, H, 2))


# Decays of values run on XLA alone. Around the kernels what is packed has the most broadcasts: the other forms where time is no matter.
FORMS = ("segments", "rows", "offsets", "step")
RECURRENCES = [
    pytest.param(
        name, platform, form, marks=() if "xla" in platform or form == "segments" else pytest.mark.slow
    )
    for name in operations.CASES
    for platform in ("xla", INTERPRET)
    for form in FORMS
    if (name, platform) != ("linear value", INTERPRET)
]


@pytest.mark.few(4)
@pytest.mark.parametrize("name, platform, form", RECURRENCES)
def test_recurrences(name, platform, form):
    case = operations.CASES[name]
    config = {"config": operations.CONFIG} if platform == "xla" else {"config": None}
    module = case.module(platform=platform, **config)
    lead = () if form == "offsets" else (B,)
    arrays = case.make(*lead, *(() if form == "step" else (T,)), dtype=jnp.float32)
    state = case.make_state(*((2,) if form == "offsets" else lead), dtype=jnp.float32)
    if form == "step":
        jax.eval_shape(lambda arrays, state: case.call(module.step, arrays, state), arrays, state)
        return
    more = {"rows": {}, "segments": {"segment_ids": IDS}, "offsets": {"cu_seqlens": jnp.array([0, 5, 12])}}[
        form
    ]
    trace(case.run(module, **more), arrays, state)


@pytest.mark.few(3)
@PLATFORMS
@pytest.mark.parametrize("form", ["rows", "segments", "offsets", "step"])
def test_selective_scan(platform, form):
    lead, channels, states = (() if form == "offsets" else (B,)), 8, 4
    over = lead if form == "step" else (*lead, T)
    wide, narrow = normal(0, *over, channels), normal(1, *over, 1, states)
    given: dict[str, Any] = dict(
        x=wide,
        dt=wide,
        A=-jnp.abs(normal(2, channels, states)),
        B=narrow,
        C=narrow,
        D=normal(3, channels),
        z=wide,
    )
    given |= dict(dt_bias=normal(4, channels))
    state = normal(5, *((2,) if form == "offsets" else lead), channels, states)
    op: Any = ejx.StateSpaceV1(dt_softplus=True, platform=platform)
    if form == "step":
        names = ("x", "dt", "A", "B", "C")
        step: Any = op.step
        call = lambda given, state: step(*(given.pop(n) for n in names), state, **given)
        jax.eval_shape(call, given, state)
        return
    more = {"rows": {}, "segments": {"segment_ids": IDS}, "offsets": {"cu_seqlens": jnp.array([0, 5, 12])}}[
        form
    ]
    trace(op, **given, initial_state=state, **more)


@pytest.mark.few(4)
@PLATFORMS
@pytest.mark.parametrize("name", convolution.CASES)
def test_convolution(platform, name):
    case = convolution.CASES[name]
    inputs, cotangents = convolution.make(case)
    operation = ejx.CausalConv1d(case.activation, platform=platform)
    jax.eval_shape(convolution.results, operation, inputs, case.packing, cotangents)


@pytest.mark.few(5)
@PLATFORMS
@pytest.mark.parametrize("name", normalization.CASES)
def test_norm(platform, name):
    case = normalization.CASES[name]
    jax.eval_shape(normalization.results, case.operation(platform), *normalization.make(case))


@pytest.mark.few(5)
@PLATFORMS
@pytest.mark.parametrize(
    "name", [name for name, case in pooling.CASES.items() if case.segments or not case.ids]
)
def test_pooling(platform, name):
    case = pooling.CASES[name]
    x, dout = pooling.make(case)
    jax.eval_shape(pooling.results, case.operation(platform), x, case.tables(), dout)


@pytest.mark.few(3)
@PLATFORMS
@pytest.mark.parametrize("name", cells.CASES)
def test_cells(platform, name):
    case = cells.CASES[name]
    arrays, cotangents = cells.make(case)
    operation = case.operation(platform=platform)
    jax.eval_shape(cells.results, operation, arrays, case.packing, cotangents)


QUERIES = {"query_start_loc": jnp.array([0, 2, 5]), "max_query_len": 3}
TABLE = jnp.array([[5, 2, 0], [1, 3, -1]])


@pytest.mark.few(2)
@PLATFORMS
@pytest.mark.parametrize("scales", [None, "token", "head"])
@pytest.mark.parametrize("kind", [ejx.PagedKVCache, ejx.PagedLatentCache])
def test_paged_attention(platform, kind, scales):
    latent = kind is ejx.PagedLatentCache
    dtype = jnp.int8 if scales else jnp.float32
    cache = kind.init(6, 4, *((D, 8) if latent else (K, D)), dtype=dtype, scales=scales)
    cache = cache.bind(TABLE, jnp.array([9, 4]))
    q, sinks = normal(0, 5, H, D + 8 if latent else D), normal(3, H, 2)
    new = [normal(1, 5, *shape) for shape in (((D,), (8,)) if latent else ((K, D), (K, D)))]
    options: dict[str, Any] = dict(
        sliding_window=3, logits_soft_cap=2.0, softmax_scale=0.2, platform=platform
    )

    def calls(q: Any, cache: Any, new: Any) -> Any:
        yield ejx.PagedAttention(**options)(q[:2], cache, sinks=sinks, return_lse=True)
        for build in (ejx.PrefillPagedAttention, ejx.RaggedPagedAttention, ejx.UnifiedAttention):
            yield build(**options)(q, cache, sinks=sinks, **QUERIES)
            yield build(**options)(q[None], cache, **QUERIES)
        append = ejx.RaggedPagedAttention(append=True, **options)
        yield append(q, cache, *new, **QUERIES)
        tree = {"alibi_slopes": normal(4, H), "qq_bias": normal(5, 3, 3)}
        yield ejx.UnifiedAttention(**options)(q, cache, **tree, **QUERIES)
        yield cache.gather(9), cache.append(*new, jnp.arange(5)), cache.copy_pages(TABLE[0], TABLE[1])

    jax.eval_shape(lambda *given: list(calls(*given)), q, cache, new)


@PLATFORMS
def test_ragged_decoding(platform):
    q, k, v = normal(0, B, 3, H, D), normal(1, B, 3, T, K, D), normal(2, B, 3, T, K, 8)
    op = ejx.RaggedDecodeAttention(sliding_window=5, platform=platform)
    for start, end in ((jnp.zeros((B, 3), int), jnp.full((B, 3), 7)), (jnp.array(0), jnp.array(7))):
        jax.eval_shape(lambda *given: op(*given, sinks=normal(3, H)), q, k, v, start, end)


@pytest.mark.slow
def test_layers_over_pages():
    batch = ejx.RaggedBatch.build([3, 2], [9, 4], [[5, 2, 0], [1, 3]], page_size=4, state_indices=[2, 0])
    for name in paged_layers.ATTENTION:
        layer = paged_layers.attention(name)
        x = normal(0, batch.num_tokens, recurrent_layers.EMBED)
        call = lambda x, cache, layer=layer: layer(x, cache, batch=batch)
        jax.eval_shape(call, x, layer.init_paged_cache(6, 4))
    for name in recurrent_layers.LAYERS:
        layer = recurrent_layers.build(name)
        call = lambda x, state, layer=layer: layer(x, state, batch=batch)
        jax.eval_shape(call, normal(0, batch.num_tokens, recurrent_layers.EMBED), layer.init_state(3))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", paged_layers.ATTENTION)
def test_attention_layers(name):
    layer, x, mask = paged_layers.attention(name), normal(0, B, T, recurrent_layers.EMBED), IDS >= 0
    trace(lambda layer, x: layer(x, padding_mask=mask), layer, x)
    cache = layer.init_cache(B, T)
    for prefill in (T, 1):
        jax.eval_shape(lambda x, cache: layer(x, cache, padding_mask=None), x[:, :prefill], cache)
    jax.eval_shape(lambda x, cache: layer(x, cache, padding_mask=mask), x, cache)


@pytest.mark.slow
@pytest.mark.parametrize("name", recurrent_layers.LAYERS)
def test_recurrent_layers(name):
    layer = recurrent_layers.LAYERS[name].build(key=jax.random.key(0))
    x = normal(0, B, T, recurrent_layers.EMBED)
    trace(lambda layer, x: layer(x, layer.init_state(B), padding_mask=IDS >= 0), layer, x)
    trace(lambda layer, x: layer(x, segment_ids=IDS), layer, x)
    trace(lambda layer, x: layer(x, cu_seqlens=jnp.array([0, 5, 12])), layer, x[0])
    jax.eval_shape(lambda x, state: layer(x, state), x[:, :1], layer.init_state(B))
