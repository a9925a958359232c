"""A cache of the window alone gives what a cache of everything gives, however the tokens come in and however many there are."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.nn import KVCache, MultiHeadAttention, RollingKVCache, RotaryEmbedding
from tests.arrays import normal
from tests.nn.checks import in_pieces, refuses
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

EMBED, ROWS, WINDOW = 16, 3, 4
OPTIONS = {
    "rope": {"rope": RotaryEmbedding(8)},
    "sinks, cap, V != D": {"sinks": True, "logits_soft_cap": 2.0, "v_head_dim": 6, "num_kv_heads": 1},
    "alibi, a pair": {"alibi": True, "sliding_window": (3, 0)},
    "one key": {"sliding_window": 1, "rope": RotaryEmbedding(8)},
}


def _layer(name="rope", **changes):
    options = {"num_heads": 2, "sliding_window": WINDOW} | OPTIONS[name] | changes
    layer = MultiHeadAttention(EMBED, **options, key=jax.random.key(0))
    if layer.sinks is None:
        return layer
    return eqx.tree_at(lambda m: m.sinks, layer, jnp.array([0.5, -1.0]))


def _x(tokens, rows=ROWS):
    return normal(1, (rows, tokens, EMBED))


@eqx.filter_jit
def _call(layer, x, cache, **given):
    return layer(x, cache, **given)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", OPTIONS)
def test_chunks_of_any_size_give_what_a_full_cache_gives(name):
    layer, x = _layer(name), _x(17)
    expected = eqx.filter_jit(layer)(x)
    cache = layer.init_cache(ROWS, rolling=True)
    assert cache.k.shape[1] == cache.window == {"one key": 1}.get(name, WINDOW)
    y, cache = in_pieces(layer, x, (7, 2, 1, 1, 5, 1), cache)
    assert_close(y, expected, name=name)
    assert cache.lengths.tolist() == [17] * ROWS and cache.k.shape[1] == cache.window


append = quick(lambda cache, new, real: cache.append(new, -new, mask=real))


@pytest.mark.parametrize("size", [WINDOW - 1, pytest.param(WINDOW, marks=pytest.mark.slow), 2 * WINDOW + 3])
def test_chunks_shorter_and_longer_than_the_window(size):
    """Of tokens that are numbers: what each may see, and what is held afterwards, as a list has it. Every fourth chunk has no padding."""
    cache, rows = RollingKVCache.init(2, WINDOW, 1, 1), [[], []]
    for turn in range(5):
        real, padding = np.ones((2, size), bool), turn % 4
        real[0, : min(padding, size)] = real[1, size - padding % (size + 1) :] = False
        new = 1.0 + 100 * turn + np.arange(2 * size, dtype=np.float32).reshape(2, size)
        poisoned = jnp.asarray(np.where(real, new, np.nan))[..., None, None]
        cache, seen = append(cache, poisoned, jnp.asarray(real))
        for row, before in enumerate(rows):
            first = int(np.argmax(real[row]))
            rows[row] = after = before + new[row, real[row]].tolist()
            for t in np.flatnonzero(real[row]):
                held = np.asarray(seen.real[row, : WINDOW + t + 1])
                keys = np.asarray(seen.k[row, : WINDOW + t + 1, 0, 0])[held].tolist()
                assert keys[-WINDOW:] == after[: len(before) + t - first + 1][-WINDOW:]
            assert int(cache.lengths[row]) == len(after)
            kept = {place % WINDOW: x for place, x in enumerate(after)}
            k, v = (np.asarray(x)[row, :, 0, 0] for x in (cache.k, cache.v))
            assert all(k[slot] == x == -v[slot] for slot, x in kept.items())


REAL = [
    np.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0]], bool),
    np.array([[1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0]], bool),
    np.array([[1], [0], [1]], bool),
    np.array([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 0]], bool),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["rope", "alibi, a pair"])
def test_rows_at_different_positions(name):
    layer = _layer(name)
    rolling, full = layer.init_cache(ROWS, rolling=True), layer.init_cache(ROWS, 32)
    for number, real in enumerate(REAL):
        x = _x(real.shape[1]) + number
        poisoned = jnp.where(jnp.asarray(real)[..., None], x, jnp.nan)
        y, rolling = _call(layer, poisoned, rolling, padding_mask=jnp.asarray(real))
        expected, full = _call(layer, poisoned, full, padding_mask=jnp.asarray(real))
        assert_close(y[real], expected[real], name=f"chunk {number}")
        assert np.array_equal(rolling.lengths, full.lengths)
        assert np.isfinite(np.asarray(rolling.k)).all()


def test_decoding_without_end_under_scan_with_donation():
    layer, x = _layer(), _x(40)
    expected = eqx.filter_jit(layer)(x)

    def step(cache, token):
        y, cache = layer(token[:, None], cache)
        return cache, y[:, 0]

    decode = jax.jit(lambda cache, tokens: jax.lax.scan(step, cache, tokens), donate_argnums=0)
    first, cache = _call(layer, x[:, :6], layer.init_cache(ROWS, rolling=True))
    held = cache.k
    cache, rest = decode(cache, jnp.swapaxes(x[:, 6:], 0, 1))
    assert held.is_deleted() and cache.k.shape == held.shape
    assert_close(jnp.concatenate([first, jnp.swapaxes(rest, 0, 1)], 1), expected)


@pytest.mark.slow
def test_vmap_layers_and_one_sequence():
    layer, x = _layer(), _x(9)
    expected, _ = _call(layer, x, layer.init_cache(ROWS, rolling=True))
    mapped, _ = jax.jit(jax.vmap(layer))(x, layer.init_cache(ROWS, rolling=True))
    assert_close(mapped, expected)
    alone, cache = _call(layer, x[1], layer.init_cache((), rolling=True))
    assert_close(alone, expected[1])
    assert cache.lengths.shape == ()
    stack = layer.init_cache((2, ROWS), rolling=True, dtype=jnp.bfloat16)
    assert stack.k.shape == (2, ROWS, WINDOW, 2, 8) and stack.k.dtype == jnp.bfloat16


@pytest.mark.slow
def test_gradients_through_old_keys_and_new_ones():
    layer, x = _layer(), _x(9)

    def loss(layer, x, rolling):
        cache = layer.init_cache(ROWS, None if rolling else 16, rolling=rolling)
        y, cache = layer(x[:, :6], cache)
        z, _ = layer(x[:, 6:], cache)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(z))

    grad = eqx.filter_jit(lambda rolling: eqx.filter_grad(lambda p: loss(p[0], p[1], rolling))((layer, x)))
    for got, wanted in zip(jax.tree.leaves(grad(True)), jax.tree.leaves(grad(False)), strict=True):
        assert_close(got, wanted, kind="gradient")


def _append(**options):
    new = jnp.ones((2, 5, 2, 8))
    return RollingKVCache.init(2, 4, 2, 8).append(new, new, **options)


_call_with = lambda f, cache, **options: f(_x(2), cache, **options)
ROLLING: Any = {"rolling": True}
ERRORS = {
    "rolling: expected a causal layer with a static": lambda f: _layer(sliding_window=None).init_cache(2, **ROLLING),
    "rolling: .* received one with an array": lambda f: _layer(sliding_window=jnp.int32(4)).init_cache(2, **ROLLING),
    "rolling: expected a causal": lambda f: _layer(sliding_window=(3, 3), causal=False).init_cache(2, **ROLLING),
    "rolling: expected True or False": lambda f: f.init_cache(2, rolling="yes"),
    "max_length: expected a positive integer": lambda f: f.init_cache(2),
    "cache: expected a RollingKVCache of at least 4": lambda f: _call_with(f, RollingKVCache.init(ROWS, 3, 2, 8)),
    r"cache: expected the batch shape \(3,\)": lambda f: _call_with(f, RollingKVCache.init(2, 4, 2, 8)),
    "k_new: expected": lambda f: _call_with(f, RollingKVCache.init(ROWS, 4, 1, 8)),
    "mask: expected None with a RollingKVCache": lambda f: _call_with(f, f.init_cache(ROWS, **ROLLING), mask=jnp.ones((2, 6), bool)),
    "bias: expected None with a RollingKVCache": lambda f: _call_with(f, f.init_cache(ROWS, **ROLLING), bias=jnp.ones((2, 6))),
    r"mask: expected .* broadcasts to \(2, 5\), received": lambda f: _append(mask=jnp.ones((2, 3), bool)),
    "mask: expected booleans": lambda f: _append(mask=jnp.ones((2, 5))),
    "window: expected a positive integer": lambda f: RollingKVCache.init(2, 0, 2, 8),
    "dtype: expected a floating dtype": lambda f: RollingKVCache.init(2, 4, 2, 8, dtype=jnp.int8),
}  # fmt: skip


test_errors = refuses(ERRORS, lambda wrong: wrong(_layer()))


@pytest.mark.slow
def test_a_wider_one_and_a_full_one_agree():
    layer, x = _layer(), _x(11)
    y, _ = in_pieces(layer, x, (9, 2), RollingKVCache.init(ROWS, 7, 2, 8))
    assert_close(y, _call(layer, x, KVCache.init(ROWS, 16, 2, 8))[0])
