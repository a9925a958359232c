"""The family's kind of call, for `core/`: its problem and its axes."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from .._kernel import Plan
from ..attention import core as attention
from ..attention import reference as dense
from ..attention.spec import AttentionSpec, RowRanges
from ..dispatch import Problem
from .spec import LatentArrays, LEARNED

_ROWS = tuple(f"rows.{name}" for name in RowRanges._fields)


def problem_of(operation: str, arrays: LatentArrays, spec: AttentionSpec) -> Problem:
    """The problem of attention with the same queries, values and masks; `Dr` of the `D` channels of a key are shared by all heads."""
    problem = attention.problem_of(operation, arrays.apart, spec)
    return dataclasses.replace(problem, dims=tuple(sorted((*problem.dims, ("Dr", arrays.k_rope.shape[-1])))))


def axes_of(arrays: LatentArrays, spec: AttentionSpec | None = None) -> dict[str, tuple[str, ...]]:
    """The axes after the leading ones, for every possible array and for the results."""
    axes = attention.axes_of(arrays.apart, spec)
    # Keys have the heads of the values, and only the channels that heads do not share.
    return axes | {"k": ("S", axes["v"][1], "Dn"), "k_rope": ("S", "Dr")}


def arrays_of(**given: Array) -> LatentArrays:
    """The arrays of a call from keyword arguments."""
    rows = RowRanges(*(given.pop(name) for name in _ROWS)) if _ROWS[0] in given else None
    return LatentArrays(**given, rows=rows)


def reference(arrays: LatentArrays, spec: AttentionSpec) -> tuple[Array, Array]:
    """Output `[B, T, H, V]` and log-sum-exp `[B, H, T]` of dense attention, in float32 or wider."""
    return dense.attend(arrays.whole, spec)


ATTEND = dataclasses.replace(
    attention.ATTEND,
    make=arrays_of,
    problem_of=problem_of,
    axes_of=axes_of,
    reference=reference,
    learned=LEARNED,
    remedy="For forward mode and second derivatives repeat the rotary keys for every head and use ejkernel_eqx.Attention.",
)


def attend(plan: Plan, operation: str, arrays: LatentArrays, spec: AttentionSpec) -> Any:
    """`out [..., T, H, V]`, and with `return_lse` `lse [..., T, H]`, on the platform that the plan chooses for these shapes."""
    results = ATTEND.call(plan, operation, arrays, spec)
    return (results["out"], jnp.swapaxes(results["lse"], -1, -2)) if spec.return_lse else results["out"]
