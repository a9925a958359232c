"""Initial weights: those of float32, rounded once. In 16 bits JAX draws from 128 numbers or a few more, whose mean is not that of the range."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ..core.arguments import accumulator


# Compiled: the wide numbers are never in memory.
@functools.partial(jax.jit, static_argnums=(1, 2))
def uniform(key: Array, shape: tuple[int, ...], dtype: Any, bound: float) -> Array:
    """Numbers between `-bound` and `bound`."""
    return jax.random.uniform(key, shape, accumulator(dtype), -bound, bound).astype(dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(key: Array, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> Array:
    """Numbers with this standard deviation."""
    return (scale * jax.random.normal(key, shape, accumulator(dtype))).astype(dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def linear(key: Array, features: int, out: int, use_bias: bool, dtype: Any) -> eqx.nn.Linear:
    """An `equinox.nn.Linear` from `features` to `out`."""
    wide = eqx.nn.Linear(features, out, use_bias, accumulator(dtype), key=key)
    return jax.tree.map(lambda x: x.astype(dtype), wide)
