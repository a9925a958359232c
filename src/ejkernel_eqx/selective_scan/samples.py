"""Representative inputs of a selective scan, generated from a problem's description alone, such that a call with them has that problem."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._broadcast import like
from ..core.arguments import accumulator
from ..core.workload import Inputs, with_packing
from ..dispatch import Problem
from .example import shapes_of
from .spec import letters_of, ScanArrays, ScanSpec, StepArrays

TIME_STEP = 0.02
"""A typical time step of a layer."""


def spec_of(problem: Problem) -> ScanSpec:
    """The static half of a call or of a step of this problem."""
    return _described(problem)[1]


def _described(problem: Problem) -> tuple[Any, ScanSpec]:
    return shapes_of(dict(problem.dims), dict(problem.flags), dict(problem.dtypes))


def make_inputs(problem: Problem, seed: int) -> Inputs:
    """New inputs for every seed: random values, documents of various lengths."""
    return with_packing(_random(problem, seed), problem, seed, "S")


@functools.partial(jax.jit, static_argnums=0)
def _random(problem: Problem, seed: Any) -> Inputs:
    shapes, spec = _described(problem)
    arrays = ScanArrays(**_drawn(shapes._asdict(), spec, seed))
    axes, dtypes = letters_of(shapes), {"out": arrays.x.dtype, "final_state": spec.state_dtype}
    return Inputs(arrays, _drawn(axes.shapes(axes.sizes(shapes), dtypes), spec, seed + 1))


def make_step_inputs(problem: Problem, seed: int) -> StepArrays:
    """One token per row; with slots, every row has its own."""
    shapes, spec = _described(problem)
    arrays = StepArrays(**_drawn(shapes._asdict(), spec, seed))
    if shapes.indices is None:
        return arrays
    rows = jax.random.permutation(jax.random.key(seed), shapes.state.shape[0])[: shapes.indices.shape[0]]
    return arrays._replace(indices=rows.astype(jnp.int32))


def _drawn(shapes: Mapping[str, Any], spec: ScanSpec, seed: Any) -> dict[str, Array]:
    """Random arrays of those shapes that are float: time steps around `TIME_STEP` and rates from 1 to N, so that states decay within tens to
    hundreds of tokens."""
    # A generator that compiles and runs fast; its values need not be the same on every kind of device.
    keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 16))
    floats = {n: x for n, x in shapes.items() if x is not None and jnp.issubdtype(x.dtype, jnp.floating)}
    normal = lambda x: jax.random.normal(next(keys), x.shape, accumulator(x.dtype))
    drawn = {name: normal(x) for name, x in floats.items()}
    if "A" in drawn:
        rates = jnp.arange(1.0, floats["A"].shape[-1] + 1, dtype=drawn["A"].dtype)
        drawn["A"] = -like(rates, drawn["A"]) * jnp.exp(0.1 * drawn["A"])
        steps = TIME_STEP * jnp.exp(0.5 * drawn["dt"])
        drawn["dt"] = jnp.log(jnp.expm1(steps)) if spec.softplus else steps
    if "dt_bias" in drawn:
        drawn["dt_bias"] *= 0.5 if spec.softplus else 0.5 * TIME_STEP
    return {name: x.astype(floats[name].dtype) for name, x in drawn.items()}
