"""From checked operands to results: what every operation of this family does behind its signature."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from .._inputs import as_inputs
from .._kernel import Kernel, make_plan, Plan, settle
from ..core import platforms
from .arguments import build, build_step, check_heads, Frame, Operands, read_pool
from .core import recur, step
from .spec import heads_of


def register(operation: str) -> None:
    """Registers an operation of this family on all its platforms."""
    platforms.register(operation, __package__)


def plan_of(
    cls: type[Kernel], module: Kernel, platform: str | None, config: Any | None, tune_for: Any | None
) -> Plan:
    """The plan of a module of class `cls` whose `__init__` has set every other field."""
    plan = make_plan(cls.operation, platform=platform, config=config)
    if tune_for is None:
        return plan
    probe = object.__new__(cls)
    for name, value in {**vars(module), "plan": plan}.items():
        object.__setattr__(probe, name, value)
    return settle(probe, as_inputs(tune_for))


def run(
    plan: Plan,
    frame: Frame,
    operands: Operands,
    initial_state: Any,
    state_dtype: str | None,
    epilogue: Callable[[Array], Array] | None = None,
    state_indices: Any = None,
) -> tuple[Array, Array]:
    """A sequence. `epilogue` sees the outputs in the kernels' order, zero where there is padding, and leaves zeros there. With
    `state_indices` the initial state is a pool, and so is what comes back."""
    pool = None
    if state_indices is not None:
        sizes, letters = operands.state_sizes()
        pool = read_pool(frame, initial_state, state_indices, (check_heads(operands), *sizes), letters)
        initial_state = pool.read()
    arrays, spec = build(frame, operands, initial_state, state_dtype)
    if frame.length == 0 or 0 in frame.lead:
        out, state = _empty(arrays, spec)
    else:
        out, state = recur(plan, plan.operation, arrays, spec)
    out = frame.mask(out)
    if epilogue is not None:
        # Again, so that the cotangents of padding, which may be NaN, stay out of its parameters.
        out = frame.mask(epilogue(out))
    out = frame.packing.flip(out)
    state = frame.packing.states(state)
    state = jnp.swapaxes(state, -1, -2) if operands.transposed else state
    return out, state if pool is None else pool.written(state)


def run_step(
    plan: Plan,
    frame: Frame,
    operands: Operands,
    state: Any,
    state_indices: Any,
    epilogue: Callable[[Array], Array] | None = None,
) -> tuple[Array, Array]:
    """One token of every row."""
    arrays, spec = build_step(frame, operands, state, state_indices)
    if 0 in frame.lead:
        rows, heads = arrays.q.shape[:-2], max(arrays.state.shape[-3], arrays.q.shape[-2])
        out, state = jnp.zeros((*rows, heads, arrays.v.shape[-1]), arrays.v.dtype), arrays.state
    else:
        out, state = step(plan, plan.operation, arrays, spec)
    if state_indices is None:
        at = len(frame.lead)
        out, state = jnp.squeeze(out, at), jnp.squeeze(state, at)
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
