"""Initial weights: those of float32, rounded once. In 16 bits JAX draws from 128 numbers or a few more, whose mean is not that of the range.

XLA compiles the hash behind a draw for a fifth of a second, for every shape again. A number depends on its place in the array alone. So small arrays
are the beginning of a larger one, which is one program for all of them.
"""

import functools
import math
from typing import Any

import equinox as eqx
import jax
from jax import Array

from ..core.arguments import accumulator

_ROOM = 2**16
"""The numbers that are drawn for an array with no more of them."""
_KEYS = 8
"""The same for keys."""


def keys_of(key: Array, count: int = 2) -> tuple[Array, ...]:
    """The keys of `jax.random.split(key, count)`."""
    if count > _KEYS or not _draws_by_place(key):
        return tuple(jax.random.split(key, count))
    return _split(key)[:count]


@jax.jit
def _split(key: Array) -> tuple[Array, ...]:
    return tuple(jax.random.split(key, _KEYS))


def uniform(key: Array, shape: tuple[int, ...], dtype: Any, bound: float) -> Array:
    """Numbers between `-bound` and `bound`."""
    count = math.prod(shape)
    if count > _ROOM or not _draws_by_place(key):
        return _uniform(key, shape, dtype, bound)
    return _first(_uniform(key, (_ROOM,), dtype, bound), shape)


# Compiled: the wide numbers are never in memory.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _uniform(key: Array, shape: tuple[int, ...], dtype: Any, bound: float | Array) -> Array:
    return jax.random.uniform(key, shape, accumulator(dtype), -bound, bound).astype(dtype)


@functools.partial(jax.jit, static_argnums=1)
def _first(numbers: Array, shape: tuple[int, ...]) -> Array:
    return numbers[: math.prod(shape)].reshape(shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(key: Array, shape: tuple[int, ...], dtype: Any, scale: float | Array = 1.0) -> Array:
    """Numbers with this standard deviation."""
    return (scale * jax.random.normal(key, shape, accumulator(dtype))).astype(dtype)


def linear(key: Array, features: int, out: int, use_bias: bool, dtype: Any) -> eqx.nn.Linear:
    """An `equinox.nn.Linear` from `features` to `out`, with the numbers that Equinox draws."""
    shapes = eqx.filter_eval_shape(eqx.nn.Linear, features, out, use_bias, dtype, key=key)
    weight_key, bias_key = keys_of(key)
    bound = 1 / math.sqrt(features)
    weight = uniform(weight_key, (out, features), dtype, bound)
    bias = uniform(bias_key, (out,), dtype, bound) if use_bias else None
    return eqx.tree_at(
        lambda linear: (linear.weight, linear.bias), shapes, (weight, bias), is_leaf=lambda x: x is None
    )


def _draws_by_place(key: Array) -> bool:
    by_place = bool(getattr(jax.config, "jax_threefry_partitionable"))  # noqa: B009, its type does not declare settings
    return by_place and jax.random.key_impl(key) == "threefry2x32"
