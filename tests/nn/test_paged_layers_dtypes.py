"""Layers over pages in bfloat16, over 8-bit pages, and with pools and batches of other dtypes than they make themselves."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import PagedAttention, PagedKVCache, PagedLatentCache, PageTable, RaggedBatch
from ejkernel_eqx.nn import RotaryEmbedding
from tests.nn import paged_layers as small
from tests.nn import recurrent_layers
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

NAME = "norm, sinks, window"
EIGHT: Any = {"int8": jnp.int8, "float8": jnp.float8_e4m3fn, "float8_e5m2": jnp.float8_e5m2}
KINDS = {
    "bfloat16": {"dtype": jnp.bfloat16},
    **{f"{name} token": {"dtype": dtype} for name, dtype in EIGHT.items()},
    **{f"{name} head": {"dtype": EIGHT[name], "scales": "head"} for name in ("int8", "float8")},
    "int8 values": {"dtype": (None, jnp.int8)},
    "int8 keys, bfloat16 values": {"dtype": (jnp.int8, jnp.bfloat16)},
}


def in_dtype(name, dtype):
    """The same layer in every dtype: its weights are numbers of bfloat16."""
    layer = small.attention(name)
    narrow = lambda x: x.astype(jnp.bfloat16).astype(dtype)
    return jax.tree.map(lambda x: narrow(x) if eqx.is_inexact_array(x) else x, layer)


@quick
def run_over_held(layer, x, k, v):
    """The layer's output for rows `[n, T, E]` that attend to keys and values as they are held."""
    k, v = k.astype(x.dtype), v.astype(x.dtype)
    q = x @ layer.q_proj.weight.T + layer.q_proj.bias[None, None]
    q = layer.rope(jax.vmap(jax.vmap(jax.vmap(layer.q_norm)))(q.reshape(*x.shape[:-1], layer.num_heads, -1)))
    out = layer.attention(q, k, v, sinks=layer.sinks)
    return out.reshape(*x.shape[:-1], -1) @ layer.o_proj.weight.T


@functools.cache
def dense_cache():
    layer = in_dtype(NAME, "float32")
    x = small.inputs().astype(jnp.bfloat16).astype(jnp.float32)
    return quick(lambda x: layer(x, layer.init_cache(small.SEQUENCES, small.TOKENS)))(x)[1]


# Each of them, the layer in float32 and in bfloat16 by turns.
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, dtype", [(kind, ("bfloat16", "float32")[n % 2]) for n, kind in enumerate(KINDS)]
)
def test_attention_to_what_is_held(kind, dtype):
    """What every token gets is exact for the numbers that the pages stand for, and these are near the new ones."""
    layer, wide = in_dtype(NAME, dtype), in_dtype(NAME, "float32")
    x = small.inputs().astype(jnp.bfloat16).astype(dtype)
    assert layer.init_paged_cache(1, small.PAGE).k.dtype == dtype
    cache = layer.init_paged_cache(small.PAGES, small.PAGE, **KINDS[kind])
    if cache.scales == "head":
        largest = 6 / (127 if kind.startswith("int8") else 448)
        cache = cache.with_scales(jnp.full(2, largest), jnp.array([1.0, 1.5]) * largest)
        scales = cache.k_scale, cache.v_scale
        cache = small.poisoned(cache)
        cache = eqx.tree_at(lambda c: (c.k_scale, c.v_scale), cache, scales)
    else:
        cache = small.poisoned(cache)
    table = PageTable(small.PAGES, small.PAGE)
    y, cache = small.serve(small.advance(layer), cache, x, table=table, buckets=small.CHUNKS)
    held = cache.bind(table.rows(range(small.SEQUENCES)), np.full(small.SEQUENCES, small.TOKENS))
    held = held.gather(small.TOKENS, dtype=jnp.float32)
    expected = run_over_held(wide, x.astype(jnp.float32), *held)
    assert_close(y, expected, dtype, name=kind)
    for ours, theirs in zip(held, (dense_cache().k, dense_cache().v), strict=True):
        kept = {"bfloat16": "bfloat16", "float8_e5m2 token": "float8_e5m2"}.get(kind, "float8_e4m3fn")
        assert_close(ours, theirs, kept, name=kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, kept", [("mamba", "float32"), ("mamba2", "bfloat16"), ("qwen3-next", "bfloat16")]
)
def test_recurrent_layers_in_bfloat16(name, kept):
    """Pools keep the dtypes that they came with, whatever the layer computes in."""
    layer, x = recurrent_layers.build(name, jnp.bfloat16), small.inputs().astype(jnp.bfloat16)
    expected, _ = quick(lambda x: layer(x, layer.init_state(small.SEQUENCES)))(x)
    pool = small.poisoned(layer.init_state(small.SLOTS, kept))
    y, new = small.serve(small.advance(layer), pool, x)
    assert_close(y, expected, "bfloat16", name=name)
    assert [a.dtype for a in jax.tree.leaves(new)] == [a.dtype for a in jax.tree.leaves(pool)]


