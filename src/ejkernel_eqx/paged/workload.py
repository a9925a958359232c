"""What the tuner needs of attention over pages: representative work, the plain mathematics to check it by, and its cost."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._tolerances import TOLERANCES
from ..dispatch import Cost, FORWARD, Implementation, Platform, Problem, Workload
from . import reference
from .example import example_problem as example_problem
from .samples import make_arrays, make_batch, moved_bytes, spec_of
from .spec import PagedArrays, PagedSpec, RESULTS

_COARSER = ("float64", "float32", "float16", "bfloat16")


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms."""
    spec, platform = spec_of(problem), implementation.load()
    collects = implementation.platform is Platform.TRITON
    return Workload(
        make_inputs=functools.partial(make_arrays, problem),
        run=functools.partial(_run, platform, spec),
        reference=functools.partial(_reference, spec),
        tolerances=dict.fromkeys(RESULTS, TOLERANCES[checked_dtype(problem)]["forward"]),
        forward=RESULTS,
        costs=costs(problem),
        launches=functools.partial(_launches, platform, spec, problem) if collects else None,
    )


def checked_dtype(problem: Problem) -> str:
    """The coarser dtype of those that are multiplied; quantised pages count as the queries."""
    dtypes = {problem.dtype("q")}
    if problem.flag("scales") is None:
        dtypes.add(problem.dtype("kv"))
    return max(dtypes, key=_COARSER.index)


def costs(problem: Problem) -> dict[str, Cost]:
    """Operations of the matrix products over what is visible; each sequence's visible keys read once."""
    spec = spec_of(problem)
    pairs = make_batch(problem, 0).pairs(spec)
    flops = 2.0 * pairs * problem.dim("H") * (problem.dim("D") + problem.dim("V"))
    return {FORWARD: Cost(flops, moved_bytes(problem, spec))}


def _run(
    platform: Any, spec: PagedSpec, arrays: PagedArrays, config: Any, **execute: Any
) -> dict[str, Array]:
    return platform.forward(arrays, spec, config, **execute)


@functools.partial(jax.jit, static_argnums=0)
def _reference(spec: PagedSpec, arrays: PagedArrays) -> dict[str, Array]:
    return reference.attend(arrays, spec)


def _launches(platform: Any, spec: PagedSpec, problem: Problem, config: Any) -> list[Any]:
    """What a configuration launches; nothing is run."""
    found: list[Any] = []

    def record(launch: Any, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if not launch.is_empty:
            found.append(launch)
        return {name: jnp.zeros(out.shape, out.dtype) for name, out in launch.outputs.items()}

    jax.eval_shape(lambda: _run(platform, spec, make_arrays(problem, 0), config, execute=record))
    return found
