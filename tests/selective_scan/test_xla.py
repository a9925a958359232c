"""XLA against the float64 reference, forward and all gradients; its memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.selective_scan import xla
from ejkernel_eqx.selective_scan.spec import ScanArrays, ScanSpec
from ejkernel_eqx.selective_scan.xla import XlaConfig
from tests.recurrence.quick import quick
from tests.selective_scan.cases import (
    assert_agrees,
    Case,
    CASES,
    cotangents,
    differentiated,
    lengths,
    make,
    over,
    padded,
)

CHUNK = 8


def run(case: Case, config: XlaConfig):
    arrays, spec = make(case)
    call = lambda arrays, dout, dstate: differentiated(
        lambda arrays: xla.apply(arrays, spec, config), arrays, dout, dstate
    )
    return quick(call)(padded(case, arrays), *cotangents(case))


@pytest.mark.few(1)
@over(CASES)
def test_agrees_with_reference(case):
    assert_agrees(case, run(case, XlaConfig(CHUNK)))


@pytest.mark.few(1)
@over(lengths(CHUNK), {"T1", f"T{CHUNK + 1}"})
def test_lengths(case):
    assert_agrees(case, run(case, XlaConfig(CHUNK)))


def test_double_precision(enable_x64):
    case = Case(dtype="float64", state_dtype="float64", z=True, D=True, initial_state=True)
    assert_agrees(case, run(case, XlaConfig(CHUNK)))


@pytest.mark.slow
def test_forward_mode_and_second_order():
    arrays, spec = make(Case(B=1, T=7, I=3, N=2))
    total = lambda x: jnp.sum(xla.apply(arrays._replace(x=x), spec, XlaConfig(4))[0] ** 2)
    direction = jnp.ones_like(arrays.x)
    _, slope = quick(lambda x: jax.jvp(total, (x,), (direction,)))(arrays.x)
    np.testing.assert_allclose(slope, jnp.sum(quick(jax.grad(total))(arrays.x)), rtol=1e-5)
    _, twice = quick(lambda x: jax.jvp(jax.grad(total), (x,), (direction,)))(arrays.x)
    # The output is linear in x.
    np.testing.assert_allclose(jnp.sum(twice), 2 * total(direction), rtol=1e-4)


def problem(length: int, channels: int, states: int):
    """As a layer has it, with the dt made before."""
    keys = jax.random.split(jax.random.key(0), 7)
    normal = lambda n, *shape: jax.random.normal(keys[n], (1, *shape))
    tokens = (length, channels)
    rates = -jnp.broadcast_to(jnp.arange(1.0, states + 1), (channels, states))
    return ScanArrays(
        normal(0, *tokens),
        normal(1, *tokens),
        rates,
        normal(2, length, 1, states),
        normal(3, length, 1, states),
        D=normal(4, channels)[0],
        z=normal(5, *tokens),
        dt_bias=normal(6, channels)[0] - 4,
    )


def gradients_of(function):
    return lambda arrays: jax.grad(lambda arrays: sum(jnp.sum(x) for x in function(arrays)))(arrays)


def ours(arrays: ScanArrays):
    return xla.apply(arrays, ScanSpec(True), XlaConfig())


@pytest.mark.slow
def test_memory_grows_with_channels_not_states(optimised):
    length, channels, states = 512, 32, 64
    compiled = optimised(quick(gradients_of(ours)).lower(problem(length, channels, states)))
    memory = compiled.memory_analysis()
    assert memory is not None
    row = 4 * length * channels
    # Every state of every token would be 64 rows.
    assert memory.temp_size_in_bytes < 32 * row
