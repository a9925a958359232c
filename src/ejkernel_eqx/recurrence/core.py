"""The family's two kinds of calls, sequences and single tokens of every row: their problems and axes."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._kernel import Plan
from ..core import Kind, StepKind
from ..dispatch import Problem
from . import reference
from .spec import (
    FLOATS,
    letters_of,
    RecurrenceArrays,
    RecurrenceSpec,
    sizes_of,
    STEP_FLOATS,
    step_letters_of,
    step_sizes_of,
    StepArrays,
    StepSpec,
)

OUT_NAME, STATE_NAME, SAVED_NAME = "recurrence_out", "recurrence_state", "recurrence_saved"
"""Names for `jax.checkpoint_policies.save_only_these_names`: the results and what only the forward kernels can recompute."""
KEPT = jax.checkpoint_policies.save_only_these_names(OUT_NAME, STATE_NAME, SAVED_NAME)
"""The policy of calls that compute their decays in float32 from something smaller, and again for the gradient."""


def problem_of(operation: str, arrays: RecurrenceArrays, spec: RecurrenceSpec) -> Problem:
    """The host metadata of a call. Shapes are those seen here: inside a partitioned body, the local ones."""
    packed = "offsets" if arrays.offsets is not None else "segments" if arrays.starts is not None else None
    size, lengths = sizes_of(arrays, spec), {"B", "T", *("N" if packed == "offsets" else "")}
    counts = {"R", "HS", "Hq", "Hk", "Hv", "Hg", "Hb"} & size.keys()
    return Problem.make(
        operation,
        dims={name: size[name] for name in (*lengths, *counts, "D", "V")},
        dtypes=_dtypes(arrays.q, arrays.g, spec.state_dtype),
        flags={
            "decay": spec.decay,
            "delta": spec.delta,
            "beta": arrays.beta is not None,
            "skip": arrays.skip is not None,
            "initial_state": arrays.initial_state is not None,
            "packed": packed,
            "step": False,
        },
        lengths=lengths,
        counts=counts,
        # It is read once per sequence, so the fastest choice is the same with and without it.
        requirements={"initial_state"},
    )


def step_problem_of(operation: str, arrays: StepArrays, spec: StepSpec) -> Problem:
    size, counts = step_sizes_of(arrays, spec), {"R", "HS", "Hq", "Hk", "Hv"}
    dims = {name: size[name] for name in (*counts, "D", "V")}
    dims |= {"B": size["B"] * arrays.q.shape[-3], "T": 1}
    if arrays.indices is not None:
        dims["slots"] = size["slots"]
    return Problem.make(
        operation,
        dims=dims,
        dtypes=_dtypes(arrays.q, arrays.g, arrays.state.dtype),
        flags={
            "decay": spec.decay,
            "delta": spec.delta,
            "beta": arrays.beta is not None,
            "skip": arrays.skip is not None,
            "slots": arrays.indices is not None,
            "transposed": spec.transposed,
            "step": True,
        },
        lengths={"B", "slots"},
        counts=counts,
    )


def _dtypes(q: Any, g: Any, state: Any) -> dict[str, Any]:
    dtypes = {"qkv": q.dtype, "state": jnp.dtype(state)}
    return dtypes if g is None else dtypes | {"g": g.dtype}


RECUR = Kind(
    make=RecurrenceArrays,
    problem_of=problem_of,
    axes_of=lambda arrays, spec: letters_of(arrays, spec).named(sizes_of(arrays, spec)),
    reference=reference.recur,
    results=("out", "final_state"),
    learned=FLOATS,
    saved_of=lambda platform, arrays, spec: platform.saved_axes(arrays, spec),
    names={"out": OUT_NAME, "final_state": STATE_NAME, "saved": SAVED_NAME},
)
STEP = StepKind(
    make=StepArrays,
    problem_of=step_problem_of,
    axes_of=lambda arrays, spec: step_letters_of(arrays, spec).named(step_sizes_of(arrays, spec)),
    reference=reference.step,
    results=("out", "state"),
    learned=STEP_FLOATS,
)


def recur(plan: Plan, operation: str, arrays: RecurrenceArrays, spec: RecurrenceSpec) -> tuple[Array, Array]:
    """`out [*, T, R, V]` in v's dtype and the final state in the spec's, on the platform that the plan chooses."""
    results = RECUR.call(plan, operation, arrays, spec)
    return results["out"], results["final_state"]


def step(plan: Plan, operation: str, arrays: StepArrays, spec: StepSpec) -> tuple[Array, Array]:
    """`out [*, B, R, V]` and the new states (the whole pool), on the platform that the plan chooses."""
    results = STEP.call(plan, operation, arrays, spec)
    return results["out"], results["state"]
