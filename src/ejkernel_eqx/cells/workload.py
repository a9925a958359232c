"""Representative work of recurrent cells for the tuner, and problems for the command line."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.letters import wide_dtype
from ..core.words import read_flags, read_sizes, SWITCH
from ..core.workload import Inputs, random_cotangents, random_offsets, workload_of
from ..dispatch import Implementation, Problem, Workload
from .core import KINDS, problem_of
from .spec import CellArrays, CellSpec, CHOICES, GATES, letters, PADDING, SHARED, STARTS


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms; its operations are those of the recurrent products."""
    spec = spec_of(problem)
    flops = 2.0 * problem.dim("B") * problem.dim("T") * GATES[spec.cell] * problem.dim("H") ** 2
    make = functools.partial(make_inputs, problem)
    return workload_of(KINDS[spec.cell], implementation, spec, make, flops=flops)


def spec_of(problem: Problem) -> CellSpec:
    """The static half of a call of this problem."""
    gate = problem.flag("gate_activation") or "sigmoid"
    return CellSpec(
        str(problem.flag("cell")), str(problem.flag("activation")), str(gate), problem.dtype("state")
    )


def make_inputs(problem: Problem, seed: int) -> Inputs:
    """Random values; packed rows hold documents of various lengths, and rows with marks end in padding."""
    arrays, spec = _random(problem, seed), spec_of(problem)
    rng, batch, length = np.random.default_rng(seed), problem.dim("B"), problem.dim("T")
    if problem.flag("packed") == "offsets":
        arrays = arrays._replace(offsets=random_offsets(problem, rng, "S"))
    if problem.flag("packed") == "marks":
        marks = np.where(rng.random((batch, length)) < 4 / max(length, 1), STARTS, 0)
        real = rng.integers(length - length // 4, length + 1, (batch, 1))
        arrays = arrays._replace(
            marks=jnp.asarray(np.where(np.arange(length) < real, marks, PADDING), jnp.int32)
        )
    return Inputs(arrays, random_cotangents(KINDS[spec.cell], arrays, spec, seed))


@functools.partial(jax.jit, static_argnums=0)
def _random(problem: Problem, seed: Any) -> CellArrays:
    keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 5))
    spec, size = spec_of(problem), {"S": 1} | dict(problem.dims)
    size["G"] = GATES[spec.cell] * size["H"]
    axes = letters(str(problem.flag("packed"))).by_name

    def normal(name: str, dtype: str, scale: float = 1.0, lead: tuple[int, ...] = ()) -> Array:
        shape = (*lead, *(size[letter] for letter in axes[name]))
        wide: Any = jnp.float64 if dtype == "float64" else jnp.float32
        return (scale * jax.random.normal(next(keys), shape, wide)).astype(dtype)

    rows, states = (size["B"],), problem.flag("initial_state")
    is_lstm, state = spec.cell == "lstm", problem.dtype("state")
    weight = problem.dtype("weight")
    return CellArrays(
        normal("x", problem.dtype("x"), lead=rows),
        # So that states neither explode nor vanish, also without a bounded activation.
        normal("weight", weight, 0.5 / size["H"] ** 0.5),
        normal("bias", weight) if problem.flag("bias") else None,
        normal("hidden", state, lead=rows) if states else None,
        normal("cell", state, lead=rows) if states and is_lstm else None,
    )


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
    cell, wide, packed = options["cell"], wide_dtype(dtype), options["packed"]
    dtypes = {"x": dtype, "weight": dtype} | ({"bias": dtype} if options["bias"] and cell == "gru" else {})
    if options["initial_state"]:
        dtypes |= {"hidden": wide} | ({"cell": wide} if cell == "lstm" else {})
    dtypes |= {packed: "int32"} if packed else {}
    arrays = CellArrays(**letters(packed).shapes({**size, "G": GATES[cell] * size["H"]}, dtypes, SHARED))
    spec = CellSpec(cell, options["activation"], options["gate_activation"], wide)
    return problem_of(operation, arrays, spec)
