"""The family's kind of call: its problem and its axes."""

from typing import Any

from ...core import Kind
from ...dispatch import Problem
from . import reference
from .spec import LETTERS, ScaledArrays, ScaledSpec, SHARED


def problem_of(operation: str, arrays: ScaledArrays, spec: ScaledSpec) -> Problem:
    """The host metadata of a call. Shapes are those seen here: inside a partitioned body, the local ones."""
    size: dict[str, Any] = LETTERS.sizes(arrays)
    rows = 0 if size["bN"] == 1 else size["R"]
    dims = {"B": size["B"], "M": size["bM"], "K": size["K"], "N": size["bN"] * size["R"]}
    flags = {"block": f"{rows}x{spec.columns}", "x_scale": arrays.x_scale is not None}
    dtypes = {"x": arrays.x.dtype, "out": spec.out_dtype}
    return Problem.make(operation, dims=dims, dtypes=dtypes, flags=flags, lengths={"B", "M"})


SCALED = Kind(
    make=ScaledArrays,
    problem_of=problem_of,
    axes_of=LETTERS.axes_of,
    reference=reference.multiply,
    results=("out",),
    learned=("x",),
    shared=SHARED,
    one_by_one=True,
)
