"""Resolves the arguments of every operation of this family to `RecurrenceArrays` or `StepArrays`.

Errors are raised before anything is computed and name the argument, what was expected, what was received, and the remedy.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from ..core.arguments import never_positive
from ..core.frame import Frame as Frame
from ..core.frame import frame_of as frame_of
from ..core.frame import States
from ..core.frame import step_frame_of as step_frame_of
from .spec import CONSTANT, NONE, RecurrenceArrays, RecurrenceSpec, SCALAR, StepArrays


def check_scale(scale: float | None) -> float | None:
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number or None, received {scale}; None means D**-0.5.")
    return None if scale is None else float(scale)


def log_decays(name: str, g: Array) -> Array:
    """`g`, whose padding is zero, unless a value is known to be positive."""
    return never_positive(name, g, "log-decays", "pass the logarithm of a decay between 0 and 1")


@dataclasses.dataclass(frozen=True, eq=False)
class Operands:
    """The mathematical operands of a call. Each array has been checked, and its padding is zero."""

    q: Array
    k: Array
    v: Array
    scale: float | None
    """`None`: `D**-0.5`."""
    g: Array | None = None
    beta: Array | None = None
    skip: Array | None = None
    a: Array | None = None
    b: Array | None = None
    decay: str = NONE
    delta: bool = False
    before: bool = False
    """True if outputs read the state before their token."""
    transposed: bool = False
    """True if the caller's states are `[V, D]`."""

    @property
    def resolved_scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5) if self.scale is None else self.scale

    def of_states(self) -> tuple[tuple[int, ...], str]:
        """Sizes of the caller's states, heads first, and their letters."""
        sizes = (self.q.shape[-1], self.v.shape[-1])
        heads = check_heads(self)
        return ((heads, *sizes[::-1]), "H P N") if self.transposed else ((heads, *sizes), "H D V")

    def flipped(self, state: Array) -> Array:
        """States from the caller's layout to `[D, V]` or back."""
        return jnp.swapaxes(state, -1, -2) if self.transposed else state


def build(
    frame: Frame, operands: Operands, initial_state: Any, state_dtype: str | None
) -> tuple[RecurrenceArrays, RecurrenceSpec, States]:
    """The resolved call, with its states in the caller's layout."""
    g, decay, packing = operands.g, operands.decay, frame.packing
    if decay == CONSTANT and packing.starts is not None:
        # One number per head cannot express padding; one per token can.
        assert g is not None
        decay = SCALAR
        g = packing.mask(jnp.broadcast_to(g[..., None, :], (*frame.over_tokens, g.shape[-1])))
    dtype = frame.state_dtype(state_dtype)
    spec = RecurrenceSpec(operands.resolved_scale, decay, operands.delta, dtype, before=operands.before)
    states = frame.states(initial_state, *operands.of_states(), spec.state_dtype)
    entering = None if states.entering is None else operands.flipped(states.entering)
    q, k, v, beta, skip = operands.q, operands.k, operands.v, operands.beta, operands.skip
    arrays = RecurrenceArrays(q, k, v, g, beta, skip, entering, packing.starts, packing.offsets)
    return arrays._replace(a=operands.a, b=operands.b), spec, states


def build_step(frame: Frame, operands: Operands, state: Any) -> tuple[StepArrays, RecurrenceSpec]:
    """The resolved step. Without `state_indices` every row has its own state; with them, one axis of rows shares a pool."""
    # One number per head becomes one per row here.
    decay = SCALAR if operands.decay == CONSTANT else operands.decay
    layout: dict[str, Any] = {"transposed": operands.transposed, "before": operands.before}
    spec = RecurrenceSpec(operands.resolved_scale, decay, operands.delta, **layout)
    state, indices = frame.row_states(state, *operands.of_states())
    arrays = StepArrays(operands.q, operands.k, operands.v, state, operands.g, operands.beta)
    arrays = arrays._replace(a=operands.a, b=operands.b)
    skip = operands.skip
    if indices is not None and skip is not None:
        skip = skip[0]  # parameters are shared by all rows
    return frame.as_rows(arrays)._replace(skip=skip, indices=indices), spec


def read_pair(name: str, state: Any, form: str) -> tuple[Any, Any]:
    """Both parts of a state of the form `form`, `None` if there is none."""
    if state is None:
        return None, None
    if not isinstance(state, tuple | list) or len(state) != 2:
        raise ValueError(
            f"{name}: expected a pair {form}, received {type(state).__name__}; every call returns both."
        )
    return state[0], state[1]


def check_heads(operands: Operands) -> int:
    """The number of state heads. Every head count must divide the largest, and those of the state's operands the state's."""
    counts = {name: getattr(operands, name).shape[-2] for name in ("q", "k", "v")}
    if operands.g is not None:
        counts["g"] = operands.g.shape[-1 if operands.decay in (CONSTANT, SCALAR) else -2]
    if operands.beta is not None:
        counts["beta"] = operands.beta.shape[-1]
    counts |= {name: x.shape[-2] for name in "ab" if (x := getattr(operands, name)) is not None}
    state = max([n for name, n in counts.items() if name != "q"])
    largest = max(state, counts["q"])
    for name, n in reversed(counts.items()):
        whole = largest if name == "q" else state
        if n == 0 or whole % n or (name == "q" and largest % state):
            raise ValueError(
                f"{name}: expected a head count that divides the largest, received {n} among {counts}; the layout is [..., T, H, D]."
            )
    return state
