"""The tuner's view of a gated RMS norm: representative work, and problems for the command line."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..core.letters import wide_dtype
from ..core.words import read_flags, read_sizes, SWITCH
from ..core.workload import Inputs, random_cotangents, workload_of
from ..dispatch import Implementation, Problem, Workload
from .core import NORMALIZE, problem_of
from .spec import ACTIVATIONS, LETTERS, NormArrays, NormSpec, SHARED


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms."""
    spec = NormSpec(str(problem.flag("activation") or ACTIVATIONS[0]), bool(problem.flag("norm_before_gate")))
    flops = 8.0 * problem.dim("B") * problem.dim("M") * problem.dim("G") * problem.dim("F")
    return workload_of(
        NORMALIZE, implementation, spec, functools.partial(make_inputs, problem, spec), flops=flops
    )


def make_inputs(problem: Problem, spec: NormSpec, seed: int) -> Inputs:
    arrays = make_arrays(problem, seed)
    return Inputs(arrays, random_cotangents(NORMALIZE, arrays, spec, seed))


def make_arrays(problem: Problem, seed: int) -> NormArrays:
    """Random values."""
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 3)
    batch, rows, groups, features = (problem.dim(name) for name in "BMGF")
    shape, dtypes = (batch, rows, groups, features), dict(problem.dtypes)
    return NormArrays(
        jax.random.normal(keys[0], shape, jnp.dtype(dtypes["x"])),
        jax.random.normal(keys[1], shape, jnp.dtype(dtypes["z"])) if "z" in dtypes else None,
        jax.random.normal(keys[2], shape[2:], wide_dtype(dtypes["x"])) if problem.flag("weight") else None,
    )


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of one call.

    **Arguments:**

    - `dims`: at least `M` rows and `F` features per group; the groups `G` and the leading axes `B` default to 1.
    - `dtype`: the dtype of the rows and the gate; the weight is float32 (float64 with float64).
    - `flags`: `activation` (`silu` by default, `sigmoid`, or `none` for no gate), `norm_before_gate`, `weight` (default true).

    Raises `ValueError` for an unknown name, a missing size, or sizes that do not fit together.
    """
    size = read_sizes(dims, {"B": 1, "M": None, "G": 1, "F": None})
    choices = {"activation": (*ACTIVATIONS, None), "norm_before_gate": SWITCH, "weight": SWITCH[::-1]}
    given = read_flags(flags, choices)
    dtypes = {"x": dtype} | ({"z": dtype} if given["activation"] else {})
    dtypes |= {"weight": wide_dtype(dtype)} if given["weight"] else {}
    arrays = NormArrays(**LETTERS.shapes(size, dtypes, SHARED))
    spec = NormSpec(given["activation"] or ACTIVATIONS[0], given["norm_before_gate"])
    return problem_of(operation, arrays, spec)
