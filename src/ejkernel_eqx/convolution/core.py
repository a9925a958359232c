"""The family's only kind of call: its problem and its axes."""

from ..core import Kind
from ..dispatch import Problem
from . import reference
from .spec import ConvArrays, ConvSpec, LEARNED, letters_of, RESULTS, SHARED


def problem_of(operation: str, arrays: ConvArrays, spec: ConvSpec) -> Problem:
    """The host metadata of a call. Shapes are those seen here: inside a partitioned body, the local ones."""
    size = letters_of(spec).sizes(arrays)
    if spec.norm_size is not None:
        size["C"] = size["H"] * size["D"]
    dims = {name: size[name] for name in ("B", "T", "C", "W", *("N" if arrays.spans is not None else ""))}
    return Problem.make(
        operation,
        dims=dims,
        dtypes={"x": arrays.x.dtype, "weight": arrays.weight.dtype},
        flags={
            "activation": spec.activation,
            "bias": arrays.bias is not None,
            "initial_state": arrays.initial_state is not None,
            "packed": None if arrays.spans is None else True,
            **({} if spec.norm_size is None else {"norm_size": spec.norm_size}),
        },
        lengths={"B", "T", "N"} & dims.keys(),
        counts={"C"},
    )


CONVOLVE = Kind(
    make=ConvArrays,
    problem_of=problem_of,
    axes_of=lambda arrays, spec: letters_of(spec).axes_of(arrays),
    reference=reference.convolve,
    results=RESULTS,
    learned=LEARNED,
    shared=SHARED,
)
