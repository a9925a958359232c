"""The family's only kind of call: its problem and its axes."""

from ..core import Kind
from ..dispatch import Problem
from . import reference
from .spec import LEARNED, LETTERS, NormArrays, NormSpec, RESULTS, SHARED


def problem_of(operation: str, arrays: NormArrays, spec: NormSpec) -> Problem:
    """The host metadata of a call. Shapes are those seen here: inside a partitioned body, the local ones."""
    return Problem.make(
        operation,
        dims=LETTERS.sizes(arrays),
        dtypes={name: x.dtype for name in ("x", "z") if (x := getattr(arrays, name)) is not None},
        flags={
            "activation": None if arrays.z is None else spec.activation,
            "norm_before_gate": arrays.z is not None and spec.norm_before_gate,
            "weight": arrays.weight is not None,
        },
        lengths={"B", "M"},
        counts={"G"},
    )


NORMALIZE = Kind(
    make=NormArrays,
    problem_of=problem_of,
    axes_of=LETTERS.axes_of,
    reference=reference.normalise,
    results=RESULTS,
    learned=LEARNED,
    shared=SHARED,
)
