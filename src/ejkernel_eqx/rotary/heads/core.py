"""The family's only kind of call: its problem and its axes."""

from typing import Any

from ...core import Kind
from ...dispatch import Problem
from . import reference
from .spec import HeadsArrays, HeadsSpec, LEARNED, LETTERS, RESULTS, SHARED


def problem_of(operation: str, arrays: HeadsArrays, spec: HeadsSpec) -> Problem:
    """The host metadata of a call. Shapes are those seen here: inside a partitioned body, the local ones."""
    flags: dict[str, Any] = {
        "interleaved": spec.interleaved,
        "norm": spec.eps is not None,
        "weight": arrays.q_norm is not None or arrays.k_norm is not None,
    }
    return Problem.make(
        operation,
        dims=LETTERS.sizes(arrays),
        dtypes={"q": arrays.q.dtype},
        flags=flags,
        lengths={"B", "T"},
        counts={"Hq", "Hk"},
    )


HEADS = Kind(
    make=HeadsArrays,
    problem_of=problem_of,
    axes_of=LETTERS.axes_of,
    reference=reference.rotate,
    results=RESULTS,
    learned=LEARNED,
    shared=SHARED,
    one_by_one=True,
    summed=SHARED,
)
