"""The family's two kinds of calls, sequences and single tokens of every row: their problems and axes."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from .._kernel import Plan
from ..core import Kind, StepKind
from ..dispatch import Problem
from . import reference
from .spec import FLOATS, letters_of, ScanArrays, ScanSpec, SHARED, STEP_FLOATS, step_letters_of, StepArrays

OUT_NAME, STATE_NAME, SAVED_NAME = "selective_scan_out", "selective_scan_state", "selective_scan_saved"
"""Names for `jax.checkpoint_policies.save_only_these_names`: the results and what only the forward kernels can recompute."""


def problem_of(operation: str, arrays: ScanArrays, spec: ScanSpec) -> Problem:
    """The host metadata of a call. Shapes are those seen here: inside a partitioned body, the local ones."""
    packed = "offsets" if arrays.offsets is not None else "segments" if arrays.starts is not None else None
    lengths = {"B", "T", *("S" if packed == "offsets" else "")}
    size = letters_of(arrays).sizes(arrays)
    return Problem.make(
        operation,
        dims={name: size[name] for name in (*lengths, "I", "N", "G")},
        dtypes=_dtypes(arrays, spec.state_dtype),
        flags={
            **_flags(arrays, spec),
            "initial_state": arrays.initial_state is not None,
            "packed": packed,
            "step": False,
        },
        lengths=lengths,
        counts={"I"},
    )


def step_problem_of(operation: str, arrays: StepArrays, spec: ScanSpec) -> Problem:
    size = step_letters_of(arrays).sizes(arrays)
    dims = {"B": size["B"] * arrays.x.shape[-2], "T": 1, "I": size["I"], "N": size["N"], "G": size["G"]}
    if arrays.indices is not None:
        dims["slots"] = size["slots"]
    return Problem.make(
        operation,
        dims=dims,
        dtypes=_dtypes(arrays, arrays.state.dtype),
        flags={**_flags(arrays, spec), "slots": arrays.indices is not None, "step": True},
        lengths={"B", "slots"},
        counts={"I"},
    )


def _dtypes(arrays: ScanArrays | StepArrays, state: Any) -> dict[str, Any]:
    dtypes = {"x": arrays.x.dtype, "dt": arrays.dt.dtype, "B": arrays.B.dtype, "state": jnp.dtype(state)}
    return dtypes if arrays.z is None else dtypes | {"z": arrays.z.dtype}


def _flags(arrays: ScanArrays | StepArrays, spec: ScanSpec) -> dict[str, bool]:
    present = {name: getattr(arrays, name) is not None for name in ("D", "z", "dt_bias")}
    return {"softplus": spec.softplus, **present}


SCAN = Kind(
    make=ScanArrays,
    problem_of=problem_of,
    axes_of=lambda arrays, spec: letters_of(arrays).axes_of(arrays),
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
    axes_of=lambda arrays, spec: step_letters_of(arrays).axes_of(arrays),
    reference=reference.step,
    results=("out", "state"),
    learned=STEP_FLOATS,
    shared=SHARED,
)


def scan(plan: Plan, operation: str, arrays: ScanArrays, spec: ScanSpec) -> tuple[Array, Array]:
    """`out [*, T, I]` in x's dtype and the final state in the spec's, on the platform that the plan chooses."""
    results = SCAN.call(plan, operation, arrays, spec)
    return results["out"], results["final_state"]


def step(plan: Plan, operation: str, arrays: StepArrays, spec: ScanSpec) -> tuple[Array, Array]:
    """`out [*, B, I]` and the new states (the whole pool), on the platform that the plan chooses."""
    results = STEP.call(plan, operation, arrays, spec)
    return results["out"], results["state"]
