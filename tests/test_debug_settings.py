"""Calls outside `jax.jit` under the settings of JAX that look for mistakes: infinite values that a program gives, and leaked tracers."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.nn import MultiHeadAttention, RotaryEmbedding
from tests.attention.dense import INTERPRET, normal, qkv
from tests.nn import paged_layers, recurrent_layers
from tests.recurrence import operations

B, T = 2, 6
PLATFORMS = pytest.mark.parametrize("platform", ["xla", INTERPRET])
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


ATTENTION: dict[str, Any] = {
    "causal": {},
    "rows that see nothing": dict(segment_ids=IDS, kv_lengths=jnp.array([0, 6])),
    "hidden by a mask": dict(mask=jnp.tri(T, dtype=bool).at[2].set(False)),
    "sinks": dict(segment_ids=IDS, sinks=jnp.array([0.5, -1.0, 0.0, 2.0])),
}


@pytest.mark.few(1)
@PLATFORMS
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(platform, name):
    op = ejx.FlashAttention(causal=True, platform=platform)
    arrays = qkv(B, t=T, s=T)
    assert arrays["q"].shape[-2] == 4
    check(lambda arrays, more: op(**arrays, **more), arrays, ATTENTION[name])


@PLATFORMS
def test_block_sparse_attention(platform):
    op = ejx.BlockSparseAttention(ejx.Mask.causal() | ejx.Mask.strided(3), block_size=4, platform=platform)
    block_map = jnp.array([[True, False], [False, False]])
    check(lambda arrays: op(**arrays, block_map=block_map), qkv(B, t=T, s=T))


def test_attention_with_weights():
    op = ejx.Attention(causal=True)
    check(lambda arrays: op(**arrays, segment_ids=IDS), qkv(B, t=T, s=T))


def test_an_lse_of_minus_infinity_is_seen():
    """It is a result, and says that a row sees nothing."""
    op: Any = ejx.FlashAttention()
    with pytest.raises(FloatingPointError, match="inf"), jax.debug_infs(True):
        op(**qkv(B, t=T, s=T), segment_ids=IDS, return_lse=True)


@pytest.mark.few(1)
@PLATFORMS
@pytest.mark.parametrize("name", [name for name in operations.FULL if name != "linear value"])
def test_recurrences(platform, name):
    case = operations.CASES[name]
    module = case.module(platform=platform, **({} if platform == "xla" else {"config": None}))
    state = case.make_state(B, dtype=jnp.float32)
    check(case.run(module, segment_ids=IDS), case.make(B, T, dtype=jnp.float32), state)
    step = lambda arrays, state: case.call(module.step, arrays, state)
    check(step, case.make(B, dtype=jnp.float32), state, gradient=False)


@pytest.mark.few(1)
@PLATFORMS
@pytest.mark.parametrize("packing", ["segment_ids", "cu_seqlens"])
@pytest.mark.parametrize("softplus", [True, False])
def test_selective_scan(platform, packing, softplus):
    op = ejx.StateSpaceV1(dt_softplus=softplus, platform=platform)
    lead = () if packing == "cu_seqlens" else (B,)
    wide, narrow = normal(0, *lead, T, 8), normal(1, *lead, T, 4)
    given = dict(x=wide, dt=jnp.abs(wide), A=-jnp.exp(normal(2, 8, 4)), B=narrow, C=narrow)
    given |= dict(dt_bias=-jnp.abs(normal(4, 8)), initial_state=normal(5, B, 8, 4))
    packed = {packing: jnp.array([0, 2, 6]) if packing == "cu_seqlens" else IDS}
    check(lambda given: op(**given, **packed), given)


@pytest.mark.few(1)
@PLATFORMS
def test_convolution_and_norm(platform):
    x = normal(0, B, T, 8)
    conv, norm = ejx.CausalConv1d(platform=platform), ejx.GatedRMSNorm(platform=platform)
    check(lambda x, weight: conv(x, weight, segment_ids=IDS), x, normal(1, 8, 3))
    check(lambda x, z: norm(x, z), x, normal(2, B, T, 8))


@pytest.mark.few(1)
@PLATFORMS
def test_pooling(platform):
    """Of the largest values too, with rows and chunks that have none."""
    x = normal(0, B, T, 8)
    largest = ejx.MeanPooling("max", chunk_size=2, normalize=True, platform=platform)
    ids = ejx.MeanPooling(num_segments=3, normalize=True, platform=platform)
    check(lambda x: largest(x, lengths=jnp.array([5, 0])), x)
    check(lambda x: ids(x, segment_ids=IDS), x)


@pytest.mark.few(1)
@PLATFORMS
@pytest.mark.parametrize("packing", ["segment_ids", "cu_seqlens"])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_recurrent_cells(platform, packing, cell):
    op, gates = ejx.Recurrent(cell, platform=platform), 16 if cell == "lstm" else 12
    lead = () if packing == "cu_seqlens" else (B,)
    state = (normal(2, B, 4), normal(3, B, 4)) if cell == "lstm" else normal(2, B, 4)
    packed = {packing: jnp.array([0, 2, 6]) if packing == "cu_seqlens" else IDS}
    call = lambda x, weight, bias, state: op(x, weight, bias, initial_state=state, **packed)
    check(call, normal(0, *lead, T, gates), normal(1, gates, 4), normal(4, gates), state)


@pytest.mark.few(1)
@PLATFORMS
def test_grouped_matmul(platform):
    """With an empty group and rows of no group."""
    op = ejx.GroupedMatmul("silu", platform=platform)
    sizes, rows = jnp.array([3, 0, 2]), jnp.array([0, 2, 2, 1, 0, 1])
    x, w, up, bias = normal(0, 4, 8), normal(1, 3, 8, 6), normal(2, 3, 8, 6), normal(3, 3, 6)
    check(lambda x, w, up, bias: op(x, w, sizes, bias, up=up, row_indices=rows), x, w, up, bias)


@pytest.mark.few(1)
@PLATFORMS
def test_paged_attention(platform):
    """With a sequence that has neither queries nor keys."""
    cache = ejx.PagedKVCache.init(6, 4, 2, 16).bind(
        jnp.array([[5, 2, 0], [-1, -1, -1], [1, 3, -1]]), jnp.array([9, 0, 4])
    )
    q, k, v = (normal(n, T, heads, 16) for n, heads in enumerate((4, 2, 2)))
    some: dict[str, Any] = {"query_start_loc": jnp.array([0, 3, 3, 5]), "max_query_len": 3}
    bias = jnp.zeros((3, 3)).at[2, 1].set(-jnp.inf)
    hiding = lambda q, bias: ejx.UnifiedAttention(platform=platform)(q, cache, qq_bias=bias, **some)
    check(lambda q: ejx.PagedAttention(platform=platform)(q, cache), q[:3], gradient=False)
    check(hiding, q, bias, gradient=False)
    for append in (False, True):
        op = ejx.RaggedPagedAttention(append=append, platform=platform)
        new = (k, v) if append else ()
        check(lambda q, op=op, new=new: op(q, cache, *new, **some), q, gradient=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa, rope", "norm, sinks, window"])
def test_attention_layers(name):
    layer, x = paged_layers.attention(name), normal(0, B, T, recurrent_layers.EMBED)
    check(lambda layer, x: layer(x, padding_mask=IDS >= 0), layer, x)
    call = lambda x: layer(x, layer.init_cache(B, T + 2), padding_mask=IDS >= 0)
    check(call, x, gradient=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", recurrent_layers.LAYERS)
def test_recurrent_layers(name):
    layer, x = recurrent_layers.build(name), normal(0, B, T, recurrent_layers.EMBED)
    check(lambda layer, x: layer(x, layer.init_state(B), padding_mask=IDS >= 0), layer, x)


def _layer():
    return MultiHeadAttention(16, num_heads=4, num_kv_heads=2, rope=RotaryEmbedding(4), key=jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_attention_layer_leaks_nothing(compiled):
    layer, x = _layer(), normal(0, B, 4, 16)
    call = lambda layer, x: layer(x)
    decode = lambda layer, x: layer(x[:, :1], layer(x, layer.init_cache(B, 8))[1])
    if compiled:
        call, decode = eqx.filter_jit(call), eqx.filter_jit(decode)
    with jax.checking_leaks():
        call(layer, x)
        eqx.filter_grad(lambda layer, x: total(call(layer, x)))(layer, x)
        decode(layer, x)
