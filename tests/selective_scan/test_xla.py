"""XLA against the float64 reference, forward and all gradients; its memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.selective_scan import xla
from tests.recurrence.quick import quick
from tests.selective_scan import cases

CHUNK = 8
# Every option; the whole list is for the interpreted kernels.
DEFAULT = ("everything", "groups of packed", "bfloat16 states")
OPTIONS = cases.named(*DEFAULT, "segments", "many sequences", "mixed decay", "no decay", "float16")


def run(case: cases.Case, config: xla.XlaConfig):
    arrays, spec = cases.make(case)
    call = lambda arrays, dout, dstate: cases.differentiated(
        lambda arrays: xla.apply(arrays, spec, config), arrays, dout, dstate
    )
    return quick(call)(cases.padded(case, arrays), *cases.cotangents(case))


@cases.over(OPTIONS, *DEFAULT)
def test_agrees_with_reference(case):
    cases.assert_agrees(case, run(case, xla.XlaConfig(CHUNK)))


@cases.over(cases.lengths(CHUNK), f"T{CHUNK + 1}")
def test_lengths(case):
    cases.assert_agrees(case, run(case, xla.XlaConfig(CHUNK)))


def test_double_precision(enable_x64):
    case = cases.Case(dtype="float64", state_dtype="float64", z=True, D=True, initial_state=True)
    cases.assert_agrees(case, run(case, xla.XlaConfig(CHUNK)))


@pytest.mark.slow
def test_forward_mode_and_second_order():
    arrays, spec = cases.make(cases.Case(B=1, T=7, I=3, N=2))
    total = lambda x: jnp.sum(xla.apply(arrays._replace(x=x), spec, xla.XlaConfig(4))[0] ** 2)
    direction = jnp.ones_like(arrays.x)
    _, slope = quick(lambda x: jax.jvp(total, (x,), (direction,)))(arrays.x)
    np.testing.assert_allclose(slope, jnp.sum(quick(jax.grad(total))(arrays.x)), rtol=1e-5)
    _, twice = quick(lambda x: jax.jvp(jax.grad(total), (x,), (direction,)))(arrays.x)
    # The output is linear in x.
    np.testing.assert_allclose(jnp.sum(twice), 2 * total(direction), rtol=1e-4)


@pytest.mark.slow
def test_memory_grows_with_channels_not_states(optimised):
    length, channels, states = 512, 32, 64
    case = cases.Case(B=1, T=length, I=channels, N=states, softplus=True, D=True, z=True, dt_bias=True)
    arrays, spec = cases.make(case)
    loss = lambda arrays: sum(jnp.sum(x) for x in xla.apply(arrays, spec, xla.XlaConfig()))
    memory = optimised(quick(jax.grad(loss)).lower(arrays)).memory_analysis()
    assert memory is not None
    row = 4 * length * channels
    # Every state of every token would be 64 rows.
    assert memory.temp_size_in_bytes < 32 * row
