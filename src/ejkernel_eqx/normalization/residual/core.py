"""The operation's only kind of call: its problem and its axes."""

from ...core import Kind
from ...dispatch import Problem
from . import reference
from .spec import LEARNED, LETTERS, ResidualArrays, ResidualSpec, RESULTS, SHARED


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
