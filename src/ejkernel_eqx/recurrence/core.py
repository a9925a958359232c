"""The family's two kinds of calls, sequences and single tokens of every row: their problems and axes."""

from typing import Any

import jax
import jax.numpy as jnp

from ..core import Kind, StepKind
from ..dispatch import Problem
from . import reference
from .spec import FLOATS, letters_of, RecurrenceArrays, RecurrenceSpec, sizes_of, STEP_FLOATS, StepArrays

OUT_NAME, STATE_NAME, SAVED_NAME = "recurrence_out", "recurrence_state", "recurrence_saved"
"""Names for `jax.checkpoint_policies.save_only_these_names`: the results and what only the forward kernels can recompute."""
KEPT = jax.checkpoint_policies.save_only_these_names(OUT_NAME, STATE_NAME, SAVED_NAME)
"""The policy of calls that compute their decays in float32 from something smaller, and again for the gradient."""


_HEADS = {"R", "HS", "Hq", "Hk", "Hv"}


def problem_of(operation: str, arrays: RecurrenceArrays, spec: RecurrenceSpec) -> Problem:
    """The host metadata of a call. Shapes are those seen here: inside a partitioned body, the local ones."""
    packed = "offsets" if arrays.offsets is not None else "segments" if arrays.starts is not None else None
    initial = arrays.initial_state is not None
    return _problem(
        operation,
        (arrays, spec, spec.state_dtype),
        sizes_of(arrays, spec),
        flags={"initial_state": initial, "packed": packed, "step": False},
        lengths={"B", "T", *("N" if packed == "offsets" else "")},
        counts=_HEADS | {"Hg", "Hb", "Ha", "Hw"},
        # It is read once per sequence, so the fastest choice is the same with and without it.
        requirements={"initial_state"},
    )


def step_problem_of(operation: str, arrays: StepArrays, spec: RecurrenceSpec) -> Problem:
    size, slots = sizes_of(arrays, spec), arrays.indices is not None
    return _problem(
        operation,
        (arrays, spec, arrays.state.dtype),
        size | {"B": size["B"] * arrays.q.shape[-3], "T": 1},
        flags={"slots": slots, "transposed": spec.transposed, "step": True},
        lengths={"B", "slots"},
        counts=_HEADS,
    )


def _problem(
    operation: str, call: Any, size: dict[str, int], flags: dict[str, Any], counts: set[str], **more: Any
) -> Problem:
    """The problem of a call or a step: of its arrays, its spec and the dtype of its states, and of their sizes."""
    arrays, spec, state = call
    dtypes = {"qkv": arrays.q.dtype, "state": jnp.dtype(state)}
    given = {"beta": arrays.beta is not None, "skip": arrays.skip is not None}
    # Only where it is so, since other problems are known by their flags in tables of measurements.
    given |= {} if arrays.a is None else {"rank_one": True}
    given |= {"before": True} if spec.before else {}
    names = more["lengths"] | counts | {"T", "D", "V"}
    return Problem.make(
        operation,
        dims={name: count for name, count in size.items() if name in names},
        dtypes=dtypes if arrays.g is None else dtypes | {"g": arrays.g.dtype},
        flags={"decay": spec.decay, "delta": spec.delta, **given, **flags},
        counts=counts & size.keys(),
        **more,
    )


def _axes_of(arrays: RecurrenceArrays | StepArrays, spec: RecurrenceSpec) -> dict[str, tuple[str, ...]]:
    return letters_of(arrays, spec).named(sizes_of(arrays, spec))


RECUR = Kind(
    make=RecurrenceArrays,
    problem_of=problem_of,
    axes_of=_axes_of,
    reference=reference.recur,
    results=("out", "final_state"),
    learned=FLOATS,
    saved_of=lambda platform, arrays, spec: platform.saved_axes(arrays, spec),
    names={"out": OUT_NAME, "final_state": STATE_NAME, "saved": SAVED_NAME},
)
STEP = StepKind(
    make=StepArrays,
    problem_of=step_problem_of,
    axes_of=_axes_of,
    reference=reference.step,
    results=("out", "state"),
    learned=STEP_FLOATS,
)
