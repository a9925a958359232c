"""`MultiHeadAttention(forget_gate=True)`: the formula, caches that hold gates, padding, and what has no place for them."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.nn import KVCache, MultiHeadAttention
from ejkernel_eqx.paged.cache.forget import sums_of
from ejkernel_eqx.paged.cache.write import put
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
        (lambda: layer_of()(tokens(2, 3), KVCache.init(2, 8, 2, 4)), r"log_forget: expected None, .*\(2, 3, 4\)"),
    ],
)  # fmt: skip
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_other_caches_without_gates():
    """Are refused by name; and pages with gates where keys are appended without them."""
    sizes: Any = dict(num_heads=4, num_kv_heads=2, sliding_window=4, key=jax.random.key(0))
    layer, plain = layer_of(sliding_window=4), MultiHeadAttention(16, **sizes)
    batch = ejx.RaggedBatch.build([3], [3], [[0]], page_size=16)
    x = tokens(batch.num_tokens)
    with pytest.raises(ValueError, match=r"log_forget: expected None, .*received \(3, 4\)"):
        layer(x, plain.init_paged_cache(4, 16), batch=batch)
    with pytest.raises(ValueError, match="cache: expected one without gates"):
        plain(x, layer.init_paged_cache(4, 16), batch=batch)
    with pytest.raises(ValueError, match=r"log_forget: expected None, .*received \(2, 3, 4\)"):
        layer(tokens(2, 3), plain.init_cache(2, rolling=True))


def test_gates_that_pages_do_not_take():
    """Minus infinity, which would stay in the sums of all later tokens; leading axes, of pages and of queries."""
    batch = ejx.RaggedBatch.build([3], [3], [[0]], page_size=16)
    k, gates = jnp.zeros((3, 2, 4)), jnp.zeros((3, 4)).at[1, 2].set(-jnp.inf)
    cache = ejx.PagedKVCache.init(4, 16, 2, 4, num_gates=4)
    with pytest.raises(
        ValueError, match=r"log_forget: expected finite numbers up to 0, received -inf to 0\.0"
    ):
        cache.append(k, k, batch.slots, log_forget=gates, batch=batch)
    several = ejx.PagedKVCache.init(4, 16, 2, 4, num_gates=4, batch_shape=(2,))
    given = {"log_forget": jnp.zeros((2, 3, 4)), "batch": batch}
    with pytest.raises(ValueError, match=r"expected pages .* use jax\.vmap over the leading axes"):
        several.append(jnp.zeros((2, 3, 2, 4)), jnp.zeros((2, 3, 2, 4)), batch.slots, **given)
    with pytest.raises(
        ValueError, match=r"q: expected .* with pages that hold gates, received shape \(2, 3, 4, 4\)"
    ):
        ejx.UnifiedAttention()(
            jnp.zeros((2, 3, 4, 4)), cache.bind(batch), query_start_loc=batch.query_start_loc
        )


def test_a_window_of_gates():
    """A RollingKVCache of a window, in chunks longer and shorter than it, gives what whole rows do."""
    layer, x = layer_of(sliding_window=4), tokens(2, 13)
    call = eqx.filter_jit(layer.__call__)
    whole, cache, found = call(x), layer.init_cache(2, rolling=True), []
    for part in jnp.split(x, [6, 7, 9], axis=1):
        y, cache = call(part, cache)
        found.append(y)
    assert_close(jnp.concatenate(found, 1), whole)


def test_a_program_that_makes_its_own_pages():
    """A prompt and several decodes of two texts in one program, from pages that it makes, as whole rows; and a copied page is as good."""
    layer, x, table = layer_of(), tokens(2, 9), [[3, 0, 5], [1, 4, 2]]
    prompt = ejx.RaggedBatch.build([5, 3], [5, 3], table, page_size=4)
    decodes = [ejx.RaggedBatch.build([1, 1], [6 + n, 4 + n], table, page_size=4) for n in range(3)]
    forked = ejx.RaggedBatch.build([1, 1], [9, 7], [[3, 0, 5], [1, 7, 2]], page_size=4)

    @jax.jit
    def run(x):
        y, cache = layer(jnp.concatenate([x[0, :5], x[1, :3]]), layer.init_paged_cache(8, 4), batch=prompt)
        found = [(y[:5], y[5:])]
        for n, batch in enumerate([*decodes, forked]):
            cache = cache.copy_pages([4], [7]) if batch is forked else cache
            y, cache = layer(jnp.stack([x[0, 5 + n], x[1, 3 + n]]), cache, batch=batch)
            found.append((y[:1], y[1:]))
        return [jnp.concatenate(parts) for parts in zip(*found)]

    whole = jax.jit(layer.__call__)(x)
    for found, expected in zip(run(x), (whole[0], whole[1, :7]), strict=True):
        assert_close(found, expected)


def test_sums_in_pages_lose_nothing_on_long_texts():
    """A hundred thousand tokens in chunks: differences between near sums are those of the gates."""
    page, chunk, count, heads = 64, 4096, 25, 2
    x = -np.random.default_rng(0).random((chunk * count, heads)).astype(np.float32)
    pages = jnp.zeros((chunk * count // page, page, heads, 2))
    add = jax.jit(lambda pages, x, batch: put(pages, sums_of(pages, x, batch), batch.slots))
    rows = [list(range(chunk * count // page))]
    for n in range(count):
        batch = ejx.RaggedBatch.build([chunk], [chunk * (n + 1)], rows, page_size=page)
        pages = add(pages, jnp.asarray(x[n * chunk : (n + 1) * chunk]), batch)
    sums, exact = np.asarray(pages).reshape(-1, heads, 2), x.astype(np.float64).cumsum(0)
    for distance in (1, 50, 1000):
        near = (sums[distance:] - sums[:-distance]).sum(-1)
        np.testing.assert_allclose(near, exact[distance:] - exact[:-distance], rtol=1e-6, atol=1e-5)
