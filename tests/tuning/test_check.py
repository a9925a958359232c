"""Errors measured on the device are those of the one tolerance table, and bits are bits."""

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from tests.tuning.parts import all_errors, errors, result_errors, same_bits, Tolerance

_VALUES = st.floats(width=32, allow_subnormal=False) | st.sampled_from([0.0, 1.0, -1.0])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_errors_are_those_of_the_table(data):
    shape = data.draw(st.sampled_from([(1,), (4,), (2, 2)]))  # few shapes: each is compiled
    draw = lambda: data.draw(hnp.arrays(np.float32, shape, elements=_VALUES))
    reference = draw()
    actual = reference.copy() if data.draw(st.booleans()) else draw()
    actual.flat[0] = data.draw(_VALUES)
    with np.errstate(all="ignore"):
        expected = np.asarray(errors(actual, reference))
        # The difference of two numbers of 3e38, and an error of 1e40 times the reference, are infinite in float32.
        too_large = np.abs(actual.astype(np.float64) - reference).max() > np.finfo(np.float32).max
    found = np.asarray(result_errors(jnp.asarray(actual), jnp.asarray(reference)))
    if too_large or (expected > 1e30).any():
        assert (found > 1e29).any()
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-37)


def test_double_precision_is_measured_in_double_precision(enable_x64):
    reference = jnp.linspace(1.0, 2.0, 100)
    actual = reference + 1e-14
    np.testing.assert_allclose(result_errors(actual, reference), errors(actual, reference), rtol=1e-6)
    assert 0 < result_errors(actual, reference).rms < 1e-13


def test_large_integers_and_imaginary_parts_count():
    reference = jnp.asarray([2**24, 5])
    assert result_errors(reference + jnp.asarray([1, 0]), reference).peak > 0
    assert result_errors(reference, reference) == Tolerance(0.0, 0.0)
    reference = jnp.asarray([1 + 1j, 2 + 1j])
    assert result_errors(jnp.asarray([1 + 0j, 2 + 0j]), reference).rms > 0.9
    assert result_errors(reference, reference) == Tolerance(0.0, 0.0)


def test_the_worst_leaf_of_a_pytree_counts():
    reference = {"a": jnp.ones(3), "b": (jnp.ones((2, 2)), jnp.zeros(0))}
    actual = {"a": jnp.ones(3), "b": (jnp.full((2, 2), 1.5, jnp.bfloat16), jnp.zeros(0))}
    assert result_errors(actual, reference) == Tolerance(0.5, 0.5)
    assert result_errors(reference, reference) == Tolerance(0.0, 0.0)
    with pytest.raises(ValueError, match=r"shape \(3,\), but the reference has \(1, 3\)"):
        result_errors(jnp.ones(3), jnp.ones((1, 3)))
    with pytest.raises(ValueError, match="structure"):
        result_errors((jnp.ones(3),), jnp.ones(3))


def test_every_result_that_is_wrong_is_named():
    tolerances = dict.fromkeys("abcd", Tolerance(1e-3, 1e-2))
    # One number of many is too far off: less than the allowed error on average.
    reference = {name: jnp.ones(4) for name in "abc"} | {"d": jnp.ones(1000)}
    results = {
        "a": jnp.ones(4),
        "b": jnp.ones(4).at[0].set(jnp.nan),
        "c": jnp.ones(5),
        "d": jnp.ones(1000).at[0].add(0.011),
    }
    found, reason = all_errors(results, reference, tolerances)
    assert found["a"] == 0 and found["b"] == np.inf and "c" not in found
    assert reason is not None and found["d"] < 1e-3
    assert [part.split()[0] for part in reason.split("; ")] == ["b", "c", "d"]
    assert all_errors({"a": jnp.ones(4)}, reference, tolerances) == ({"a": 0.0}, None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64", "float8_e4m3fn"])
def test_bits(dtype):
    x = jnp.asarray([1, 0, 1], dtype)
    assert same_bits({"x": x}, {"x": jnp.array(x)})
    assert not same_bits({"x": x}, {"x": x.at[2].set(jnp.zeros((), dtype))})


def test_zeros_of_different_signs_are_different_bits_and_equal_nans_are_not():
    zeros = jnp.zeros(2)
    assert not same_bits(zeros, -zeros)
    nan = jnp.full(2, jnp.nan)
    assert same_bits(nan, jax.device_put(nan))
