"""States and padding of the recurrent layers: whatever way the tokens come in, each gets what the whole sequence at once gives
it, and the state is the one that stepping through the real tokens gives."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nn.recurrent_layers import build, call, inputs, LAYERS
from tests.tolerances import assert_close

TOKENS, ROWS = 12, 3
CONVOLUTIONS = "gla, few kv heads, convolutions, no gate"


@eqx.filter_jit
def _walk(layer, x):
    """Token by token: the outputs, and the state after each of them `[T, B, ...]`."""

    def body(state, token):
        y, state = layer(token[:, None], state)
        return state, (y[:, 0], state)

    _, (ys, states) = jax.lax.scan(body, layer.init_state(x.shape[0]), jnp.swapaxes(x, 0, 1))
    return jnp.swapaxes(ys, 0, 1), states


@functools.cache
def _expected(name):
    """The layer, its input, and what stepping through it gives in float64."""
    layer, x = build(name), inputs(ROWS, TOKENS)
    with jax.enable_x64(True):
        widen = lambda a: a.astype(jnp.float64) if eqx.is_inexact_array(a) else a
        steps = _walk(*jax.tree.map(widen, (layer, x)))
        return layer, x, *jax.tree.map(np.asarray, steps)


def _same(actual, expected, what):
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(ours, theirs, name=what)


@pytest.mark.parametrize("name", [pytest.param("kimi", marks=pytest.mark.slow), "qwen3-next"])
def test_another_recurrence_normalises_as_it_says(name):
    """Short convolutions normalise queries and keys for a recurrence that would, and for no other."""
    layer, x, _, _ = _expected(name)
    other = eqx.tree_at(lambda m: m.recurrence, layer, layer.recurrence.of_normalised())
    assert_close(call(other, x), call(other, x, other.init_state(ROWS))[0], name=name)


def _padded(x, before, lengths, width):
    """Rows with NaN around their first `lengths` tokens, and where these are."""
    place = np.arange(width) - np.asarray(before)[:, None]
    real = (place >= 0) & (place < np.asarray(lengths)[:, None])
    padded = np.full((len(x), width, x.shape[-1]), np.nan, np.float32)
    padded[real] = np.concatenate([row[:n] for row, n in zip(np.asarray(x), lengths)])
    return jnp.asarray(padded), jnp.asarray(real)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [*LAYERS, pytest.param(CONVOLUTIONS, marks=pytest.mark.slow)])
def test_padding_changes_nothing(name):
    """Rows of different lengths, padded left, right and on both sides; then a chunk with padding, and rows that pause."""
    layer, x, ys, states = _expected(name)
    lengths, width = np.array([6, 1, 3]), 6
    for before in ([0, 5, 3], [0, 0, 0], [0, 2, 1]):
        padded, real = _padded(x, before, lengths, width)
        y, state = call(layer, padded, layer.init_state(ROWS), padding_mask=real)
        # All rows in one measure: what a row of one token gives may be a cancellation, of which float32 keeps less.
        found = jnp.concatenate(
            [y[row, start : start + n] for row, (start, n) in enumerate(zip(before, lengths))]
        )
        assert_close(found, np.concatenate([ys[row, :n] for row, n in enumerate(lengths)]), name=name)
        for row, n in enumerate(lengths):
            _same(_row(state, row), _row(states, (n - 1, row)), f"{name}, state of row {row}")
    if name == "mamba2":
        alone, _ = call(layer, padded[2:], layer.init_state(1), padding_mask=real[2:])
        assert_close(alone[0, 1:4], ys[2, :3], name=f"{name}, alone")

    more = np.array([2, 6, 0])
    rest = jnp.stack([jnp.roll(row, -n, axis=0) for row, n in zip(x, lengths)])
    padded, real = _padded(rest, [4, 0, 3], more, width)
    y, state = call(layer, padded, state, padding_mask=real)
    assert_close(y[0, 4:], ys[0, 6:8], name=name)
    assert_close(y[1], ys[1, 1:7], name=name)
    lengths = lengths + more
    active = jnp.array([True, False, True])
    token = jnp.stack([x[row, n] for row, n in enumerate(lengths)])[:, None]
    token = jnp.where(active[:, None, None], token, jnp.nan)
    y, state = call(layer, token, state, padding_mask=active[:, None])
    for row, n in enumerate(lengths + np.asarray(active)):
        if active[row]:
            assert_close(y[row, 0], ys[row, n - 1], name=f"{name}, step of row {row}")
        _same(_row(state, row), _row(states, (n - 1, row)), f"{name}, state of row {row} after a step")


def _row(state, index):
    return jax.tree.map(lambda a: a[index], state)


@pytest.mark.slow
def test_packed_sequences():
    name = "mamba2"
    layer, x, ys, states = _expected(name)
    ends = [5, 5, 9]
    packed = jnp.concatenate([x[0, :5], x[2, :4], jnp.full((2, x.shape[-1]), jnp.nan)])
    offsets = jnp.array([0, *ends], jnp.int32)
    y, state = call(layer, packed, layer.init_state(3), cu_seqlens=offsets)
    ids = jnp.array([3] * 5 + [0] * 4 + [-1] * 2, jnp.int32)
    by_ids, last = call(layer, packed, layer.init_state(()), segment_ids=ids)
    for result in (y, by_ids):
        assert_close(result[:5], ys[0, :5], name=name)
        assert_close(result[5:9], ys[2, :4], name=name)
    _same(_row(state, 0), _row(states, (4, 0)), name)
    _same(_row(state, 1), layer.init_state(()), f"{name}, an empty sequence")
    _same(_row(state, 2), _row(states, (3, 2)), name)
    _same(last, _row(states, (3, 2)), name)


def test_a_step_with_a_negative_segment_stands_still():
    layer, x, ys, states = _expected("qwen3-next")
    ids = jnp.array([[4], [-1], [0]], jnp.int32)
    y, state = call(layer, x[:, 3:4], _row(states, 2), segment_ids=ids)
    assert_close(y[::2, 0], ys[::2, 3])
    _same(_row(state, 1), _row(states, (2, 1)), "padding")
    _same(_row(state, 0), _row(states, (3, 0)), "a token")
