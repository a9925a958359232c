"""Eight-bit numbers: how near they are, what never becomes NaN, and wrong arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.paged.caches import ABSOLUTE, dequantise, LARGEST, quantise, RELATIVE

DTYPES = list(LARGEST)


def numbers(shape=(5, 3, 16), seed=0):
    return jnp.asarray(
        np.random.default_rng(seed).normal(size=shape) * 10.0 ** np.arange(-2, 3)[:, None, None], jnp.float32
    )


def bound(x, scale, dtype):
    """Half a step; double rounding on a CPU, through float16, adds at most a fraction of it."""
    x, scale = np.abs(np.asarray(x, np.float64)), np.asarray(scale, np.float64)[..., None]
    return 1.01 * np.maximum(x * RELATIVE[dtype], scale * ABSOLUTE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", ["float32", "bfloat16"])
def test_own_scale(dtype, source):
    x = numbers().astype(source)
    stored, scale = quantise(x, dtype)
    assert stored.dtype == dtype and stored.shape == x.shape and scale.dtype == jnp.float32
    np.testing.assert_allclose(scale, np.abs(np.asarray(x, np.float32)).max(-1) / LARGEST[dtype], rtol=1e-6)
    again = dequantise(stored, scale)
    assert again.dtype == jnp.float32 and np.all(
        np.abs(np.asarray(again) - np.asarray(x, np.float64)) <= bound(x, scale, dtype)
    )
    # The largest magnitude is stored as the largest number.
    assert np.all(np.abs(np.asarray(stored, np.float32)).max(-1) == LARGEST[dtype])
    assert dequantise(stored, scale, jnp.bfloat16).dtype == jnp.bfloat16
    for compiled, eager in zip(jax.jit(quantise, static_argnums=1)(x, dtype), (stored, scale), strict=True):
        np.testing.assert_allclose(np.asarray(compiled, np.float32), np.asarray(eager, np.float32), rtol=2e-7)


def test_halves_go_to_the_even_number():
    x = jnp.asarray([[0.5, 1.5, 2.5, -0.5, -1.5, 127.0]])
    assert quantise(x, "int8")[0].tolist() == [[0, 2, 2, 0, -2, 127]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_given_scale_clips(dtype):
    x = jnp.asarray([[1e30, -1e30, 3.0, -0.0], [jnp.inf, -jnp.inf, 1.0, 0.25]])
    stored, scale = quantise(x, dtype, jnp.asarray([0.5, 0.25]))
    found = np.asarray(stored, np.float32)
    largest = LARGEST[dtype]
    np.testing.assert_array_equal(found, [[largest, -largest, 6, 0], [largest, -largest, 4, 1]])
    np.testing.assert_array_equal(scale, [0.5, 0.25])
    assert quantise(x, dtype, np.float32(2))[1].tolist() == [2, 2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, 1e-44, 3e38])
def test_no_scale_divides_by_zero(dtype, value):
    x = jnp.full((2, 4), value, jnp.float32)
    stored, scale = quantise(x, dtype)
    again = dequantise(stored, scale)
    assert np.all(np.asarray(scale) > 0) and np.isfinite(again).all()
    np.testing.assert_allclose(again, x, rtol=1e-6, atol=1e-36)
    if value == 0:
        assert np.all(np.asarray(scale) == 1) and not np.asarray(again).any()
    zero, _ = quantise(x, dtype, jnp.zeros(()))
    assert np.isfinite(np.asarray(zero, np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_visible_and_alone(dtype):
    x = numbers().at[0, 0, 3].set(jnp.nan).at[1, 1, 2].set(jnp.inf)
    again = np.asarray(dequantise(*quantise(x, dtype)))
    bad = np.zeros(again.shape[:2], bool)
    bad[0, 0] = bad[1, 1] = True
    assert np.isnan(again[0, 0, 3]) and not np.isfinite(again[1, 1, 2])
    assert np.isfinite(again[~bad]).all()


def test_empty_and_gradient():
    stored, scale = quantise(jnp.zeros((0, 3, 4)), "int8")
    assert stored.shape == (0, 3, 4) and scale.shape == (0, 3)
    gradient = jax.grad(lambda s: dequantise(jnp.asarray([[2, 3]], jnp.int8), s).sum())(jnp.ones(1))
    assert gradient.tolist() == [5]


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: quantise(jnp.ones(3), jnp.float32), "dtype: expected int8"),
        (lambda: quantise(jnp.ones(3), jnp.float8_e4m3fnuz), "dtype: expected"),
        (lambda: quantise(jnp.ones(3, int), "int8"), "x: expected floats"),
        (lambda: quantise(jnp.ones(()), "int8"), "x: expected floats"),
        (lambda: quantise(jnp.ones((2, 3)), "int8", jnp.ones(3)), "scale: expected floats"),
        (lambda: quantise(jnp.ones((2, 3)), "int8", 1), "scale: expected floats"),
        (lambda: dequantise(jnp.ones(3), jnp.ones(())), "stored: expected int8"),
        (lambda: dequantise(jnp.ones(3, jnp.int8), jnp.ones(3)), "scale: expected"),
    ],
)
def test_wrong_arguments(call, words):
    with pytest.raises(ValueError, match=words):
        call()
