"""The family's two kinds of calls, a sequence and a token of every row: their problems and their axes."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from .._kernel import Plan
from ..core import Kind, StepKind
from ..dispatch import Problem
from . import reference
from .spec import FLOATS, ScanArrays, ScanSpec, SHARED, STEP_FLOATS, StepArrays

OUT_NAME, STATE_NAME, SAVED_NAME = "selective_scan_out", "selective_scan_state", "selective_scan_saved"
"""Names for `jax.checkpoint_policies.save_only_these_names`: the results, and what only the forward kernels can make again."""


def problem_of(operation: str, arrays: ScanArrays, spec: ScanSpec) -> Problem:
    """The host metadata of a call; shapes are those seen here, so the local ones inside a partitioned body."""
    packed = "offsets" if arrays.offsets is not None else "segments" if arrays.starts is not None else None
    dims = {"B": math.prod(arrays.x.shape[:-2]), "T": arrays.x.shape[-2], **_sizes(arrays)}
    lengths = {"B", "T"}
    if arrays.offsets is not None:
        dims["S"] = arrays.offsets.shape[-1] - 1
        lengths.add("S")
    return Problem.make(
        operation,
        dims=dims,
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
    dims = {"B": math.prod(arrays.x.shape[:-1]), "T": 1, **_sizes(arrays)}
    if arrays.indices is not None:
        dims["slots"] = arrays.state.shape[-3]
    return Problem.make(
        operation,
        dims=dims,
        dtypes=_dtypes(arrays, arrays.state.dtype),
        flags={**_flags(arrays, spec), "slots": arrays.indices is not None, "step": True},
        lengths={"B", "slots"},
        counts={"I"},
    )


def _sizes(arrays: ScanArrays | StepArrays) -> dict[str, int]:
    return {"I": arrays.A.shape[-2], "N": arrays.A.shape[-1], "G": arrays.B.shape[-2]}


def _dtypes(arrays: ScanArrays | StepArrays, state: Any) -> dict[str, Any]:
    dtypes = {"x": arrays.x.dtype, "dt": arrays.dt.dtype, "B": arrays.B.dtype, "state": jnp.dtype(state)}
    return dtypes if arrays.z is None else dtypes | {"z": arrays.z.dtype}


def _flags(arrays: ScanArrays | StepArrays, spec: ScanSpec) -> dict[str, bool]:
    return {
        "softplus": spec.softplus,
        "D": arrays.D is not None,
        "z": arrays.z is not None,
        "dt_bias": arrays.dt_bias is not None,
    }


def axes_of(arrays: ScanArrays | StepArrays, rows: str = "T") -> dict[str, tuple[str, ...]]:
    """The axes behind the leading ones of every array that the two kinds of call share. Channels do not mix: they may be split as
    heads are."""
    channels, groups = f"H{arrays.x.shape[-1]}", f"H{arrays.B.shape[-2]}"
    over_tokens, projection = (rows, channels), (rows, groups, "N")
    return {
        "x": over_tokens,
        "dt": over_tokens,
        "z": over_tokens,
        "out": over_tokens,
        "A": (channels, "N"),
        "B": projection,
        "C": projection,
        "D": (channels,),
        "dt_bias": (channels,),
    }


def _scan_axes(arrays: ScanArrays, spec: ScanSpec) -> dict[str, tuple[str, ...]]:
    axes = axes_of(arrays)
    channels = axes["D"][0]
    state = (*(("S",) if arrays.offsets is not None else ()), channels, "N")
    return axes | {"initial_state": state, "final_state": state, "starts": ("T",), "offsets": ("offsets",)}


def _saved_axes(platform: Any, arrays: ScanArrays, spec: ScanSpec) -> dict[str, tuple[str, ...]]:
    return {"states": ("chunks", "N", f"H{arrays.x.shape[-1]}")}


def _step_axes(arrays: StepArrays, spec: ScanSpec) -> dict[str, tuple[str, ...]]:
    # Rows with a state each are split over devices as leading axes are; a pool of states is everyone's.
    rows, slots = ("b", "b") if arrays.indices is None else ("B", "slots")
    axes = axes_of(arrays, rows)
    return axes | {"state": (slots, *axes["A"]), "indices": (rows,)}


SCAN = Kind(
    make=ScanArrays,
    problem_of=problem_of,
    axes_of=_scan_axes,
    reference=reference.scan,
    results=("out", "final_state"),
    learned=FLOATS,
    shared=SHARED,
    saved_of=_saved_axes,
    names={"out": OUT_NAME, "final_state": STATE_NAME, "saved": SAVED_NAME},
)
STEP = StepKind(
    make=StepArrays,
    problem_of=step_problem_of,
    axes_of=_step_axes,
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
