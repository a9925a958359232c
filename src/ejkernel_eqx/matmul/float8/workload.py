"""The tuner's view of a float8 product: representative work, and problems for the command line."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._tolerances import TOLERANCES
from ...core.words import read_flags, read_sizes, SWITCH
from ...core.workload import workload_of
from ...dispatch import Implementation, Problem, Workload
from ...launch.sizes import cdiv
from ..workload import random_sizes
from .core import problem_of, SCALED
from .spec import blocks_of, letters_of, ScaledArrays, ScaledSpec, SHARED

BLOCKS = ("128x128", "1x128", "1x0", "0x0")


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms."""
    flops = 2.0 * problem.dim("B") * problem.dim("M") * problem.dim("K") * problem.dim("N")
    spec = ScaledSpec(problem.dtype("out"), _blocks(problem)[1])
    make = functools.partial(make_arrays, problem)
    work = workload_of(SCALED, implementation, spec, make, flops=flops, backward=1.0)
    # Tensor cores keep about 14 bits of a sum of products in float8.
    tolerances = dict(work.tolerances) | {"out": TOLERANCES["bfloat16"]["forward"]}
    return dataclasses.replace(work, tolerances=tolerances)


def make_arrays(problem: Problem, seed: int) -> ScaledArrays:
    shapes = _shapes(problem)
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 3)
    codes = jnp.clip(100 * jax.random.normal(keys[1], shapes["codes"].shape), -448, 448)
    # Results about as large as rows.
    least = 0.01 * problem.dim("K") ** -0.5
    values = {
        "x": jax.random.normal(keys[0], shapes["x"].shape, shapes["x"].dtype),
        "codes": jax.lax.bitcast_convert_type(codes.astype(jnp.float8_e4m3fn), jnp.uint8),
        "scales": jax.random.uniform(keys[2], shapes["scales"].shape, minval=least, maxval=2 * least),
    }
    if "x_scale" in shapes:
        values["x_scale"] = jnp.float32(0.01)
    if "sizes" in shapes:
        values["sizes"] = random_sizes(shapes["sizes"].shape, problem.dim("M"), np.random.default_rng(seed))
    return ScaledArrays(**values)


def _blocks(problem: Problem) -> tuple[int, int]:
    """The rows and columns of the weight that share a scale."""
    rows, columns = map(int, str(problem.flag("block")).split("x"))
    return blocks_of((problem.dim("N"), problem.dim("K")), (rows, columns))


def _shapes(problem: Problem) -> dict[str, Any]:
    rows, columns = _blocks(problem)
    size = {name: problem.dim(name) for name in "BMKN"}
    sizes = {"B": size["B"], "bM": size["M"], "K": size["K"], "bN": size["N"] // rows, "R": rows}
    sizes["G"] = cdiv(size["K"], columns) if columns else 1
    dtypes = {"x": problem.dtype("x"), "codes": "uint8", "scales": "float32"}
    dtypes |= {"x_scale": "float32"} if problem.flag("x_scale") else {}
    count = dict(problem.dims).get("E", 0)
    dtypes |= {"sizes": "int32"} if count else {}
    return letters_of(count > 0).shapes(sizes | {"M": problem.dim("M"), "E": count}, dtypes, SHARED)


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of one call.

    **Arguments:**

    - `dims`: at least `M` rows, `K` features and `N` columns of the result; the leading axes `B` default to 1, and the
        groups `E` to 0, one weight for all rows.
    - `dtype`: the dtype of rows and result.
    - `flags`: `block`, the rows and columns of the weight that share a scale (`128x128` by default, `1x128`, `1x0` for one per channel, `0x0` for one
        in all), and `x_scale`, whether all rows share one, too.

    Raises `ValueError` for an unknown name or a missing size.
    """
    size = read_sizes(dims, {"B": 1, "M": None, "K": None, "N": None} | ({"E": None} if "E" in dims else {}))
    options = read_flags(flags, {"block": BLOCKS, "x_scale": SWITCH})
    dtypes = {"x": dtype, "out": dtype}
    problem = Problem.make(operation, dims=size, dtypes=dtypes, flags=options, lengths=set())
    spec = ScaledSpec(dtype, _blocks(problem)[1])
    return problem_of(operation, ScaledArrays(**_shapes(problem)), spec)
