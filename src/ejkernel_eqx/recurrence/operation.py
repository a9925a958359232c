"""The common part of every operation of this family: from checked operands to results."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from .._kernel import Kernel, Plan
from .._operations import RECURRENCE
from ..core.along import check_sequence_axis
from ..core.arguments import check_state_dtype
from ..core.frame import Frame, frame_of
from ..core.plans import plan_of as plan_of
from ..dispatch import implementations_of, kernel_registry, PlatformLike
from .along import recur_along
from .arguments import build, build_step, check_scale, Operands
from .core import RECUR, STEP
from .spec import heads_of, RecurrenceSpec


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
        # Without tokens nothing is launched, and each final state is its initial one, by default zero.
        out, state = _no_output(arrays, spec), operands.flipped(states.unchanged(spec.state_dtype))
    elif frame.along is not None:
        out, state = recur_along(frame.along, plan, plan.operation, arrays, spec)
    else:
        out, state = RECUR.in_order(plan, plan.operation, arrays, spec)
    out = frame.mask(out)
    if epilogue is not None:
        # Masked again, so that cotangents at padding, which may be NaN, do not reach its parameters.
        out = frame.mask(epilogue(out))
    return frame.packing.flip(out), states.leaving(operands.flipped(state))


def run_step(
    plan: Plan, frame: Frame, operands: Operands, state: Any, epilogue: Callable[[Array], Array] | None = None
) -> tuple[Array, Array]:
    """Runs one token per row."""
    arrays, spec = build_step(frame, operands, state)
    if frame.is_empty:
        # Without rows nothing is launched, and the states stay as they are.
        out, state = _no_output(arrays, spec), arrays.state
    else:
        out, state = STEP.in_order(plan, plan.operation, arrays, spec)
    out, state = frame.from_rows((out, state))
    return out if epilogue is None else epilogue(out), state


class Recurrence(Kernel):
    """The options that the operations of the package share, and how their calls and steps run."""

    reverse: bool = eqx.field(static=True)
    sequence_axis: str | None = eqx.field(static=True)
    state_dtype: str | None = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def _complete(self, reverse: bool, sequence_axis: Any, state_dtype: Any, *request: Any) -> None:
        """Sets the shared options, as the end of `__init__`; `request`: `platform`, `config`, `tune_for`."""
        self.reverse, self.state_dtype = reverse, check_state_dtype(state_dtype)
        self.sequence_axis = check_sequence_axis(sequence_axis)
        self.plan = plan_of(type(self), self, *request)

    def _frame(
        self,
        main: Any,
        cu_seqlens: Any,
        segment_ids: Any,
        state_indices: Any,
        name: str = "q",
        axes: str = "H D",
    ) -> Frame:
        """The frame of a sequence call by its queries `[..., T, H, D]`, or by what else has its tokens."""
        rest = self.reverse, state_indices, self.sequence_axis
        return frame_of(main, name, axes, cu_seqlens, segment_ids, *rest)

    def _run(
        self, frame: Frame, operands: Operands, state: Any, epilogue: Callable[[Array], Array] | None = None
    ) -> tuple[Array, Array]:
        """Runs a sequence call, or a step if the frame is that of a step."""
        # Only the frame of a step has no axis of tokens.
        if frame.length is None:
            return run_step(self.plan, frame, operands, state, epilogue)
        return run(self.plan, frame, operands, state, self.state_dtype, epilogue)


class ScaledRecurrence(Recurrence):
    """The options of operations that have a scale besides."""

    scale: float | None = eqx.field(static=True)

    def __init__(
        self,
        scale: float | None = None,
        *,
        reverse: bool = False,
        sequence_axis: str | None = None,
        state_dtype: DTypeLike | None = None,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `scale`: scale of the outputs; default `D**-0.5`.
        - `reverse`: run from the last token to the first (of each sequence); the final state is then the one after token 0.
        - `sequence_axis`: a mesh axis that the tokens are split over, in order: devices run their own and pass the states on. Inside `jax.shard_map`
            a call has one device's tokens. Elsewhere it has all, split as their types say on an explicit mesh; on an automatic one the
            compiler decides, and the backward computes the forward again. The final state is that after the tokens of all devices. Without
            effect with `cu_seqlens` or `state_indices`, and where the mesh lacks the axis or does not divide the tokens.
        - `state_dtype`: storage dtype of the states, float32 (default) or bfloat16; accumulation is in float32 (float64 for float64).
        - `platform`: use this platform or raise; `None` chooses by device and call.
        - `config`: use this kernel configuration, which implies its platform.
        - `tune_for`: `(q, k, v, g)`, for `DPLRDeltaRule` `(q, k, v, a, b, g)`, or [`ejkernel_eqx.inputs`][]`(...)`, arrays or
            `jax.ShapeDtypeStruct`s: fix the choice for these inputs now.
        """
        self.scale = check_scale(scale)
        self._complete(reverse, sequence_axis, state_dtype, platform, config, tune_for)


def _no_output(arrays: Any, spec: RecurrenceSpec) -> Array:
    """The output for zero tokens or zero rows."""
    shape = (*arrays.q.shape[:-2], heads_of(arrays, spec).out, arrays.v.shape[-1])
    return jnp.zeros(shape, arrays.v.dtype)
