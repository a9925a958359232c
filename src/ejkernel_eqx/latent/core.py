"""The family's kind of call, for `core/`: its problem and its axes."""

import dataclasses
import functools

from jax import Array

from ..attention import core as attention
from ..attention import reference as dense
from ..attention.spec import AttentionSpec
from ..dispatch import Problem
from .spec import LatentArrays, LEARNED


def problem_of(operation: str, arrays: LatentArrays, spec: AttentionSpec) -> Problem:
    """The problem of attention with the same queries, values and masks; `Dr` of the `D` channels of a key are shared by all heads."""
    problem = attention.problem_of(operation, arrays.apart, spec)
    return dataclasses.replace(problem, dims=tuple(sorted((*problem.dims, ("Dr", arrays.k_rope.shape[-1])))))


def axes_of(arrays: LatentArrays, spec: AttentionSpec | None = None) -> dict[str, tuple[str, ...]]:
    """The axes after the leading ones, for every possible array and for the results."""
    axes = attention.axes_of(arrays.apart, spec)
    # Keys have the heads of the values, and only the channels that heads do not share.
    return axes | {"k": ("S", axes["v"][1], "Dn"), "k_rope": ("S", "Dr")}


def reference(arrays: LatentArrays, spec: AttentionSpec) -> tuple[Array, Array]:
    """Output `[B, T, H, V]` and log-sum-exp `[B, H, T]` of dense attention, in float32 or wider."""
    return dense.attend(arrays.whole, spec)


ATTEND = dataclasses.replace(
    attention.ATTEND,
    make=functools.partial(attention.arrays_of, LatentArrays),
    problem_of=problem_of,
    axes_of=axes_of,
    reference=reference,
    learned=LEARNED,
    remedy="For forward mode and second derivatives repeat the rotary keys for every head and use ejkernel_eqx.Attention.",
)
