"""Heads shared by several heads."""

import jax.numpy as jnp
from jax import Array


def repeat_heads(x: Array, axis: int, heads: int) -> Array:
    """`jnp.repeat` to this many heads, also along an axis that is split over an explicit mesh."""
    axis, count = axis % x.ndim, x.shape[axis]
    if count == heads:
        return x
    before, behind = x.shape[:axis], x.shape[axis + 1 :]
    shared = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), (*before, count, heads // count, *behind))
    return shared.reshape(*before, heads, *behind)
