"""Vectors of length 1."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from .arguments import wide


@jax.custom_jvp
def l2norm(x: Array) -> Array:
    """`x / sqrt(sum x^2 + 1e-6)` over the last axis, in the dtype of `x`. Its gradient takes the result, which is kept anyway, and not `x`."""
    return _l2norm(x)[0]


def _l2norm(x: Array) -> tuple[Array, Array]:
    """The result, and what it was multiplied by."""
    y = wide(x)
    scale = lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype), scale


@l2norm.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    out, scale = _l2norm(*primals)
    # Without the barrier, XLA would not take the rounded result but what it was rounded from, and keep or recompute that.
    kept = lax.optimization_barrier((out, scale))
    return out, jax.checkpoint(_l2norm_tangent, prevent_cse=False)(*kept, *tangents)


def _l2norm_tangent(out: Array, scale: Array, dx: Array) -> Array:
    y, wide_dx = wide(out), wide(dx)
    return (scale * (wide_dx - y * jnp.sum(y * wide_dx, axis=-1, keepdims=True))).astype(out.dtype)
