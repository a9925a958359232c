"""Public signatures: shapes in letters of one glossary, results with types, and annotations that are true of every legal call."""

import inspect
import re
from typing import Any, assert_type, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import ejkernel_eqx as ejx
from ejkernel_eqx import _shapes
from ejkernel_eqx.attention.signature import AttentionInputs, DotProductInputs
from ejkernel_eqx.dispatch import Platform, PlatformName
from tests import functional_stub

METHODS = {
    f"{cls.__name__}.{name}": getattr(cls, name)
    for cls in functional_stub.operations()
    for name in ("__call__", "step")
    if hasattr(cls, name)
}
GLOSSARY = {
    letter
    for line in (_shapes.__doc__ or "").splitlines()
    if line.startswith("| `")
    for letter in re.findall(r"`\*?(\w)\b[^`]*`", line.split("|")[1])
}


def test_platforms_have_their_names():
    assert set(get_args(PlatformName)) == {platform.value for platform in Platform}


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
        (ejx.FlashAttention.__call__, AttentionInputs, "return_lse"),
        (ejx.ScaledDotProductAttention.__call__, DotProductInputs, "return_residual"),
    ],
)
def test_named_arguments_are_those_of_the_call(method, named, decides):
    parameters = inspect.signature(method).parameters.values()
    written = {p.name: str(p.annotation) for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert written.pop(decides) == "<class 'bool'>"
    assert {name: str(word) for name, word in get_type_hints(named, include_extras=True).items()} == written


def numpy(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_arrays_of_numpy_and_lists_are_legal():
    """The annotations are checked here."""
    q = numpy(6, 2, 8)
    packed = ejx.FlashAttention()(q, q, q, cu_seqlens=[0, 3, 6], alibi_slopes=[0.5, 1.0], sinks=[0.0, 1.0])
    arrays: dict[str, Any] = {"cu_seqlens": np.array([0, 3, 6]), "alibi_slopes": numpy(2) * 0 + 1}
    assert packed.shape == ejx.FlashAttention()(q, q, q, **arrays).shape
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


def test_a_wrong_shape_is_said_by_the_operation():
    """Not by the checker, whose message has no remedy."""
    q = jnp.ones((6, 2, 8))
    with pytest.raises(ValueError, match="add the missing"):
        ejx.GatedLinearAttention()(q[0], q, q, q)
    with pytest.raises(ValueError, match="k: expected"):
        ejx.GatedLinearAttention()(q, q[:3], q, q)
    with pytest.raises(ValueError, match="q: "):
        ejx.FlashAttention()(q[0, 0], q, q)
    with pytest.raises(ValueError, match="platform: expected one of 'cuda'"):
        ejx.FlashAttention(platform="tritn")  # pyright: ignore


def test_results_have_types():
    """Those that a type checker finds, which checks this file too, are those that come."""
    q = jnp.ones((6, 2, 8))
    out = assert_type(ejx.FlashAttention()(q, q, q), Array)
    assert isinstance(out, jax.Array)
    both = assert_type(ejx.FlashAttention()(q, q, q, mask=None, return_lse=True), tuple[Array, Array])
    assert len(both) == 2
    assert_type(ejx.flash_attention(q, q, q, causal=True), Array)
    assert_type(ejx.flash_attention(q, q, q, causal=True, return_lse=True), tuple[Array, Array])
    assert_type(ejx.attention(q, q, q), tuple[Array, Array])
    assert_type(ejx.scaled_dot_product_attention(q, q, q, return_residual=True), tuple[Array, Array])
    assert_type(ejx.gated_linear_attention(q, q, q, -q), tuple[Array, Array])
    assert_type(ejx.gated_rms_norm(q), Array)
    cache = ejx.PagedKVCache.init(2, 3, 2, 8).bind(jnp.array([[0, 1]]), jnp.array([6]))
    packed = {"query_start_loc": jnp.array([0, 6]), "max_query_len": 6}
    appended = ejx.RaggedPagedAttention(append=True)(
        q, cache, q, q, query_start_loc=packed["query_start_loc"]
    )
    assert_type(appended, tuple[Array, ejx.PagedKVCache])
    assert isinstance(appended[1], ejx.PagedKVCache)
