"""The tuner's view of a norm: representative work, and problems for the command line."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..core.letters import wide_dtype
from ..core.words import read_flags, read_sizes, SWITCH
from ..core.workload import workload_of
from ..dispatch import Implementation, Problem, Workload
from .core import KINDS, problem_of
from .spec import ACTIVATIONS, letters_of, NormArrays, NormSpec, SHARED


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms."""
    spec = spec_of(problem)
    flops = (5.0 if spec.readers else 8.0) * math.prod(dict(problem.dims).values())
    make = functools.partial(make_arrays, problem)
    return workload_of(KINDS[spec.readers], implementation, spec, make, flops=flops)


def spec_of(problem: Problem) -> NormSpec:
    """The static half of the problem's calls."""
    activation = str(problem.flag("activation") or ACTIVATIONS[0])
    readers = 0 if "G" in dict(problem.dims) else 1
    return NormSpec(activation, bool(problem.flag("norm_before_gate")), readers=readers)


def make_arrays(problem: Problem, seed: int) -> NormArrays:
    """Random values."""
    keys, size = jax.random.split(jax.random.key(seed, impl="rbg"), 3), dict(problem.dims)
    shape, dtypes = tuple(size[name] for name in "BMGF" if name in size), dict(problem.dtypes)
    normal = lambda key, shape, dtype: jax.random.normal(key, shape, jnp.dtype(dtype))
    return NormArrays(
        x=normal(keys[0], shape, dtypes["x"]),
        z=normal(keys[1], shape, dtypes["z"]) if "z" in dtypes else None,
        branch=normal(keys[1], shape, dtypes["x"]) if problem.flag("branch") else None,
        weight=normal(keys[2], shape[2:], wide_dtype(dtypes["x"])) if problem.flag("weight") else None,
    )


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of one call.

    **Arguments:**

    - `dims`: at least `M` rows and `F` features, those of a group in a gated norm; the leading axes `B` and,
        in a gated norm, the groups `G` default to 1.
    - `dtype`: the dtype of the rows, the gate and the branch; the weight is float32 (float64 with float64).
    - `flags`: `weight` (default true); of a gated norm `activation` (`silu` by default, `sigmoid`, or `none`
        for no gate) and `norm_before_gate`; of the norm of a sum `branch` (default true).

    Raises `ValueError` for an unknown name, a missing size, or sizes that do not fit together.
    """
    is_sum = operation == "residual_rms_norm"
    gated = {"activation": (*ACTIVATIONS, None), "norm_before_gate": SWITCH}
    choices = {"weight": SWITCH[::-1]} | ({"branch": SWITCH[::-1]} if is_sum else gated)
    size = read_sizes(dims, {"B": 1, "M": None, **({} if is_sum else {"G": 1}), "F": None})
    options = read_flags(flags, choices)
    wanted = {"z": options.get("activation"), "branch": options.get("branch")}
    dtypes = {"x": dtype} | {name: dtype for name, is_wanted in wanted.items() if is_wanted}
    dtypes |= {"weight": wide_dtype(dtype)} if options["weight"] else {}
    spec = NormSpec(
        options.get("activation") or ACTIVATIONS[0],
        options.get("norm_before_gate", False),
        readers=int(is_sum),
    )
    return problem_of(operation, NormArrays(**letters_of(spec).shapes(size, dtypes, SHARED)), spec)
