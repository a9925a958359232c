"""Representative work of recurrent cells for the tuner, and problems for the command line."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.arguments import accumulator
from ..core.letters import wide_dtype
from ..core.words import read_flags, read_sizes, SWITCH
from ..core.workload import random_offsets, workload_of
from ..dispatch import Implementation, Problem, Workload
from .core import KINDS, problem_of
from .spec import CellArrays, CellSpec, CHOICES, GATES, letters, PADDING, SHARED, STARTS


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms; its operations are those of the recurrent products."""
    spec = spec_of(problem)
    flops = 2.0 * problem.dim("B") * problem.dim("T") * GATES[spec.cell] * problem.dim("H") ** 2
    make = functools.partial(make_arrays, problem)
    return workload_of(KINDS[spec.cell], implementation, spec, make, flops=flops)


def spec_of(problem: Problem) -> CellSpec:
    """The static half of a call of this problem."""
    cell, activation, gate = (str(problem.flag(name) or "sigmoid") for name in CHOICES)
    return CellSpec(cell, activation, gate, problem.dtype("state"))


def make_arrays(problem: Problem, seed: int) -> CellArrays:
    """Random values; packed rows hold documents of various lengths, and rows with marks end in padding."""
    arrays = _random(problem, seed)
    rng, batch, length = np.random.default_rng(seed), problem.dim("B"), problem.dim("T")
    if problem.flag("packed") == "offsets":
        arrays = arrays._replace(offsets=random_offsets(problem, rng, "S"))
    if problem.flag("packed") == "marks":
        marks = np.where(rng.random((batch, length)) < 4 / max(length, 1), STARTS, 0)
        real = rng.integers(length - length // 4, length + 1, (batch, 1))
        marks = np.where(np.arange(length) < real, marks, PADDING)
        arrays = arrays._replace(marks=jnp.asarray(marks, jnp.int32))
    return arrays


@functools.partial(jax.jit, static_argnums=0)
def _random(problem: Problem, seed: Any) -> CellArrays:
    keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 5))
    shapes = _shapes_of(dict(problem.dims), dict(problem.flags), dict(problem.dtypes))
    # Weights such that states neither explode nor vanish, also without a bounded activation.
    scales = {"weight": 0.5 / problem.dim("H") ** 0.5}

    def normal(name: str, x: Any) -> Array:
        drawn = jax.random.normal(next(keys), x.shape, accumulator(x.dtype))
        return (scales.get(name, 1.0) * drawn).astype(x.dtype)

    return CellArrays(**{name: normal(name, x) for name, x in shapes.items() if x.dtype != jnp.int32})


def _shapes_of(
    size: Mapping[str, int], flags: Mapping[str, Any], dtypes: Mapping[str, str]
) -> dict[str, Any]:
    """The shapes of the arrays of a call, from the sizes, flags and dtypes of its problem."""
    cell, packed, weight = flags["cell"], flags["packed"], dtypes["weight"]
    given = {"x": dtypes["x"], "weight": weight} | ({"bias": weight} if flags["bias"] else {})
    if flags["initial_state"]:
        given |= dict.fromkeys(("hidden", "cell") if cell == "lstm" else ("hidden",), dtypes["state"])
    given |= {packed: "int32"} if packed else {}
    return letters(packed).shapes({**size, "G": GATES[cell] * size["H"]}, given, SHARED)


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of one call.

    **Arguments:**

    - `dims`: at least `T` tokens and `H` hidden features; `B` and the number `S` of packed sequences default to 1.
    - `dtype`: the dtype of the inputs and the weight; states are float32 (float64 with float64).
    - `flags`: `cell` (`lstm` by default, `gru`, `rnn`), `activation`, `gate_activation`, `bias` (of a GRU, inside the product with r; default true),
        `initial_state`, `packed` (`offsets`, or `marks` for segments, resets and padding).

    Raises `ValueError` for an unknown name, a missing size, or sizes that do not fit together.
    """
    size = read_sizes(dims, {"B": 1, "T": None, "H": None, "S": 1})
    choices = {"bias": SWITCH[::-1], "initial_state": SWITCH, "packed": (None, "offsets", "marks")}
    options = read_flags(flags, CHOICES | choices)
    options["bias"] &= options["cell"] == "gru"
    wide = wide_dtype(dtype)
    shapes = _shapes_of(size, options, {"x": dtype, "weight": dtype, "state": wide})
    spec = CellSpec(options["cell"], options["activation"], options["gate_activation"], wide)
    return problem_of(operation, CellArrays(**shapes), spec)
