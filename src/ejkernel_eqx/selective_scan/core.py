"""The family's two kinds of calls, sequences and single tokens of every row: their problems and axes."""

from typing import Any

import jax.numpy as jnp

from ..core import Kind, StepKind
from ..dispatch import Problem
from . import reference
from .spec import FLOATS, letters_of, ScanArrays, ScanSpec, SHARED, STEP_FLOATS, StepArrays

OUT_NAME, STATE_NAME, SAVED_NAME = "selective_scan_out", "selective_scan_state", "selective_scan_saved"
"""Names for `jax.checkpoint_policies.save_only_these_names`: the results and what only the forward kernels can recompute."""


def problem_of(operation: str, arrays: ScanArrays, spec: ScanSpec) -> Problem:
    """The host metadata of a call. Shapes are those seen here: inside a partitioned body, the local ones."""
    packed = "offsets" if arrays.offsets is not None else "segments" if arrays.starts is not None else None
    flags = {"initial_state": arrays.initial_state is not None, "packed": packed, "step": False}
    size, lengths = letters_of(arrays).sizes(arrays), {"B", "T", *("S" if packed == "offsets" else "")}
    return _problem(operation, (arrays, spec, spec.state_dtype), size, flags, lengths)


def step_problem_of(operation: str, arrays: StepArrays, spec: ScanSpec) -> Problem:
    size = letters_of(arrays).sizes(arrays)
    size |= {"B": size["B"] * arrays.x.shape[-2], "T": 1}
    flags = {"slots": arrays.indices is not None, "step": True}
    return _problem(operation, (arrays, spec, arrays.state.dtype), size, flags, {"B", "slots"})


def _problem(
    operation: str, call: Any, size: dict[str, int], flags: dict[str, Any], lengths: set[str]
) -> Problem:
    """The problem of a call or a step: of its arrays, its spec and the dtype of its states, and of their sizes."""
    arrays, spec, state = call
    dtypes = {"x": arrays.x.dtype, "dt": arrays.dt.dtype, "B": arrays.B.dtype, "state": jnp.dtype(state)}
    present = {name: getattr(arrays, name) is not None for name in ("D", "z", "dt_bias")}
    return Problem.make(
        operation,
        dims={name: count for name, count in size.items() if name in lengths | {"T", "I", "N", "G"}},
        dtypes=dtypes if arrays.z is None else dtypes | {"z": arrays.z.dtype},
        flags={"softplus": spec.softplus, **present, **flags},
        lengths=lengths,
        counts={"I"},
    )


def _axes_of(arrays: ScanArrays | StepArrays, spec: ScanSpec) -> dict[str, tuple[str, ...]]:
    return letters_of(arrays).axes_of(arrays)


SCAN = Kind(
    make=ScanArrays,
    problem_of=problem_of,
    axes_of=_axes_of,
    reference=reference.scan,
    results=("out", "final_state"),
    learned=FLOATS,
    shared=SHARED,
    saved_of=lambda platform, arrays, spec: {"states": ("chunks", "N", f"H{arrays.x.shape[-1]}")},
    names={"out": OUT_NAME, "final_state": STATE_NAME, "saved": SAVED_NAME},
)
STEP = StepKind(
    make=StepArrays,
    problem_of=step_problem_of,
    axes_of=_axes_of,
    reference=reference.step,
    results=("out", "state"),
    learned=STEP_FLOATS,
    shared=SHARED,
)