@pytest.mark.slow
def test_batches_of_other_integers():
    """A batch that is made inside of jit may be of whatever integers are at hand."""
    layer, mixer = small.attention(rope=RotaryEmbedding(8)), recurrent_layers.build("mamba2")
    x = jnp.asarray(small.inputs()[0, :2])
    cache = layer.init_paged_cache(5, small.PAGE), mixer.init_state(3)
    call = quick(lambda batch, x, pages, pool: (layer(x, pages, batch=batch), mixer(x, pool, batch=batch)))

    def make(new, as_array):
        arrays = map(as_array, ([0, new], [5], [[3, 1]], [1]))
        batch = RaggedBatch(*arrays, page_size=small.PAGE, max_query_len=new, num_tokens=new)
        assert {a.dtype for a in jax.tree.leaves(batch)} == {jnp.dtype("int32")}
        return batch

    for new in (1, 2):
        expected = call(make(new, functools.partial(jnp.asarray, dtype=jnp.int32)), x[:new], *cache)
        for integer in ("int16", "uint8", "numpy", "int64"):
            as_array = np.asarray if integer == "numpy" else functools.partial(jnp.asarray, dtype=integer)
            with jax.enable_x64(integer == "int64"):
                assert eqx.tree_equal(call(make(new, as_array), x[:new], *cache), expected), integer


@pytest.mark.slow
def test_caches_bound_to_other_integers(enable_x64):
    """By the constructor, as by `bind`."""
    tables = jnp.array([[2, 0], [1, -1]]), jnp.array([4, 2])
    assert tables[0].dtype == jnp.int64
    room = jnp.arange(3 * small.PAGE)
    for kind, inner in ((PagedKVCache, (2, 8)), (PagedLatentCache, (8,))):
        cache = kind.init(3, small.PAGE, *inner[:1], 8)
        values = room.astype(jnp.float32).reshape(-1, *(1,) * len(inner))
        values = jnp.broadcast_to(values, (len(room), *inner))
        cache = cache.append(values, values, room)
        first, second = jax.tree.leaves(cache)
        made = kind(first, second, *tables)
        assert eqx.tree_equal(made, cache.bind(*tables))
        assert {x.dtype.name for x in jax.tree.leaves(made.gather())} == {"float32"}
        q = jnp.ones((2, 2, 16 if kind is PagedLatentCache else 8), jnp.float32)
        out = quick(PagedAttention(softmax_scale=0.0))(q, made)
        assert_close(out[:, 0, 0], jnp.array([(6 + 7 + 8 + 0) / 4, (3 + 4) / 2], jnp.float32))


def test_numbers_that_are_no_int32_are_no_page():
    with jax.enable_x64(True):
        table = jnp.array([[2**32 + 1, -(2**40), 1]])
        batch = RaggedBatch(
            jnp.array([0, 9]), jnp.array([9]), table, page_size=3, max_query_len=9, num_tokens=9
        )
        assert batch.slots.tolist() == [-1] * 6 + [3, 4, 5]
