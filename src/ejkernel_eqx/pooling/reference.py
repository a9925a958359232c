"""Pooling as in its equation, by the segment of each token: the oracle of every test, in float64 for float64 inputs."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from ..core.arguments import accumulator
from ..sequences.tokens import over
from .spec import num_segments, PoolArrays, PoolSpec


def pool(arrays: PoolArrays, spec: PoolSpec) -> dict[str, Array]:
    """`out [*, S, C]` in float32 (float64 for float64 inputs)."""
    x = arrays.x.astype(accumulator(arrays.x.dtype))
    length, count = x.shape[-2], num_segments(arrays, spec)
    segment = arrays.segment
    if segment is None:
        token = jnp.arange(length, dtype=jnp.int32)
        segment = jnp.broadcast_to(token // (spec.chunk or length), x.shape[:-1])
    out = over(x.ndim - 2, functools.partial(_row, spec, count))(x, segment)
    if spec.normalize:
        square = jnp.sum(out**2, -1, keepdims=True)
        is_long = square > spec.eps**2
        # The root is taken of 1 where the norm is short, as its gradient at 0 is infinite.
        norm = jnp.where(is_long, jnp.sqrt(jnp.where(is_long, square, 1)), spec.eps)
        out = out / norm
    return {"out": out}


def _row(spec: PoolSpec, count: int, x: Array, segment: Array) -> Array:
    is_real = (segment >= 0)[:, None]
    where = jnp.where(segment < 0, count, segment)  # past the end: dropped
    x = jnp.where(is_real, x, 0)
    tokens = jax.ops.segment_sum(is_real.astype(x.dtype), where, count)
    if spec.reduction in ("mean", "sum"):
        total = jax.ops.segment_sum(x, where, count)
        return total / jnp.maximum(tokens, 1) if spec.reduction == "mean" else total
    token = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    if spec.reduction == "last":
        chosen = jnp.broadcast_to(jax.ops.segment_max(token, where, count), (count, x.shape[1]))
    else:
        # The gradient goes to the first token with the largest value, not through the maximum.
        largest = jax.ops.segment_max(jax.lax.stop_gradient(x), where, count)
        # NaN equals nothing, but counts as the largest, so that it is not lost.
        has_it = (x == largest[segment]) | jnp.isnan(x)
        chosen = jax.ops.segment_min(jnp.where(has_it, token, x.shape[0]), where, count)
    taken = jnp.take_along_axis(x, jnp.clip(chosen, 0, x.shape[0] - 1), 0)
    return jnp.where(tokens > 0, taken, 0)
