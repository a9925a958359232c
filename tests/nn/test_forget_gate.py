"""`MultiHeadAttention(forget_gate=True)`: the formula, caches that hold gates, padding, and what has no place for them."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.nn import KVCache, MultiHeadAttention
from tests.tolerances import assert_close


def layer_of(**options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(
        16, num_heads=4, num_kv_heads=2, forget_gate=True, **options, key=jax.random.key(0)
    )


def tokens(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal((*shape, 16)), jnp.float32)


def test_the_formula():
    """By loops, in float64: a weight of a key is multiplied by the gates of all tokens behind it, up to the query."""
    layer, x = layer_of(), tokens(7)
    wide = lambda linear: np.asarray(linear.weight, np.float64) @ np.asarray(x, np.float64).T
    q = wide(layer.q_proj).reshape(4, 4, 7)
    k, v = (np.repeat(wide(linear).reshape(2, 4, 7), 2, axis=0) for linear in (layer.k_proj, layer.v_proj))
    assert layer.fgate_proj is not None and layer.fgate_proj.bias is not None
    gate = 1 / (1 + np.exp(-wide(layer.fgate_proj) - np.asarray(layer.fgate_proj.bias)[:, None]))
    out = np.zeros((7, 4, 4))
    for h in range(4):
        for i in range(7):
            weights = [
                np.exp(q[h, :, i] @ k[h, :, j] / 2) * gate[h, j + 1 : i + 1].prod() for j in range(i + 1)
            ]
            out[i, h] = v[h, :, : i + 1] @ np.array(weights) / sum(weights)
    assert_close(layer(x), out.reshape(7, 16) @ np.asarray(layer.o_proj.weight, np.float64).T)


def test_other_layers_have_no_gates_and_the_same_weights():
    plain = MultiHeadAttention(16, num_heads=4, key=jax.random.key(0))
    assert plain.fgate_proj is None and plain.init_cache(2, 8).log_forget is None
    assert len(jax.tree.leaves(plain.init_cache(2, 8))) == 4


def test_a_cache_gives_what_whole_rows_do():
    """Chunks of any length, and rows of different lengths with padding that is NaN, which is not stored."""
    layer, x = layer_of(), tokens(2, 8)
    whole, alone = jax.jit(layer.__call__)(x), jax.jit(layer.__call__)(x[:1, 3:])
    call = eqx.filter_jit(lambda x, cache, real: layer(x, cache, padding_mask=real))
    first, cache = call(x[:, :4], layer.init_cache(2, 12), jnp.ones((2, 4), bool))
    second, _ = call(x[:, 4:], cache, jnp.ones((2, 4), bool))
    assert_close(jnp.concatenate([first, second], 1), whole)
    real = jnp.arange(4)[None] >= jnp.array([[3], [0]])
    first, cache = call(jnp.where(real[..., None], x[:, :4], jnp.nan), layer.init_cache(2, 12), real)
    second, cache = call(x[:, 4:], cache, jnp.ones((2, 4), bool))
    assert_close(first[0, 3:], alone[0, :1])
    assert_close(second[0], alone[0, 1:])
    assert_close(jnp.concatenate([first[1], second[1]]), whole[1])
    assert cache.log_forget is not None and not jnp.isnan(cache.log_forget).any()


@pytest.mark.slow
def test_gradients_reach_the_gates(enable_x64):
    """Of the weights of their projection, along one direction, against differences."""
    layer, x, step = layer_of(dtype="float64"), tokens(2, 6).astype("float64"), 1e-4
    at = lambda layer: layer.fgate_proj.weight
    direction = jnp.asarray(np.random.default_rng(2).standard_normal(at(layer).shape))
    loss = eqx.filter_jit(lambda layer: jnp.sum(layer(x) ** 2))
    moved = lambda by: loss(eqx.tree_at(at, layer, at(layer) + by * direction))
    slope = jnp.vdot(at(eqx.filter_grad(loss)(layer)), direction)
    np.testing.assert_allclose(slope, (moved(step) - moved(-step)) / (2 * step), rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer_of(causal=False), "forget_gate: expected False but in a causal layer"),
        (lambda: layer_of(alibi=True), "forget_gate: expected False but in a causal layer without alibi"),
        (lambda: layer_of(sliding_window=4).init_cache(2, rolling=True), "received a RollingKVCache"),
        (lambda: layer_of().init_paged_cache(4, 16), "received a PagedKVCache, which stores no gates"),
        (lambda: layer_of()(tokens(2, 3), KVCache.init(2, 8, 2, 4)), r"log_forget: expected None, .*\(2, 3, 4\)"),
    ],
)  # fmt: skip
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_pages_are_refused_by_name():
    """They hold keys and values, and no gates."""
    layer = layer_of()
    cache = MultiHeadAttention(16, num_heads=4, num_kv_heads=2, key=jax.random.key(0)).init_paged_cache(4, 16)
    batch = ejx.RaggedBatch.build([3], [3], [[0]], page_size=16)
    with pytest.raises(ValueError, match="received a PagedKVCache, which stores no gates"):
        layer(tokens(batch.num_tokens), cache, batch=batch)
