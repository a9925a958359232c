"""The tuner's view of a rotation of heads: representative work, and problems for the command line."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ...core.letters import wide_dtype
from ...core.words import read_flags, read_sizes, SWITCH
from ...core.workload import workload_of
from ...dispatch import Implementation, Problem, Workload
from .core import HEADS, problem_of
from .spec import HeadsArrays, HeadsSpec, LETTERS, SHARED


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms."""
    size, spec = dict(problem.dims), spec_of(problem)
    flops = 8.0 * math.prod(size[name] for name in "BTD") * (size["Hq"] + size["Hk"])
    return workload_of(HEADS, implementation, spec, functools.partial(make_arrays, problem), flops=flops)


def spec_of(problem: Problem) -> HeadsSpec:
    """The static half of the problem's calls."""
    return HeadsSpec(bool(problem.flag("interleaved")), 1e-6 if problem.flag("norm") else None)


def make_arrays(problem: Problem, seed: int) -> HeadsArrays:
    shapes = _shapes(problem)
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(shapes))
    values = {n: jax.random.normal(key, x.shape, x.dtype) for key, (n, x) in zip(keys, shapes.items())}
    angles = values["cos"]
    return HeadsArrays(**values | {"cos": jnp.cos(angles), "sin": jnp.sin(angles)})


def _shapes(problem: Problem) -> dict[str, Any]:
    dtype = problem.dtype("q")
    wide = wide_dtype(dtype)
    dtypes = {"q": dtype, "k": dtype, "cos": wide, "sin": wide}
    dtypes |= {"q_norm": wide, "k_norm": wide} if problem.flag("weight") else {}
    return LETTERS.shapes(dict(problem.dims), dtypes, SHARED)


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of one call.

    **Arguments:**

    - `dims`: at least `T` tokens, `Hq` and `Hk` heads and `D` features; the leading axes `B` default to 1, the pairs `R` to half of `D`.
    - `dtype`: the dtype of the heads; angles and weights are float32 (float64 with float64).
    - `flags`: `interleaved`, and `norm`, with weights.

    Raises `ValueError` for an unknown name, a missing size, or sizes that do not fit together.
    """
    names = {"B": 1, "T": None, "Hq": None, "Hk": None, "D": None, "R": max(1, dims.get("D", 2) // 2)}
    size = read_sizes(dims, names)
    options = read_flags(flags, dict.fromkeys(("interleaved", "norm"), SWITCH))
    options["weight"] = options["norm"]
    problem = Problem.make(operation, dims=size, dtypes={"q": dtype}, flags=options, lengths=set())
    return problem_of(operation, HeadsArrays(**_shapes(problem)), spec_of(problem))
