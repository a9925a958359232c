"""The common part of every operation of this family: from checked operands to results."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from .._kernel import Plan
from .._operations import RECURRENCE
from ..core.frame import Frame
from ..core.plans import plan_of as plan_of
from ..dispatch import implementations_of, kernel_registry
from .along import recur_along
from .arguments import build, build_step, check_heads, Operands
from .core import recur, step


def register(operation: str) -> None:
    """Registers an operation of this family that the package does not have, on all the family's platforms."""
    for implementation in implementations_of(operation, RECURRENCE):
        kernel_registry.add(implementation)


def run(
    plan: Plan,
    frame: Frame,
    operands: Operands,
    initial_state: Any,
    state_dtype: str | None,
    epilogue: Callable[[Array], Array] | None = None,
) -> tuple[Array, Array]:
    """Runs sequences. `epilogue` receives the outputs in the kernels' order, zero at padding, and must keep those zeros."""
    arrays, spec, states = build(frame, operands, initial_state, state_dtype)
    if frame.is_empty:
        out, state = _no_output(arrays, operands), operands.flipped(states.unchanged(spec.state_dtype))
    elif frame.along is not None:
        out, state = recur_along(frame.along, plan, plan.operation, arrays, spec)
    else:
        out, state = recur(plan, plan.operation, arrays, spec)
    out = frame.mask(out)
    if epilogue is not None:
        # Masked again, so that cotangents at padding, which may be NaN, do not reach its parameters.
        out = frame.mask(epilogue(out))
    return frame.packing.flip(out), states.leaving(operands.flipped(state))


def run_step(
    plan: Plan,
    frame: Frame,
    operands: Operands,
    state: Any,
    epilogue: Callable[[Array], Array] | None = None,
) -> tuple[Array, Array]:
    """Runs one token per row."""
    arrays, spec = build_step(frame, operands, state)
    if frame.is_empty:
        out, state = _no_output(arrays, operands), arrays.state
    else:
        out, state = step(plan, plan.operation, arrays, spec)
    out, state = frame.from_rows((out, state))
    return out if epilogue is None else epilogue(out), state


def _no_output(arrays: Any, operands: Operands) -> Array:
    """The output for zero tokens or zero rows."""
    heads = max(check_heads(operands), arrays.q.shape[-2])
    return jnp.zeros((*arrays.q.shape[:-2], heads, arrays.v.shape[-1]), arrays.v.dtype)
