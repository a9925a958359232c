"""The family's only kind of call: its problem and its axes."""

from ..core import Kind
from ..dispatch import Problem
from . import reference
from .spec import LEARNED, LETTERS, letters_of, longest, num_segments, PoolArrays, PoolSpec, RESULTS


def problem_of(operation: str, arrays: PoolArrays, spec: PoolSpec) -> Problem:
    """The host metadata of a call. Shapes are those seen here: inside a partitioned body, the local ones."""
    size = LETTERS.sizes(arrays)
    dims = {"B": size["B"], "T": size["T"], "C": size["C"], "L": longest(arrays, spec)}
    is_packed = arrays.begin is not None
    if is_packed:
        dims["S"] = num_segments(arrays, spec)
    return Problem.make(
        operation,
        dims=dims,
        dtypes={"x": arrays.x.dtype},
        flags={
            "reduction": spec.reduction,
            "chunked": spec.chunk is not None,
            "normalize": spec.normalize,
            "masked": spec.holes,
            "packed": is_packed,
            "ordered": arrays.order is not None,
        },
        lengths=dims.keys() - {"C"},
        counts={"C"},
    )


def _axes(arrays: PoolArrays, spec: PoolSpec) -> dict[str, tuple[str, ...]]:
    return letters_of(spec).axes_of(arrays)


POOL = Kind(
    make=PoolArrays,
    problem_of=problem_of,
    axes_of=_axes,
    reference=reference.pool,
    results=RESULTS,
    learned=LEARNED,
    saved_of=lambda platform, arrays, spec: {name: _axes(arrays, spec)[name] for name in ("arg", "pooled")},
)
