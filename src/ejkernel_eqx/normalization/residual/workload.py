"""The tuner's view of a norm of a sum: representative work, and problems for the command line."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ...core.letters import wide_dtype
from ...core.words import read_flags, read_sizes, SWITCH
from ...core.workload import Inputs, random_cotangents, workload_of
from ...dispatch import Implementation, Problem, Workload
from .core import NORMALIZE, problem_of
from .spec import LETTERS, ResidualArrays, ResidualSpec, SHARED


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms."""
    spec = ResidualSpec()
    flops = 5.0 * problem.dim("B") * problem.dim("M") * problem.dim("F")
    make = functools.partial(make_inputs, problem, spec)
    return workload_of(NORMALIZE, implementation, spec, make, flops=flops)


def make_inputs(problem: Problem, spec: ResidualSpec, seed: int) -> Inputs:
    arrays = make_arrays(problem, seed)
    return Inputs(arrays, random_cotangents(NORMALIZE, arrays, spec, seed))


def make_arrays(problem: Problem, seed: int) -> ResidualArrays:
    """Random values."""
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 3)
    shape, dtype = tuple(problem.dim(name) for name in "BMF"), jnp.dtype(problem.dtype("x"))
    wide = wide_dtype(dtype.name)
    return ResidualArrays(
        jax.random.normal(keys[0], shape, dtype),
        jax.random.normal(keys[1], shape, dtype) if problem.flag("branch") else None,
        jax.random.normal(keys[2], shape[2:], wide) if problem.flag("weight") else None,
    )


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of one call.

    **Arguments:**

    - `dims`: at least `M` rows of `F` features; the leading axes `B` default to 1.
    - `dtype`: the dtype of the rows; the weight is float32 (float64 with float64).
    - `flags`: `branch`, `weight` (default true).

    Raises `ValueError` for an unknown name, a missing size, or sizes that do not fit together.
    """
    size = read_sizes(dims, {"B": 1, "M": None, "F": None})
    given = read_flags(flags, {"branch": SWITCH[::-1], "weight": SWITCH[::-1]})
    dtypes = {"x": dtype} | ({"branch": dtype} if given["branch"] else {})
    dtypes |= {"weight": wide_dtype(dtype)} if given["weight"] else {}
    return problem_of(operation, ResidualArrays(**LETTERS.shapes(size, dtypes, SHARED)), ResidualSpec())
