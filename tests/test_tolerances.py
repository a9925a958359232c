"""The measure itself must not be blind."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.tolerances import assert_close


def rejected(actual, reference, **kwargs):
    with pytest.raises(AssertionError):
        assert_close(actual, reference, **kwargs)


def test_nan_never_passes():
    nan, one = np.asarray([1.0, np.nan], np.float32), np.ones(2, np.float32)
    rejected(nan, one)
    rejected(one, nan)
    rejected(nan, nan)


def test_infinities_must_match():
    x = np.asarray([1.0, -np.inf], np.float32)
    assert_close(x, x)
    rejected(x, np.asarray([1.0, np.inf]))
    rejected(x, np.asarray([1.0, -1e30]))
    rejected(np.asarray([1.0, -1e30], np.float32), x)
    assert_close(np.full(3, -np.inf, np.float32), np.full(3, -np.inf))


def test_one_bad_entry_among_many():
    reference = np.random.default_rng(0).normal(size=100_000)
    actual = reference.astype(np.float32)
    assert_close(actual, reference)
    actual[7] += 1e-3
    rejected(actual, reference)


def test_zero_reference_needs_zero():
    assert_close(np.zeros(3, np.float32), np.zeros(3))
    rejected(np.full(3, 1e-30, np.float32), np.zeros(3))
    assert_close(np.full(3, 1e-9, np.float32), np.zeros(3), scale=1.0)


def test_dtype_of_the_computation_decides():
    reference = np.linspace(1, 2, 1000)
    rounded = jnp.asarray(reference, jnp.bfloat16)
    assert_close(rounded, reference)
    assert_close(rounded.astype(jnp.float32), reference, dtype=jnp.bfloat16)
    rejected(rounded.astype(jnp.float32), reference)


def test_shapes_must_agree():
    rejected(np.ones((2, 1), np.float32), np.ones((1, 2)))
