"""The family's kind of call: its problem and its axes."""

from typing import Any

from ...core import Kind
from ...dispatch import Problem
from . import reference
from .spec import letters_of, ScaledArrays, ScaledSpec, SHARED


def problem_of(operation: str, arrays: ScaledArrays, spec: ScaledSpec) -> Problem:
    """The host metadata of a call. Shapes are those seen here: inside a partitioned body, the local ones."""
    is_grouped = arrays.sizes is not None
    size: dict[str, Any] = letters_of(is_grouped).sizes(arrays)
    rows = 0 if size["bN"] == 1 else size["R"]
    dims = {"B": size["B"], "M": arrays.x.shape[-2], "K": size["K"], "N": size["bN"] * size["R"]}
    dims |= {"E": size["E"]} if is_grouped else {}
    flags = {"block": f"{rows}x{spec.columns}", "x_scale": arrays.x_scale is not None}
    dtypes = {"x": arrays.x.dtype, "out": spec.out_dtype}
    return Problem.make(operation, dims=dims, dtypes=dtypes, flags=flags, lengths={"B", "M"})


SCALED = Kind(
    make=ScaledArrays,
    problem_of=problem_of,
    axes_of=lambda arrays, spec: letters_of(arrays.sizes is not None).axes_of(arrays),
    reference=reference.multiply,
    results=("out",),
    learned=("x",),
    shared=SHARED,
    one_by_one=True,
)
