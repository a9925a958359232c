import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.nn import RotaryEmbedding, YarnScaling
from tests.arrays import normal
from tests.nn import published
from tests.tolerances import assert_close

POSITIONS = np.array([0, 1, 2, 999, 1000, 1500])
FAR = np.array([0, 1, 2, 999, 1000, 40000])


def _x(shape=(6, 3, 64), dtype=jnp.float64):
    return normal(0, shape, dtype)


def test_a_magnitude_that_is_given(enable_x64):
    frequencies = published.yarn_scaled(64, 10000.0, 40.0, 4096, 32.0, 1.0, True)
    rope = RotaryEmbedding(64, scaling=YarnScaling(40.0, 4096, attention_factor=1.25))
    expected = published.rotate_halves(_x(), frequencies, POSITIONS, 1.25)
    assert_close(rope(_x(), jnp.asarray(POSITIONS)), expected)


def test_interleaved_and_partial(enable_x64):
    x = _x()
    full = RotaryEmbedding(64, interleaved=True)(x, jnp.asarray(POSITIONS))
    frequencies = published.inverse_frequencies(64, 10000.0)
    assert_close(full, published.rotate_neighbours(x, frequencies, POSITIONS))
    partial = RotaryEmbedding(64, rotary_dim=16)(x, jnp.asarray(POSITIONS))
    frequencies = published.inverse_frequencies(16, 10000.0)
    assert_close(partial[..., :16], published.rotate_halves(x[..., :16], frequencies, POSITIONS))
    assert np.array_equal(partial[..., 16:], x[..., 16:])


@pytest.mark.slow
def test_offsets_are_positions():
    rope = RotaryEmbedding(16)
    x = _x((2, 5, 3, 16), jnp.float32)
    by_position = rope(x, jnp.asarray([[1000 + i for i in range(5)], [7 + i for i in range(5)]]))
    assert np.array_equal(rope(x, offset=jnp.asarray([1000, 7])), by_position)
    assert np.array_equal(rope(x[0], offset=1000), by_position[0])
    assert np.array_equal(jax.vmap(lambda x, p: rope(x, offset=p))(x, jnp.asarray([1000, 7])), by_position)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_computed_in_float32_and_the_dtype_is_kept(dtype):
    # At position 40000 an angle in bfloat16 would be off by whole turns.
    x = _x((6, 3, 64), jnp.float32).astype(dtype)
    actual = RotaryEmbedding(64)(x, jnp.asarray(FAR))
    assert actual.dtype == dtype
    with jax.enable_x64(True):
        frequencies = published.inverse_frequencies(64, 10000.0)
        expected = published.rotate_halves(x.astype(jnp.float64), frequencies, FAR)
    if dtype == jnp.float32:
        # The rounding of a float32 angle of 40000 radians is 2e-3.
        assert_close(actual[:3], expected[:3])
        assert float(jnp.max(jnp.abs(actual - expected.astype(jnp.float32)))) < 1e-2
    else:
        assert_close(actual, expected)


def test_no_leaves_and_hashable():
    rope = RotaryEmbedding(32, scaling=YarnScaling(4.0, 128))
    assert jax.tree.leaves(rope) == []
    assert rope == RotaryEmbedding(32, scaling=YarnScaling(4.0, 128))
    assert rope != RotaryEmbedding(32, scaling=YarnScaling(8.0, 128))
