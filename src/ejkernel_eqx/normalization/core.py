"""The family's kinds of calls: their problems and their axes."""

import dataclasses
from typing import Any

from ..core import Kind
from ..dispatch import Problem
from . import reference
from .spec import COPIES, LEARNED, letters_of, NormArrays, NormSpec, SHARED


def problem_of(operation: str, arrays: NormArrays, spec: NormSpec) -> Problem:
    """The host metadata of a call. Shapes are those seen here: inside a partitioned body, the local ones."""
    dims, has_gate = letters_of(spec).sizes(arrays), arrays.z is not None
    flags: dict[str, Any] = {"weight": arrays.weight is not None}
    if spec.readers:
        flags["branch"] = arrays.branch is not None
    else:
        # Options of the gate mean nothing without one, so one problem serves them all.
        flags["activation"] = spec.activation if has_gate else None
        flags["norm_before_gate"] = has_gate and spec.norm_before_gate
    return Problem.make(
        operation,
        dims=dims,
        dtypes={name: x.dtype for name in ("x", "z") if (x := getattr(arrays, name)) is not None},
        flags=flags,
        lengths={"B", "M"},
        counts={"G"} & dims.keys(),
    )


NORMALIZE = Kind(
    make=NormArrays,
    problem_of=problem_of,
    axes_of=lambda arrays, spec: letters_of(spec).axes_of(arrays),
    reference=reference.normalise,
    results=("out",),
    learned=LEARNED,
    shared=SHARED,
)


def _of_sum(readers: int) -> Kind:
    return dataclasses.replace(NORMALIZE, results=("out", "sum", *COPIES[1:readers]), read=("sum",))


KINDS = (NORMALIZE, *map(_of_sum, range(1, len(COPIES) + 1)))
"""The kinds of calls by the readers of their specs."""
