"""The family's kind of call: its problem and its axes."""

from typing import Any

from ...core import Kind
from ...dispatch import Problem
from . import reference
from .spec import is_partial, letters_by, rows_of_block, ScaledArrays, ScaledSpec, SHARED


def problem_of(operation: str, arrays: ScaledArrays, spec: ScaledSpec) -> Problem:
    """The host metadata of a call. Shapes are those seen here: inside a partitioned body, the local ones."""
    is_grouped = arrays.sizes is not None
    size: dict[str, Any] = letters_by(arrays, spec).sizes(arrays)
    if arrays.floats is not None:
        size["R"] = rows_of_block(size["N"])
        size["bN"] = size["N"] // size["R"]
    size.setdefault("K", size.get("bK"))
    rows = 0 if size["bN"] == 1 else size["R"]
    count = arrays.x.shape[-1 if spec.turned[0] else -2]
    dims = {"B": size["B"], "M": count, "K": size["K"], "N": size["bN"] * size["R"]}
    dims |= {"E": size["E"]} if is_grouped else {}
    flags = {"block": f"{rows}x{spec.columns}", "x_scale": arrays.x_scale is not None}
    dtypes = {"x": arrays.x.dtype, "out": spec.out_dtype}
    return Problem.make(operation, dims=dims, dtypes=dtypes, flags=flags, lengths={"B", "M"})


SCALED = Kind(
    make=ScaledArrays,
    problem_of=problem_of,
    axes_of=lambda arrays, spec: letters_by(arrays, spec).axes_of(arrays),
    reference=reference.multiply,
    results=("out",),
    learned=("x",),
    shared=SHARED,
    one_by_one=True,
    partial=is_partial,
)
