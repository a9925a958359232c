"""The online softmax of both kernels, on a tile of scores."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from .call import LANES

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


def wide(x: Array, width: int) -> Array:
    """Columns `[R, 128]` that are equal along a row, as `[R, width]`. Registers are repeated, where one column would have to be spread."""
    whole = [x] * (width // LANES) + ([x[:, : width % LANES]] if width % LANES else [])
    return whole[0] if len(whole) == 1 else jnp.concatenate(whole, axis=1)


def begun(state: Any, top: Array) -> None:
    """The state before any key: a sink counts as a first key whose value is 0."""
    top_ref, total_ref, acc_ref = state
    lane = lax.broadcasted_iota(jnp.int32, top.shape, top.ndim - 1)
    top_ref[...] = top
    total_ref[...] = jnp.where((top > LEAST) & (lane == 0), 1.0, 0.0)
    acc_ref[...] = jnp.zeros_like(acc_ref)


def with_keys(state: Any, scores: Array, values: Callable[[Array], Array]) -> None:
    """Adds keys to the references `top` `[R, 128]`, equal along a row, `total` `[R, 128]`, whose sum along a row counts, and `acc` `[R, V]`. Hidden
    keys have a score of minus infinity; `values` returns the sum of their values under weights `[R, C]`."""
    top_ref, total_ref, acc_ref = state
    before = top_ref[...]
    top = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - wide(top, scores.shape[1]))
    fade = jnp.exp(before - top)
    top_ref[...] = top
    total_ref[...] = total_ref[...] * fade + _by_lane(weights)
    acc_ref[...] = acc_ref[...] * wide(fade, acc_ref.shape[-1]) + values(weights)


def _by_lane(weights: Array) -> Array:
    """Sums over whole registers, `[R, C]` to `[R, 128]`."""
    width = weights.shape[1]
    parts = [weights[:, at : at + LANES] for at in range(0, width - width % LANES, LANES)]
    if width % LANES:
        rest = weights[:, width - width % LANES :]
        parts.append(jnp.pad(rest, ((0, 0), (0, LANES - rest.shape[1]))))
    return functools.reduce(jnp.add, parts)


def finished(top: Array, total: Array) -> tuple[Array, Array]:
    """The divisors of sums of values, and the log-sum-exp, both `[R, 128]`, equal along a row."""
    total = jnp.broadcast_to(jnp.sum(total, axis=1, keepdims=True), top.shape)
    some = total > 0
    share = jnp.where(some, total, 1.0)
    return share, jnp.where(some, top + jnp.log(share), -jnp.inf)
