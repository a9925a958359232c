"""The family's two kinds of calls, a sequence and a token of every row: their problems and their axes."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from .._kernel import Plan
from ..core import Kind, StepKind
from ..dispatch import Problem
from . import reference
from .spec import (
    CONSTANT,
    FLOATS,
    heads_of,
    KEY,
    RecurrenceArrays,
    RecurrenceSpec,
    SCALAR,
    STEP_FLOATS,
    StepArrays,
    StepSpec,
    VALUE,
)

OUT_NAME, STATE_NAME, SAVED_NAME = "recurrence_out", "recurrence_state", "recurrence_saved"
"""Names for `jax.checkpoint_policies.save_only_these_names`: the results, and what only the forward kernels can make again."""


def problem_of(operation: str, arrays: RecurrenceArrays, spec: RecurrenceSpec) -> Problem:
    """The host metadata of a call; shapes are those seen here, so the local ones inside a partitioned body."""
    heads = heads_of(arrays, spec)
    packed = "offsets" if arrays.offsets is not None else "segments" if arrays.starts is not None else None
    dims = {
        "B": math.prod(arrays.q.shape[:-3]),
        "T": arrays.q.shape[-3],
        "D": arrays.q.shape[-1],
        "V": arrays.v.shape[-1],
        "R": heads.out,
        "HS": heads.state,
        "Hq": arrays.q.shape[-2],
        "Hk": arrays.k.shape[-2],
        "Hv": arrays.v.shape[-2],
    }
    lengths = {"B", "T"}
    counts = {"R", "HS", "Hq", "Hk", "Hv"}
    if arrays.g is not None:
        dims["Hg"] = arrays.g.shape[-1] if spec.decay in (CONSTANT, SCALAR) else arrays.g.shape[-2]
        counts.add("Hg")
    if arrays.beta is not None:
        dims["Hb"] = arrays.beta.shape[-1]
        counts.add("Hb")
    if arrays.offsets is not None:
        dims["N"] = arrays.offsets.shape[-1] - 1
        lengths.add("N")
    return Problem.make(
        operation,
        dims=dims,
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
        # It is read once a sequence: what is fastest without one is with one.
        requirements={"initial_state"},
    )


def step_problem_of(operation: str, arrays: StepArrays, spec: StepSpec) -> Problem:
    state_heads = arrays.state.shape[-3]
    dims = {
        "B": math.prod(arrays.q.shape[:-2]),
        "T": 1,
        "D": arrays.q.shape[-1],
        "V": arrays.v.shape[-1],
        "R": max(state_heads, arrays.q.shape[-2]),
        "HS": state_heads,
        "Hq": arrays.q.shape[-2],
        "Hk": arrays.k.shape[-2],
        "Hv": arrays.v.shape[-2],
    }
    if arrays.indices is not None:
        dims["slots"] = arrays.state.shape[-4]
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
        counts={"R", "HS", "Hq", "Hk", "Hv"},
    )


def _dtypes(q: Any, g: Any, state: Any) -> dict[str, Any]:
    dtypes = {"qkv": q.dtype, "state": jnp.dtype(state)}
    return dtypes if g is None else dtypes | {"g": g.dtype}


def axes_of(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> dict[str, tuple[str, ...]]:
    """The axes behind the leading ones of every array of a call and of its results."""
    heads = heads_of(arrays, spec)
    h = lambda x: f"H{x.shape[-2]}"
    state = (*(("N",) if arrays.offsets is not None else ()), f"H{heads.state}", "D", "V")
    axes: dict[str, tuple[str, ...]] = {
        "q": ("T", h(arrays.q), "D"),
        "k": ("T", h(arrays.k), "D"),
        "v": ("T", h(arrays.v), "V"),
        "skip": (f"H{heads.state}", "V"),
        "initial_state": state,
        "starts": ("T",),
        "offsets": ("offsets",),
        "out": ("T", f"H{heads.out}", "V"),
        "final_state": state,
    }
    if arrays.g is not None:
        if spec.decay == CONSTANT:
            axes["g"] = (f"H{arrays.g.shape[-1]}",)
        elif spec.decay in (KEY, VALUE):
            axes["g"] = ("T", h(arrays.g), "D" if spec.decay == KEY else "V")
        else:
            axes["g"] = ("T", f"H{arrays.g.shape[-1]}")
    if arrays.beta is not None:
        axes["beta"] = ("T", f"H{arrays.beta.shape[-1]}")
    return axes


def step_axes_of(arrays: StepArrays, spec: StepSpec) -> dict[str, tuple[str, ...]]:
    h = lambda x: f"H{x.shape[-2]}"
    state_heads = arrays.state.shape[-3]
    out_heads = max(state_heads, arrays.q.shape[-2])
    channels = ("V", "D") if spec.transposed else ("D", "V")
    # Rows with a state each are split over devices as leading axes are; a pool of states is everyone's.
    rows, slots = ("b", "b") if arrays.indices is None else ("B", "slots")
    axes: dict[str, tuple[str, ...]] = {
        "q": (rows, h(arrays.q), "D"),
        "k": (rows, h(arrays.k), "D"),
        "v": (rows, h(arrays.v), "V"),
        "state": (slots, f"H{state_heads}", *channels),
        "skip": (f"H{state_heads}", "V"),
        "indices": (rows,),
        "out": (rows, f"H{out_heads}", "V"),
    }
    if arrays.g is not None:
        channel = {KEY: ("D",), VALUE: ("V",)}.get(spec.decay)
        axes["g"] = (rows, h(arrays.g), *channel) if channel else (rows, f"H{arrays.g.shape[-1]}")
    if arrays.beta is not None:
        axes["beta"] = (rows, f"H{arrays.beta.shape[-1]}")
    return axes


RECUR = Kind(
    make=RecurrenceArrays,
    problem_of=problem_of,
    axes_of=axes_of,
    reference=reference.recur,
    results=("out", "final_state"),
    learned=FLOATS,
    saved_of=lambda platform, arrays, spec: platform.saved_axes(arrays, spec),
    names={"out": OUT_NAME, "final_state": STATE_NAME, "saved": SAVED_NAME},
)
STEP = StepKind(
    make=StepArrays,
    problem_of=step_problem_of,
    axes_of=step_axes_of,
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
