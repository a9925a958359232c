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


def with_keys(state: Any, scores: Array, values: Callable[[Array], Array]) -> None:
    """Adds keys to the references `top`, `total` `[R, 128]`, equal along a row, and `acc` `[R, V]`. Hidden ones have a score of minus infinity;
    `values` returns the sum of their values under weights `[R, C]`."""
    top_ref, total_ref, acc_ref = state
    before = top_ref[...]
    top = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - top[:, :1])
    fade = jnp.exp(before - top)
    top_ref[...] = top
    total_ref[...] = total_ref[...] * fade + jnp.sum(weights, axis=1, keepdims=True)
    acc_ref[...] = acc_ref[...] * fade[:, :1] + values(weights)


def finished(top: Array, total: Array, acc: Any) -> tuple[Any, Array]:
    """The results `[R, V]`, of `acc`, and the log-sum-exps `[R, 128]`."""
    some = total > 0
    share = jnp.where(some, total, 1.0)
    return None if acc is None else acc / share[:, :1], jnp.where(some, top + jnp.log(share), -jnp.inf)
