"""The family's only kind of call: its problem and its axes."""

from typing import Any

from ..core import Kind
from ..dispatch import Problem
from ..quantised.format import word_of
from . import reference
from .spec import axes_of, GroupedArrays, GroupedSpec, is_partial, LEARNED, RESULTS, SHARED, sizes_of


def problem_of(operation: str, arrays: GroupedArrays, spec: GroupedSpec) -> Problem:
    """The host metadata of a call. Shapes are those seen here: inside a partitioned body, the local ones."""
    size = sizes_of(arrays, spec)
    rows = "BML" if arrays.rows is not None else "BM"
    gate: dict[str, Any] = {}
    if spec.gated is not None:
        gate = {"limit": spec.limit is not None, "up_shift": spec.up_shift != 0.0}
    form, right = spec.form, arrays.right.dtype
    if form is not None:
        gate |= {"format": word_of(form), "factor": arrays.factor is not None}
        right = form.element
    return Problem.make(
        operation,
        dims={letter: size[letter] for letter in (*rows, "K", "N", "E")},
        dtypes={"lhs": arrays.lhs.dtype, "rhs": right, "out": spec.out_dtype},
        flags={
            "activation": spec.activation,
            "gated": spec.gated,
            "transpose_rhs": spec.transpose_rhs,
            "bias": arrays.bias is not None or arrays.up_bias is not None,
            "gathered": arrays.rows is not None,
            **gate,
        },
        lengths=set(rows),
    )


GROUPED = Kind(
    make=GroupedArrays,
    problem_of=problem_of,
    axes_of=lambda arrays, spec: dict(axes_of(arrays, spec)),
    reference=reference.multiply,
    results=RESULTS,
    learned=LEARNED,
    shared=SHARED,
    one_by_one=True,
    summed=SHARED.intersection(LEARNED),
    saved_of=lambda platform, arrays, spec: platform.saved_axes(arrays, spec),
    partial=is_partial,
)
