"""Frequencies that depend on how long a sequence has become: row by row, without the padding, through caches and pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import RaggedBatch
from ejkernel_eqx.nn import DynamicScaling, LongRopeScaling, MultiHeadAttention, RotaryEmbedding
from tests.arrays import normal
from tests.nn import published
from tests.tolerances import assert_close

SHORT, LONG = (1.0, 1.5, 2.0, 3.0), (2.0, 4.0, 8.0, 16.0)
SCALINGS = {
    "dynamic": DynamicScaling(4.0, 6),
    "longrope": LongRopeScaling(SHORT, LONG, 6, 8.0),
    "longrope, magnitude by length": LongRopeScaling(SHORT, LONG, 6, short_mscale=1.25, long_mscale=2.0),
}


def _expected(name, x, positions):
    """One row; written down from the formulas."""
    length, base = max(positions) + 1, published.inverse_frequencies(8, 10000.0)
    if name == "dynamic":
        theta = 10000.0 * (4.0 * max(length, 6) / 6 - 3.0) ** (8 / 6)
        return published.rotate_halves(x, published.inverse_frequencies(8, theta), positions)
    long = length > 6
    by_length = 2.0 if long else 1.25
    magnitude = by_length if "magnitude" in name else np.sqrt(1 + np.log(8.0) / np.log(6))
    return published.rotate_halves(x, base / np.asarray(LONG if long else SHORT), positions, magnitude)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name, tokens", [*((name, 6) for name in SCALINGS), ("dynamic", 23)])
def test_lengths_are_those_of_the_rows(enable_x64, name, tokens):
    rope = RotaryEmbedding(8, scaling=SCALINGS[name])
    x = normal(0, (2, tokens, 2, 8), jnp.float64)
    expected = jnp.stack([_expected(name, x[i], np.arange(tokens) + i) for i in range(2)])
    offset = jnp.arange(2)
    assert_close(rope(x, offset=offset), expected, name=name)
    positions = jnp.asarray(np.arange(2)[:, None] + np.arange(tokens))
    assert_close(jax.jit(rope)(x, positions), expected, name=name)
    assert_close(jax.vmap(lambda x, at: rope(x, offset=at))(x, offset), expected, name=name)
    longest = positions.max(1, keepdims=True) + 1
    assert_close(rope(x[:, :2], positions[:, :2], lengths=longest), expected[:, :2])


@pytest.mark.parametrize("name", ["longrope", "longrope, magnitude by length"])
def test_each_row_of_a_step_has_the_factors_of_its_length(enable_x64, name):
    """One token for each row, before, at and after the length from which the other list counts; one row's does not reach the others."""
    rope = RotaryEmbedding(8, scaling=SCALINGS[name])
    places = np.array([0, 4, 5, 6, 100])
    x = normal(0, (5, 1, 2, 8), jnp.float64)
    expected = jnp.stack([_expected(name, x[i], np.array([place])) for i, place in enumerate(places)])
    assert_close(rope(x, offset=jnp.asarray(places)), expected, name=name)
    # The last row of a text that goes on: its earlier tokens are rotated anew by what it has become.
    rows = [_expected(name, x[i], np.array([place, 7]))[:1] for i, place in enumerate(places[:4])]
    assert_close(rope(x[:4], offset=jnp.asarray(places[:4]), lengths=8), jnp.stack(rows), name=name)


def _layer(name):
    rope = RotaryEmbedding(8, scaling=SCALINGS[name])
    return MultiHeadAttention(12, num_heads=2, head_dim=8, rope=rope, key=jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dynamic", "longrope, magnitude by length"])
def test_padding_makes_no_row_longer(name):
    layer = _layer(name)
    x = normal(1, (3, 9, 12))
    real = jnp.asarray([[0] * 3 + [1] * 6, [1] * 5 + [0] * 4, [0] + [1] * 7 + [0]], bool)
    poisoned = jnp.where(real[..., None], x, jnp.nan)
    y = layer(poisoned, padding_mask=real)
    padded, cache = layer(poisoned, layer.init_cache(3, 12), padding_mask=real)
    token = normal(2, (3, 1, 12))
    last, _ = layer(token, cache)
    for row in range(3):
        alone, filled = layer(x[row][real[row]], layer.init_cache((), 12))
        assert_close(y[row][real[row]], alone)
        assert_close(padded[row][real[row]], alone)
        assert_close(last[row], layer(token[row], filled)[0])
    positions = jnp.where(real, jnp.cumsum(real, 1) - 1, 77)
    assert_close(layer(poisoned, padding_mask=real, positions=positions)[real], y[real])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dynamic", "longrope, magnitude by length"])
def test_sequences_of_a_batch_have_their_own_lengths(name):
    layer = _layer(name)
    x = normal(1, (11, 12))
    batch = RaggedBatch.build([8, 3], [8, 3], [[5, 2], [0]], page_size=4)
    y, _ = layer(x, layer.init_paged_cache(8, 4), batch=batch)
    assert_close(y[:8], layer(x[:8]))  # the longer list, the shorter one below
    assert_close(y[8:], layer(x[8:]))
