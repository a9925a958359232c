"""Representative inputs of a recurrence, generated from a problem's description alone, such that a call with them has that problem."""

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
from .spec import CONSTANT, letters_of, RecurrenceArrays, RecurrenceSpec, sizes_of, StepArrays

KEY_SIMILARITY = 0.3
"""The common part of the keys of a delta rule, which are similar in trained networks."""


def spec_of(problem: Problem) -> RecurrenceSpec:
    """The static half of a call or of a step of this problem."""
    return _described(problem)[1]


def _described(problem: Problem) -> tuple[Any, RecurrenceSpec]:
    return shapes_of(dict(problem.dims), dict(problem.flags), dict(problem.dtypes))


def make_inputs(problem: Problem, seed: int) -> Inputs:
    """New inputs for every seed: random values, documents of various lengths."""
    return with_packing(_random(problem, seed), problem, seed, "N")


@functools.partial(jax.jit, static_argnums=0)
def _random(problem: Problem, seed: Any) -> Inputs:
    shapes, spec = _described(problem)
    arrays = RecurrenceArrays(**_drawn(shapes._asdict(), spec, seed))
    dtypes = {"out": arrays.v.dtype, "final_state": spec.state_dtype}
    results = letters_of(shapes, spec).shapes(sizes_of(shapes, spec), dtypes)
    cotangents = _drawn(results, spec, seed + 1)
    if not spec.delta:
        cotangents["final_state"] = cotangents["final_state"] * spec.scale
    return Inputs(arrays, cotangents)


def make_step_inputs(problem: Problem, seed: int) -> StepArrays:
    """One token per row; with slots, every row has its own."""
    shapes, spec = _described(problem)
    arrays = StepArrays(**_drawn(shapes._asdict(), spec, seed))
    if shapes.indices is None:
        return arrays
    rows = jax.random.permutation(jax.random.key(seed), shapes.state.shape[0])[: shapes.indices.shape[0]]
    return arrays._replace(indices=rows.astype(jnp.int32))


def _drawn(shapes: Mapping[str, Any], spec: RecurrenceSpec, seed: Any) -> dict[str, Array]:
    """Random arrays of those shapes that are float."""
    # A generator that compiles and runs fast; its values need not be the same on every kind of device.
    keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 12))
    floats = {n: x for n, x in shapes.items() if x is not None and jnp.issubdtype(x.dtype, jnp.floating)}
    normal = lambda x: jax.random.normal(next(keys), x.shape, accumulator(x.dtype))
    drawn = {name: normal(x) for name, x in floats.items()}
    if spec.delta and "k" in drawn:
        # Queries and keys of a delta rule have length one.
        common = jax.random.normal(next(keys), drawn["k"].shape[-1:], drawn["k"].dtype)
        drawn["k"] += KEY_SIMILARITY * like(common, drawn["k"])
        drawn |= {name: drawn[name] / jnp.linalg.norm(drawn[name], axis=-1, keepdims=True) for name in "qk"}
    if "a" in drawn:
        # What is read at a direction of length one is taken away in part, as RWKV-7 does.
        drawn["a"] /= jnp.linalg.norm(drawn["a"], axis=-1, keepdims=True)
        drawn["b"] = -drawn["a"] * jax.nn.sigmoid(drawn["b"])
    if "beta" in drawn:
        drawn["beta"] = jax.nn.sigmoid(drawn["beta"])
    if "g" in drawn:
        drawn["g"] = _decay(next(keys), floats["g"].shape, spec.decay)
    return {name: x.astype(floats[name].dtype) for name, x in drawn.items()}


def _decay(key: Array, shape: tuple[int, ...], kind: str) -> Array:
    """Log-decays as layers produce them: some channels or heads forget within a few tokens, others within thousands."""
    # One rate per head (or channel), from 1/4 to 1/4096 per token, with variation between tokens.
    rates = 2.0 ** -jnp.linspace(2.0, 12.0, shape[-1], dtype=jnp.float32)
    noise = (
        jnp.ones(shape, jnp.float32) if kind == CONSTANT else jax.random.exponential(key, shape, jnp.float32)
    )
    return -like(rates, noise) * noise
