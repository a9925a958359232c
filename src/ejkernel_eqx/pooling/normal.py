"""The Euclidean norm of results, one for all channels."""

import jax.numpy as jnp
from jax import Array, lax

from .spec import PoolSpec


def normalised(pooled: Array, spec: PoolSpec) -> Array:
    """`pooled / max(norm, eps)`, in the dtype of `pooled`. The gradient of a result of 0 is finite."""
    if not spec.normalize:
        return pooled
    square = jnp.sum(pooled * pooled, -1, keepdims=True)
    is_long = square > spec.eps * spec.eps
    return pooled * jnp.where(is_long, lax.rsqrt(jnp.where(is_long, square, 1)), 1 / spec.eps)
