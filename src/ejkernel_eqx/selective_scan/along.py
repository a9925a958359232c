"""A selective scan whose tokens are split over a mesh axis: each device's tokens from a zero state, then from the one that enters them.

A state remains after tokens by `exp(A * sum of their time steps)`, so only the states at the ends of devices are exchanged.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array

from .._broadcast import like
from .._kernel import Plan
from ..core.along import Along, passed_on
from ..core.arguments import accumulator
from .core import SCAN
from .reference import time_step
from .spec import ScanArrays, ScanSpec


def scan_along(
    along: Along, plan: Plan, operation: str, arrays: ScanArrays, spec: ScanSpec
) -> tuple[Array, Array]:
    """Runs `SCAN`: this device's outputs, and the state after the last token of all devices."""
    wide = accumulator(arrays.x.dtype)
    # States between devices stay in the dtype of sums; the final one is rounded once.
    inner = dataclasses.replace(spec, state_dtype=jnp.dtype(wide).name)
    # The first pass gives what the tokens of each device leave of a zero state.
    _, local_state = SCAN.in_order(plan, operation, arrays._replace(initial_state=None), inner)
    state = jnp.zeros_like(local_state) if arrays.initial_state is None else arrays.initial_state.astype(wide)
    steps = time_step(arrays.dt, arrays.dt_bias, spec.softplus, wide).sum(-2)[..., None]  # [*, I, 1]
    passed = passed_on(jnp.exp(steps * like(arrays.A.astype(wide), steps)), arrays.starts)
    entering, _ = along.carry(lambda part, state: part[0] * state + part[1], (passed, local_state), state)
    # The second pass runs the same tokens from the state that enters them.
    out, final = SCAN.in_order(plan, operation, arrays._replace(initial_state=entering), inner)
    return out, along.last(final).astype(spec.state_dtype)
