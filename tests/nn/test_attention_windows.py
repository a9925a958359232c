"""Windows that are values: one scan runs over layers with and without a window, and gives what the layers written out give."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import Buckets, Mask, PagedKVCache, RaggedBatch, RaggedPagedAttention, UnifiedAttention
from ejkernel_eqx.nn import LinearScaling, MultiHeadAttention, RotaryChoice, RotaryEmbedding
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
    return jax.random.normal(jax.random.key(1), (*shape, EMBED))


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

    @eqx.filter_jit
    def ours(layers, x):
        return eqx.filter_value_and_grad(lambda m: jnp.sum(jnp.sin(_scan(m, x)[0])))(layers)

    @eqx.filter_jit
    def theirs(layers, x):
        return eqx.filter_value_and_grad(lambda m: jnp.sum(jnp.sin(_loop(m, x))))(layers)

    (value, gradient), (expected, expected_gradients) = ours(layers, x), theirs(written_out, x)
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
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("platform", ["xla", pytest.param("triton-interpret", marks=pytest.mark.slow)])
def test_pages(alibi, platform):
    options = {"alibi": alibi, "platform": platform, "rope": None}
    layers, x = _stacked(**options), _x(TOKENS)
    first = jnp.concatenate([x[:7], x[:3], jnp.full((2, EMBED), jnp.nan)])
    caches = PagedKVCache.init(8, 4, 1, 8, batch_shape=len(WINDOWS))
    step = eqx.filter_jit(lambda layers, x, caches, batch: _scan(layers, x, caches, batch=batch))
    buckets = Buckets((12,), (2,), (2,), (7,))
    chunks = RaggedBatch.build([7, 3], [7, 3], [[5, 2], [0, 6]], page_size=4, buckets=buckets)
    first, caches = step(layers, first, caches, chunks)
    decode = RaggedBatch.build([1, 1], [8, 4], [[5, 2], [0, 6]], page_size=4)
    second, caches = step(layers, x[jnp.asarray([7, 3])], caches, decode)
    # A chunk on top of what is there, with a window that begins within the chunk and one that begins before it.
    third, caches = step(
        layers, x[4:7], caches, RaggedBatch.build([0, 3], [8, 7], [[5, 2], [0, 6]], page_size=4)
    )
    expected = eqx.filter_jit(_loop)(_written_out(**options | {"platform": None}), x)
    assert_close(first[:10], jnp.concatenate([expected[:7], expected[:3]]))
    assert_close(second, expected[jnp.asarray([7, 3])])
    assert_close(third, expected[4:7])


@pytest.mark.slow
def test_with_masks_and_outside_of_jit():
    x = _x(TOKENS)
    allowed = jax.random.bernoulli(jax.random.key(2), 0.7, (TOKENS, TOKENS)) | jnp.eye(TOKENS, dtype=bool)
    ids = jnp.asarray([0] * 5 + [1] * 6)
    for window, static in ((3, 3), (-1, None)):
        ours, theirs = _make(KEYS[0], jnp.int32(window)), eqx.filter_jit(_make(KEYS[0], static))
        assert_close(ours(x), theirs(x))
        assert_close(ours(x, mask=allowed), theirs(x, mask=allowed))
        assert_close(ours(x, mask=Mask.from_segments(ids)), theirs(x, segment_ids=ids))
        assert_close(ours(x, cu_seqlens=jnp.asarray([0, 5, 11])), theirs(x, segment_ids=ids))
        batch = RaggedBatch.build([7], [7], [[0, 1]], page_size=4)
        paged, _ = ours(x[:7], ours.init_paged_cache(2, 4), batch=batch)
        assert_close(paged, theirs(x[:7]))


def test_rotations_that_differ_by_layer():
    make = lambda key, window: _make(key, window, rope=RotaryChoice(ROPES, (window > 0).astype(jnp.int32)))
    layers = eqx.filter_vmap(make)(KEYS, jnp.asarray(WINDOWS))
    written_out = [
        _make(key, None if w < 0 else w, rope=ROPES[int(w > 0)]) for key, w in zip(KEYS, WINDOWS, strict=True)
    ]
    x = _x(2, TOKENS)
    y, _ = eqx.filter_jit(_scan)(layers, x)
    assert_close(y, eqx.filter_jit(_loop)(written_out, x))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: _make(KEYS[0], jnp.asarray(WINDOWS)),
            r"sliding_window: expected one integer, .* shape \(4,\)",
        ),
        (lambda: _make(KEYS[0], jnp.asarray(2.0)), "sliding_window: expected one integer, received float32"),
        (lambda: _make(KEYS[0], jnp.asarray(0)), "sliding_window: expected at least 1 key"),
        (lambda: _make(KEYS[0], jnp.asarray(4), causal=False), "sliding_window: expected a pair"),
        (
            lambda: _stacked()(_x(3)),
            r"sliding_window: expected one integer in a layer that is called, .* \(4,\)",
        ),
        (lambda: RotaryChoice([], 0), "ropes: expected RotaryEmbeddings"),
        (lambda: RotaryChoice([ROPES[0], RotaryEmbedding(4)], 0), "ropes: expected equal head_dim"),
        (lambda: RotaryChoice(ROPES, 0.5), "index: expected one integer"),  # pyright: ignore[reportArgumentType]
        (lambda: RotaryChoice(ROPES, jnp.zeros(2, int)), "index: expected one integer"),
        (
            lambda: _make(KEYS[0], 4, rope=RotaryChoice([RotaryEmbedding(4)], 0)),
            "rope: expected a RotaryEmbedding of",
        ),
    ],
)
def test_errors(call, message, unchecked):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("operation", [RaggedPagedAttention, UnifiedAttention])
def test_errors_over_pages(unchecked, operation):
    cache = PagedKVCache.init(2, 4, 1, 8).bind(jnp.zeros((1, 1), jnp.int32), jnp.asarray([2]))
    call = lambda operation, window, q=(2, 2, 8), **more: operation(
        jnp.zeros(q), cache, query_start_loc=jnp.asarray([0, 2]), window=window, **more
    )
    with pytest.raises(
        ValueError, match="window: expected None for an operation that was built with sliding_window"
    ):
        call(operation(4), jnp.int32(2))
    with pytest.raises(ValueError, match="window: expected one integer, received float32"):
        call(operation(), jnp.float32(2))
    with pytest.raises(ValueError, match="window: expected at least 1 key"):
        call(operation(), jnp.int32(0))
    if operation is UnifiedAttention:
        with pytest.raises(ValueError, match="window: expected None in a call with qq_bias"):
            call(operation(), jnp.int32(2), qq_bias=jnp.zeros((2, 2)))
    np.testing.assert_array_equal(call(operation(2), None), call(operation(), jnp.int32(2)))
