"""Initial weights: those of float32, rounded once. In 16 bits JAX draws from 128 numbers or a few more, whose mean is not that of the range."""

import functools
from typing import Any

import equinox as eqx
import jax
from jax import Array

from ..core.arguments import accumulator


# Compiled: the wide numbers are never in memory.
@functools.partial(jax.jit, static_argnums=(1, 2))
def uniform(key: Array, shape: tuple[int, ...], dtype: Any, bound: float | Array) -> Array:
    """Numbers between `-bound` and `bound`."""
    return jax.random.uniform(key, shape, accumulator(dtype), -bound, bound).astype(dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(key: Array, shape: tuple[int, ...], dtype: Any, scale: float | Array = 1.0) -> Array:
    """Numbers with this standard deviation."""
    return (scale * jax.random.normal(key, shape, accumulator(dtype))).astype(dtype)


def linear(key: Array, features: int, out: int, use_bias: bool, dtype: Any) -> eqx.nn.Linear:
    """An `equinox.nn.Linear` from `features` to `out`."""
    if dtype == accumulator(dtype):
        return eqx.nn.Linear(features, out, use_bias, dtype, key=key)
    return _narrow_linear(key, features, out, use_bias, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _narrow_linear(key: Array, features: int, out: int, use_bias: bool, dtype: Any) -> eqx.nn.Linear:
    wide = linear(key, features, out, use_bias, accumulator(dtype))
    return jax.tree.map(lambda x: x.astype(dtype), wide)
