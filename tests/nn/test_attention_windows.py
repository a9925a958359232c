"""Windows that are values: one scan runs over layers with and without a window, and gives what the layers written out give."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import Buckets, Mask, PagedKVCache, RaggedBatch, RaggedPagedAttention, UnifiedAttention
from ejkernel_eqx.nn import LinearScaling, MultiHeadAttention, RotaryChoice, RotaryEmbedding
from tests.arrays import normal
from tests.nn.checks import needs_triton, refuses
from tests.tolerances import assert_close

EMBED, TOKENS, WINDOWS = 16, 11, (4, -1, 4, -1)
KEYS = jax.random.split(jax.random.key(0), len(WINDOWS))
ROPES = (RotaryEmbedding(8, theta=1e6, scaling=LinearScaling(8.0)), RotaryEmbedding(8))


def _make(key, window, **options):
    options = {"num_heads": 2, "num_kv_heads": 1, "rope": ROPES[1]} | options
    return MultiHeadAttention(EMBED, sliding_window=window, **options, key=key)


def _stacked(**options):
    return eqx.filter_vmap(lambda key, window: _make(key, window, **options))(KEYS, jnp.asarray(WINDOWS))


def _written_out(**options):
    return [_make(key, None if w < 0 else w, **options) for key, w in zip(KEYS, WINDOWS, strict=True)]


def _x(*shape):
    return normal(1, (*shape, EMBED))


def _scan(layers, x, caches=None, **given):
    arrays, static = eqx.partition(layers, eqx.is_array)

    def body(x, leaves):
        layer, cache = leaves
        layer = eqx.combine(layer, static)
        y = layer(x, **given) if cache is None else layer(x, cache, **given)
        y, cache = (y, None) if cache is None else y
        return x + y, cache

    return jax.lax.scan(body, x, (arrays, caches))


def _loop(layers, x):
    for layer in layers:
        x = x + layer(x)
    return x


@pytest.mark.slow
def test_training():
    layers, written_out, x = _stacked(), _written_out(), _x(2, TOKENS)
    loss = lambda call: eqx.filter_jit(eqx.filter_value_and_grad(lambda m, x: jnp.sum(jnp.sin(call(m, x)))))
    value, gradient = loss(lambda m, x: _scan(m, x)[0])(layers, x)
    expected, expected_gradients = loss(_loop)(written_out, x)
    assert_close(value, expected)
    leaves = [jax.tree.leaves(layer) for layer in expected_gradients]
    for got, *wanted in zip(jax.tree.leaves(gradient), *leaves, strict=True):
        assert_close(got, jnp.stack(wanted), kind="gradient")
    # The windows are arrays, but nothing that a step of an optimiser changes.
    assert gradient.sliding_window is None and layers.sliding_window.dtype == jnp.int32
    stepped = eqx.apply_updates(layers, jax.tree.map(lambda g: -g, gradient))
    assert stepped.sliding_window.tolist() == list(WINDOWS)


def test_decoding():
    layers, x = _stacked(), _x(2, TOKENS)
    caches = jax.tree.map(lambda a: jnp.stack([a] * len(WINDOWS)), _written_out()[0].init_cache(2, 16))
    step = eqx.filter_jit(_scan)
    first, caches = step(layers, x[:, :9], caches)
    second, caches = step(layers, x[:, 9:10], caches)
    last, caches = step(layers, x[:, 10:], caches)
    expected = eqx.filter_jit(_loop)(_written_out(), x)
    assert_close(jnp.concatenate([first, second, last], 1), expected)


@pytest.mark.slow
@pytest.mark.parametrize("alibi, platform", [(False, "xla"), (True, "triton-interpret")])
def test_pages(alibi, platform):
    needs_triton(platform)
    layers, x = _stacked(alibi=alibi, platform=platform, rope=None), _x(TOKENS)
    caches, tables = PagedKVCache.init(8, 4, 1, 8, batch_shape=len(WINDOWS)), [[5, 2], [0, 6]]
    step = eqx.filter_jit(lambda layers, x, caches, batch: _scan(layers, x, caches, batch=batch))
    batch = lambda counts, lengths, **options: RaggedBatch.build(
        counts, lengths, tables, page_size=4, **options
    )
    first = jnp.concatenate([x[:7], x[:3], jnp.full((2, EMBED), jnp.nan)])
    chunks = batch([7, 3], [7, 3], buckets=Buckets((12,), (2,), (2,), (7,)))
    first, caches = step(layers, first, caches, chunks)
    second, caches = step(layers, x[jnp.asarray([7, 3])], caches, batch([1, 1], [8, 4]))
    # A chunk on top of what is there, with a window that begins within the chunk and one that begins before it.
    third, caches = step(layers, x[4:7], caches, batch([0, 3], [8, 7]))
    expected = eqx.filter_jit(_loop)(_written_out(alibi=alibi, rope=None), x)
    assert_close(first[:10], jnp.concatenate([expected[:7], expected[:3]]))
    assert_close(second, expected[jnp.asarray([7, 3])])
    assert_close(third, expected[4:7])


@pytest.mark.slow
@pytest.mark.parametrize("window, static", [(3, 3), (-1, None)])
def test_with_masks_and_outside_of_jit(window, static):
    x = _x(TOKENS)
    allowed = jax.random.bernoulli(jax.random.key(2), 0.7, (TOKENS, TOKENS)) | jnp.eye(TOKENS, dtype=bool)
    ids = jnp.asarray([0] * 5 + [1] * 6)
    ours, theirs = _make(KEYS[0], jnp.int32(window)), eqx.filter_jit(_make(KEYS[0], static))
    assert_close(ours(x), theirs(x))
    assert_close(ours(x, mask=allowed), theirs(x, mask=allowed))
    assert_close(ours(x, mask=Mask.from_segments(ids)), theirs(x, segment_ids=ids))
    assert_close(ours(x, cu_seqlens=jnp.asarray([0, 5, 11])), theirs(x, segment_ids=ids))
    batch = RaggedBatch.build([7], [7], [[0, 1]], page_size=4)
    assert_close(ours(x[:7], ours.init_paged_cache(2, 4), batch=batch)[0], theirs(x[:7]))


@pytest.mark.slow
def test_rotations_that_differ_by_layer():
    make = lambda key, window: _make(key, window, rope=RotaryChoice(ROPES, (window > 0).astype(jnp.int32)))
    layers, x = eqx.filter_vmap(make)(KEYS, jnp.asarray(WINDOWS)), _x(2, TOKENS)
    alone = lambda key, w: _make(key, None if w < 0 else w, rope=ROPES[int(w > 0)])
    expected = eqx.filter_jit(_loop)([alone(*own) for own in zip(KEYS, WINDOWS, strict=True)], x)
    assert_close(eqx.filter_jit(_scan)(layers, x)[0], expected)


ERRORS = {
    r"sliding_window: expected one integer, .* shape \(4,\)": lambda: _make(KEYS[0], jnp.asarray(WINDOWS)),
    "sliding_window: expected one integer, received float32": lambda: _make(KEYS[0], jnp.asarray(2.0)),
    "sliding_window: expected at least 1 key": lambda: _make(KEYS[0], jnp.asarray(0)),
    "sliding_window: expected a pair": lambda: _make(KEYS[0], jnp.asarray(4), causal=False),
    r"sliding_window: expected one integer in a layer that is called, .* \(4,\)": lambda: _stacked()(_x(3)),
    "ropes: expected RotaryEmbeddings": lambda: RotaryChoice([], 0),
    "ropes: expected equal head_dim": lambda: RotaryChoice([ROPES[0], RotaryEmbedding(4)], 0),
    "index: expected one integer, received 0.5": lambda: RotaryChoice(ROPES, 0.5),  # pyright: ignore[reportArgumentType]
    "index: expected one integer": lambda: RotaryChoice(ROPES, jnp.zeros(2, int)),
    "rope: expected a RotaryEmbedding of": lambda: _make(KEYS[0], 4, rope=RotaryChoice([RotaryEmbedding(4)], 0)),
}  # fmt: skip


test_errors = refuses(ERRORS)


@pytest.mark.parametrize("operation", [RaggedPagedAttention, UnifiedAttention])
def test_errors_over_pages(unchecked, operation):
    cache = PagedKVCache.init(2, 4, 1, 8).bind(jnp.zeros((1, 1), jnp.int32), jnp.asarray([2]))
    call = lambda window, *built, **more: operation(*built)(
        jnp.zeros((2, 2, 8)), cache, query_start_loc=jnp.asarray([0, 2]), window=window, **more
    )
    refused = lambda message: pytest.raises(ValueError, match=f"window: expected {message}")
    with refused("None for an operation that was built with sliding_window"):
        call(jnp.int32(2), 4)
    with refused("one integer, received float32"):
        call(jnp.float32(2))
    with refused("at least 1 key"):
        call(jnp.int32(0))
    if operation is UnifiedAttention:
        with refused("None in a call with qq_bias"):
            call(jnp.int32(2), qq_bias=jnp.zeros((2, 2)))
    np.testing.assert_array_equal(call(None, 2), call(jnp.int32(2)))
