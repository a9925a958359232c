"""The work that the tuner measures for attention over pages: representative inputs, the reference to check it against, and its cost."""

import functools
from typing import Any

import jax

from .._tolerances import TOLERANCES
from ..core import Named
from ..core.workload import launches_of
from ..dispatch import Cost, FORWARD, Implementation, Platform, Problem, Workload
from . import reference
from .example import example_problem as example_problem
from .samples import make_arrays, make_batch, moved_bytes, spec_of
from .spec import page_dtypes, RESULTS

_COARSER = ("float64", "float32", "float16", "bfloat16")


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms."""
    tolerances = dict.fromkeys(RESULTS, TOLERANCES[checked_dtype(problem)]["forward"])
    make = functools.partial(make_arrays, problem)
    return work_of(implementation, spec_of(problem), make, reference.attend, tolerances, costs(problem))


def work_of(
    implementation: Implementation, spec: Any, make: Any, attend: Any, tolerances: Any, costs: Any
) -> Workload:
    """The work of an operation without a gradient, on the arrays of `make(seed)`: its results that have `tolerances` are compared with those of the
    reference `attend`."""
    results = tuple(tolerances)
    run = functools.partial(_run, implementation.load(), spec, results)
    launches = functools.partial(launches_of, run, make)
    more = {"costs": costs, "launches": launches if implementation.platform is Platform.TRITON else None}
    reference = functools.partial(_reference, attend, spec, results)
    return Workload(make, run, reference, tolerances, results, **more)


def checked_dtype(problem: Problem) -> str:
    """The least precise dtype that is multiplied; quantised pages count as the dtype of the queries."""
    dtypes = {problem.dtype("q"), *page_dtypes(problem)}
    return max(dtypes.intersection(_COARSER), key=_COARSER.index)


def costs(problem: Problem) -> dict[str, Cost]:
    """The operations of the matrix products over visible pairs, and the bytes with each sequence's visible keys read once."""
    spec = spec_of(problem)
    # Lengths do not depend on the seed, so the cost is that of every sample.
    pairs = make_batch(problem, 0).pairs(spec)
    flops = 2.0 * pairs * problem.dim("H") * (problem.dim("D") + problem.dim("V"))
    return {FORWARD: Cost(flops, moved_bytes(problem, spec))}


def _run(platform: Any, spec: Any, names: Any, arrays: Any, config: Any) -> Named:
    results = platform.forward(arrays, spec, config)
    return {name: results[name] for name in names}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _reference(attend: Any, spec: Any, names: Any, arrays: Any) -> Named:
    results = attend(arrays, spec)
    return {name: results[name] for name in names}
