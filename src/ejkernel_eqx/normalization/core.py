"""The family's one kind of call: its problem and its axes."""

import math

from ..core import Kind
from ..dispatch import Problem
from . import reference
from .spec import LEARNED, NormArrays, NormSpec, RESULTS, SHARED


def problem_of(operation: str, arrays: NormArrays, spec: NormSpec) -> Problem:
    """The host metadata of a call; shapes are those seen here, so the local ones inside a partitioned body."""
    rows, groups, features = arrays.x.shape[-3:]
    dtypes = {"x": arrays.x.dtype}
    if arrays.z is not None:
        dtypes["z"] = arrays.z.dtype
    return Problem.make(
        operation,
        dims={"B": math.prod(arrays.x.shape[:-3]), "M": rows, "G": groups, "F": features},
        dtypes=dtypes,
        flags={
            "activation": None if arrays.z is None else spec.activation,
            "norm_before_gate": arrays.z is not None and spec.norm_before_gate,
            "weight": arrays.weight is not None,
        },
        lengths={"B", "M"},
        counts={"G"},
    )


def axes_of(arrays: NormArrays, spec: NormSpec) -> dict[str, tuple[str, ...]]:
    """Groups do not mix: they may be split as heads are."""
    groups = f"H{arrays.x.shape[-2]}"
    rows = ("M", groups, "F")
    return {"x": rows, "z": rows, "weight": (groups, "F"), "out": rows}


NORMALIZE = Kind(
    make=NormArrays,
    problem_of=problem_of,
    axes_of=axes_of,
    reference=reference.normalise,
    results=RESULTS,
    learned=LEARNED,
    shared=SHARED,
)
