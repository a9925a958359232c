"""What both kernels do with a tile of scores."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

LEAST = float(jnp.finfo(jnp.float32).min)
"""The largest score so far, before any: finite, so that no difference is NaN."""
PLAIN = (((1,), (0,)), ((), ()))
TRANSPOSED = (((1,), (1,)), ((), ()))


def product(x: Array, y: Array, dimensions: Any = PLAIN) -> Array:
    """A matrix product with float32 sums; of float32 numbers in float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)


def capped(scores: Array, cap: float | None) -> Array:
    return scores if cap is None else cap * jnp.tanh(scores * (1 / cap))


def with_keys(r: Any, scores: Array, values: Callable[[Array], Array]) -> None:
    """Adds keys to the state `top`, `total` `[R, 128]` and `acc` `[R, V]`. Hidden ones have a score of minus infinity; `values` returns the sum of
    their values under weights `[R, C]`."""
    before = r["top"][...]
    top = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))  # [R, 128], equal along a row
    weights = jnp.exp(scores - top[:, :1])
    fade = jnp.exp(before - top)
    r["top"][...] = top
    r["total"][...] = r["total"][...] * fade + jnp.sum(weights, axis=1, keepdims=True)
    r["acc"][...] = r["acc"][...] * fade[:, :1] + values(weights)
