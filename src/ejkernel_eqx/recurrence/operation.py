"""From checked operands to results: what every operation of this family does behind its signature."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from .._kernel import Plan
from ..core import platforms
from ..core.frame import Frame
from ..core.plans import plan_of as plan_of
from .arguments import build, build_step, Operands
from .core import recur, step
from .spec import heads_of


def register(operation: str) -> None:
    """Registers an operation of this family on all its platforms."""
    platforms.register(operation, __package__)


def run(
    plan: Plan,
    frame: Frame,
    operands: Operands,
    initial_state: Any,
    state_dtype: str | None,
    epilogue: Callable[[Array], Array] | None = None,
) -> tuple[Array, Array]:
    """A sequence. `epilogue` sees the outputs in the kernels' order, zero where there is padding, and leaves zeros there."""
    arrays, spec, states = build(frame, operands, initial_state, state_dtype)
    if frame.is_empty:
        out, state = _empty(arrays, spec)
    else:
        out, state = recur(plan, plan.operation, arrays, spec)
    out = frame.mask(out)
    if epilogue is not None:
        # Again, so that the cotangents of padding, which may be NaN, stay out of its parameters.
        out = frame.mask(epilogue(out))
    return frame.packing.flip(out), states.leaving(operands.flipped(state))


def run_step(
    plan: Plan,
    frame: Frame,
    operands: Operands,
    state: Any,
    epilogue: Callable[[Array], Array] | None = None,
) -> tuple[Array, Array]:
    """One token of every row."""
    arrays, spec = build_step(frame, operands, state)
    if frame.is_empty:
        rows, heads = arrays.q.shape[:-2], max(arrays.state.shape[-3], arrays.q.shape[-2])
        out, state = jnp.zeros((*rows, heads, arrays.v.shape[-1]), arrays.v.dtype), arrays.state
    else:
        out, state = step(plan, plan.operation, arrays, spec)
    out, state = frame.from_rows((out, state))
    return out if epilogue is None else epilogue(out), state


def _empty(arrays: Any, spec: Any) -> tuple[Array, Array]:
    """No token or no row at all: no output, and the state as it came."""
    heads = heads_of(arrays, spec)
    lead, dim, values = arrays.q.shape[:-2], arrays.q.shape[-1], arrays.v.shape[-1]
    count = () if arrays.offsets is None else (arrays.offsets.shape[-1] - 1,)
    state = arrays.initial_state
    if state is None:
        state = jnp.zeros((*lead[:-1], *count, heads.state, dim, values), spec.state_dtype)
    return jnp.zeros((*lead, heads.out, values), arrays.v.dtype), state
