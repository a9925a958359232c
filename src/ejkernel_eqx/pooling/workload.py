"""The tuner's view of a pooling: representative work, and problems for the command line."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.words import read_flags, read_sizes, SWITCH
from ..core.workload import workload_of
from ..dispatch import Implementation, Problem, Workload
from .arguments import arrays_of
from .core import POOL, problem_of
from .spec import LETTERS, PoolArrays, PoolSpec, REDUCTIONS, TABLES


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms."""
    spec = spec_of(problem)
    flops = 1.0 * problem.dim("B") * problem.dim("T") * problem.dim("C")
    make = functools.partial(make_arrays, problem, spec)
    return workload_of(POOL, implementation, spec, make, flops=flops, backward=1.0)


def spec_of(problem: Problem) -> PoolSpec:
    """The static half of the problem's calls."""
    flag = lambda name: bool(problem.flag(name))
    chunk = problem.dim("L") if flag("chunked") else None
    return PoolSpec(str(problem.flag("reduction")), chunk, flag("masked"), flag("normalize"))


def make_arrays(problem: Problem, spec: PoolSpec, seed: int) -> PoolArrays:
    """Random values; packed rows hold sequences of various lengths, followed by padding; one token in 16 is masked."""
    size, rng = dict(problem.dims), np.random.default_rng(seed)
    shape = tuple(size[name] for name in "BTC")
    x = jax.random.normal(jax.random.key(seed, impl="rbg"), shape, jnp.dtype(problem.dtype("x")))
    real = jnp.asarray(rng.random(shape[:2]) < 15 / 16) if spec.holes else None
    offsets = order = None
    if problem.flag("packed"):
        offsets, order = _packed(problem, spec, rng)
    return arrays_of(spec, size.get("S"), x, real, offsets, order)


def _packed(problem: Problem, spec: PoolSpec, rng: np.random.Generator) -> tuple[Array, Array | None]:
    batch, length, segments = (problem.dim(name) for name in "BTS")
    # With chunks there are about as many sequences as chunks that are not whole.
    count = segments if spec.chunk is None else max(1, segments - length // spec.chunk)
    end = length - length // 16
    cuts = np.sort(rng.integers(0, end + 1, (batch, count - 1)), -1)
    offsets = np.pad(cuts, [(0, 0), (1, 0)])
    offsets = jnp.asarray(np.concatenate([offsets, np.full((batch, 1), end)], -1), jnp.int32)
    if not problem.flag("ordered"):
        return offsets, None
    return offsets, jnp.asarray(rng.permuted(np.tile(np.arange(length), (batch, 1)), axis=-1), jnp.int32)


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of one call.

    **Arguments:**

    - `dims`: at least `T` tokens and `C` channels; `B` rows, by default 1. With `L`, chunks of so many tokens are pooled, else whole rows. Packed
      rows have `S` segments (with `L`, chunks).
    - `dtype`: the dtype of the tokens.
    - `flags`: `reduction` (`mean` by default, `sum`, `max`, `last`), `normalize`, `masked`; `packed`: by offsets, `ordered`: by ids.

    Raises `ValueError` for an unknown name, a missing size, or sizes that do not fit together.
    """
    size = read_sizes(dims, {"B": 1, "T": None, "C": None, "L": 1, "S": 1})
    choices = {"reduction": REDUCTIONS, **dict.fromkeys(("normalize", "masked", "packed", "ordered"), SWITCH)}
    options = read_flags(flags, choices)
    is_packed = options["packed"] or options["ordered"]
    if is_packed != ("S" in dims):
        raise ValueError(
            f"dims: expected S segments with packed=true or ordered=true, and only then, received S={dims.get('S')}."
        )
    chunk = size["L"] if "L" in dims else None
    size["S"] = size["S"] if is_packed else 1 if chunk is None else -(-size["T"] // chunk)
    names = TABLES if is_packed else ("segment", "count") if options["masked"] else ()
    names += ("order",) if options["ordered"] else ()
    names += ("last",) if options["reduction"] == "last" and names else ()
    spec = PoolSpec(options["reduction"], chunk, options["masked"], options["normalize"])
    arrays = LETTERS.shapes(size, {"x": dtype, **dict.fromkeys(names, "int32")})
    return problem_of(operation, PoolArrays(**arrays), spec)
