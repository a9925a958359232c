"""The operation's only kind of call: its problem and its axes."""

import dataclasses

from ...core import Kind
from ...dispatch import Problem
from . import reference
from .spec import COPIES, LEARNED, LETTERS, ResidualArrays, ResidualSpec, RESULTS, SHARED, WITH_COPIES


def problem_of(operation: str, arrays: ResidualArrays, spec: ResidualSpec) -> Problem:
    """The host metadata of a call. Shapes are those seen here: inside a partitioned body, the local ones."""
    return Problem.make(
        operation,
        dims=LETTERS.sizes(arrays),
        dtypes={"x": arrays.x.dtype},
        flags={"branch": arrays.branch is not None, "weight": arrays.weight is not None},
        lengths={"B", "M"},
    )


NORMALIZE = Kind(
    make=ResidualArrays,
    problem_of=problem_of,
    axes_of=LETTERS.axes_of,
    reference=reference.normalise,
    results=RESULTS,
    learned=LEARNED,
    shared=SHARED,
    read=("sum",),
)


def normalize_for(readers: int) -> Kind:
    """The kind of call that returns the norm once for each reader."""
    return _KINDS[readers - 1]


_COPIED = [
    dataclasses.replace(NORMALIZE, results=(*RESULTS, *COPIES[1:count]), axes_of=WITH_COPIES.axes_of)
    for count in range(2, len(COPIES) + 1)
]
_KINDS = (NORMALIZE, *_COPIED)
