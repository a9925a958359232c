"""Scales that are powers of two, over their whole range, and errors of weights of any size."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import normal, quick

MX = ejx.QuantFormat("float4_e2m1fn", (1, 32), "float8_e8m0fnu")


def test_powers_of_two_are_exact():
    """Each scale from 2^-126 to 2^124 times 4: no rounding is left to the compiler's exponential."""
    bits = np.arange(1, 252, dtype=np.uint8)[:, None]
    codes = jnp.full((251, 16), 0x66, jnp.uint8)  # the number 4, twice
    weight = ejx.QuantizedWeight(codes, jnp.asarray(bits), None, None, MX, jnp.float32)
    wanted = np.broadcast_to(4 * bits.view(ml_dtypes.float8_e8m0fnu).astype(np.float64), (251, 32))
    np.testing.assert_array_equal(np.asarray(quick(ejx.dequantise)(weight), np.float64), wanted)


def test_the_scale_of_a_power_of_two_is_its_own():
    """A largest number 2^n has the scale 2^(n - 2), and is kept."""
    powers = 2.0 ** np.arange(-100, 101)
    w = np.zeros((201, 32), np.float32)
    w[:, 3] = powers
    weight = ejx.quantise(w, "mxfp4")
    np.testing.assert_array_equal(np.asarray(weight.scales)[:, 0], np.arange(-100, 101) - 2 + 127)
    np.testing.assert_array_equal(ejx.dequantise(weight), w)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_the_error_has_no_size(size):
    w = normal(0, 8, 64)
    wanted, error = (ejx.quantise(w * s, "int8", return_errors=True)[1][""] for s in (1.0, size))
    np.testing.assert_allclose(error, wanted, rtol=1e-4)
