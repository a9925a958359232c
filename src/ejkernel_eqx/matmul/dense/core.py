"""The family's kinds of calls: their problem and their axes."""

from typing import Any

from ...core import Kind
from ...dispatch import Problem
from ...quantised.format import word_of
from . import reference
from .spec import axes_of, is_partial, LEARNED, MatmulArrays, MatmulSpec, RESULTS, SHARED, sizes_of


def problem_of(operation: str, arrays: MatmulArrays, spec: MatmulSpec) -> Problem:
    """The host metadata of a call. Shapes are those seen here: inside a partitioned body, the local ones."""
    flags: dict[str, Any] = {
        "activation": spec.activation,
        "gated": spec.gated,
        "norm": spec.eps is not None,
        "bias": any(bias is not None for bias in arrays.biases),
        "residual": arrays.residual is not None,
    }
    if spec.format is not None:
        flags["weights"] = word_of(spec.format)
    dtypes = {"x": arrays.x.dtype}
    return Problem.make(operation, dims=sizes_of(arrays), dtypes=dtypes, flags=flags, lengths={"B", "M"})


def _with_results(count: int) -> Kind:
    return Kind(
        make=MatmulArrays,
        problem_of=problem_of,
        axes_of=axes_of,
        reference=reference.multiply,
        results=RESULTS[:count],
        learned=LEARNED,
        shared=SHARED,
        one_by_one=True,
        summed=SHARED,
        partial=is_partial,
    )


KINDS = {count: _with_results(count) for count in range(1, len(RESULTS) + 1)}
"""The kinds of calls by their number of results."""
