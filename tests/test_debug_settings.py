"""Calls outside `jax.jit` under the settings of JAX that look for mistakes: infinite values that a program gives, and leaked tracers."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import INTERPRET, normal, qkv
from tests.nn import paged_layers, recurrent_layers
from tests.operations import made, OPERATIONS

B, T = 2, 6
IDS = jnp.array([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, -1, -1]])


def total(out: Any) -> Any:
    return sum(jnp.sum(x) for x in jax.tree.leaves(out))


def check(function: Any, *args: Any, gradient: bool = True) -> None:
    """The call and its gradient in all floats of its arguments, both outside of `jit`: no program gives an infinity."""
    floats, others = eqx.partition(args, eqx.is_inexact_array)
    with jax.debug_infs(True):
        jax.block_until_ready(function(*args))
        if gradient:
            loss = lambda floats: total(function(*eqx.combine(floats, others)))
            jax.block_until_ready(jax.grad(loss)(floats))


def attention(platform):
    """Rows that see nothing, by ids, lengths and a mask, with sinks and without."""
    op = ejx.FlashAttention(causal=True, platform=platform)
    hidden: dict[str, Any] = dict(
        segment_ids=IDS, kv_lengths=jnp.array([0, 6]), mask=jnp.tri(T, dtype=bool).at[2].set(False)
    )
    check(lambda arrays: op(**arrays, **hidden), qkv(B, t=T, s=T))
    check(lambda arrays, sinks: op(**arrays, sinks=sinks, **hidden), qkv(B, t=T, s=T), normal(3, 4))


def block_sparse(platform):
    op = ejx.BlockSparseAttention(ejx.Mask.causal() | ejx.Mask.strided(3), block_size=4, platform=platform)
    block_map = jnp.array([[True, False], [False, False]])
    check(lambda arrays: op(**arrays, block_map=block_map), qkv(B, t=T, s=T))


def pooling(platform):
    """Of the largest values too, with rows and chunks that have none."""
    x = normal(0, B, T, 8)
    largest = ejx.MeanPooling("max", chunk_size=2, normalize=True, platform=platform)
    ids = ejx.MeanPooling(num_segments=3, normalize=True, platform=platform)
    check(lambda x: largest(x, lengths=jnp.array([5, 0])), x)
    check(lambda x: ids(x, segment_ids=IDS), x)


def grouped_matmul(platform):
    """With an empty group and rows of no group."""
    op = ejx.GroupedMatmul("silu", platform=platform)
    sizes, rows = jnp.array([3, 0, 2]), jnp.array([0, 2, 2, 1, 0, 1])
    x, w, up, bias = normal(0, 4, 8), normal(1, 3, 8, 6), normal(2, 3, 8, 6), normal(3, 3, 6)
    check(lambda x, w, up, bias: op(x, w, sizes, bias, up=up, row_indices=rows), x, w, up, bias)


def paged_attention(platform):
    """With a sequence that has neither queries nor keys."""
    cache = ejx.PagedKVCache.init(6, 4, 2, 16).bind(
        jnp.array([[5, 2, 0], [-1, -1, -1], [1, 3, -1]]), jnp.array([9, 0, 4])
    )
    q, k, v = (normal(n, T, heads, 16) for n, heads in enumerate((4, 2, 2)))
    some: dict[str, Any] = {"query_start_loc": jnp.array([0, 3, 3, 5]), "max_query_len": 3}
    bias = jnp.zeros((3, 3)).at[2, 1].set(-jnp.inf)
    hiding = lambda q, bias: ejx.UnifiedAttention(platform=platform)(q, cache, qq_bias=bias, **some)
    append = lambda q: ejx.RaggedPagedAttention(append=True, platform=platform)(q, cache, k, v, **some)
    check(lambda q: ejx.PagedAttention(platform=platform)(q, cache), q[:3], gradient=False)
    check(hiding, q, bias, gradient=False)
    check(append, q, gradient=False)


EDGES = {call.__name__: call for call in (attention, block_sparse, pooling, grouped_matmul, paged_attention)}


@pytest.mark.few(2)
@pytest.mark.parametrize("platform", ["xla", INTERPRET])
@pytest.mark.parametrize("name", EDGES)
def test_edges(name, platform):
    EDGES[name](platform)


@pytest.mark.few(2)
@pytest.mark.parametrize("platform", ["xla", INTERPRET])
@pytest.mark.parametrize(
    "name", [name for name in OPERATIONS if name not in ("attention", "sparse", "one query")]
)
def test_operations(name, platform):
    """With padding, where there may be some."""
    op, args = made(name, platform)
    packing = {} if name in ("norm", "pooling") else {"segment_ids": jnp.array([0] * 4 + [1] * 3 + [-1] * 2)}
    check(lambda *args: op(*args, **packing), *args)


def test_an_lse_of_minus_infinity_is_seen():
    """It is a result, and says that a row sees nothing."""
    op: Any = ejx.FlashAttention()
    with pytest.raises(FloatingPointError, match="inf"), jax.debug_infs(True):
        op(**qkv(B, t=T, s=T), segment_ids=IDS, return_lse=True)


@pytest.mark.slow
def test_layers():
    x = normal(0, B, T, recurrent_layers.EMBED)
    layer, mamba = paged_layers.attention("norm, sinks, window"), recurrent_layers.build("mamba")
    check(lambda layer, x: layer(x, padding_mask=IDS >= 0), layer, x)
    check(lambda x: layer(x, layer.init_cache(B, T + 2), padding_mask=IDS >= 0), x, gradient=False)
    check(lambda layer, x: layer(x, layer.init_state(B), padding_mask=IDS >= 0), mamba, x)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_attention_layer_leaks_nothing(compiled):
    layer, x = paged_layers.attention("gqa, rope"), normal(0, B, 4, recurrent_layers.EMBED)
    call = lambda layer, x: layer(x)
    decode = lambda layer, x: layer(x[:, :1], layer(x, layer.init_cache(B, 8))[1])
    if compiled:
        call, decode = eqx.filter_jit(call), eqx.filter_jit(decode)
    with jax.checking_leaks():
        call(layer, x)
        eqx.filter_grad(lambda layer, x: total(call(layer, x)))(layer, x)
        decode(layer, x)
