"""Functions that the kernels of the grouped matmul share: operands and products of tiles."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def dot(x: Array, w: Array, transposed: bool) -> Array:
    """`x w` or, transposed, `x w^T`, in float32; the products of float32 operands too."""
    return contracted(x, w, 1, 1 if transposed else 0)


def contracted(x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
    over = (((x_axis,), (y_axis,)), ((), ()))
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, y, over, precision=precision, preferred_element_type=jnp.float32)


def inside(x: Array, length: Any, dtype: Any, axis: int) -> Array:
    """A tile as an operand of products, of which only this length is not zero: what is past the end of an array is arbitrary."""
    if length is None:
        return operand(x, dtype)
    place = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where(place < length, x.astype(jnp.float32), 0.0).astype(dtype)


def operand(x: Array, dtype: Any) -> Array:
    # A TPU converts 8-bit integers to bfloat16 by way of float32.
    return x.astype(jnp.float32).astype(dtype) if x.dtype == jnp.int8 else x.astype(dtype)


def rounded(z: Array, dtype: Any, limit: float | None) -> Array:
    """`z` with the precision of a dtype, on the same side of the limit as `z`: what is clipped has no gradient."""
    near = z.astype(dtype).astype(jnp.float32)
    if limit is None:
        return near
    is_beyond = jnp.abs(z) > limit
    crosses = is_beyond != (jnp.abs(near) > limit)
    # Two steps of bfloat16 away.
    beside = jnp.where(is_beyond, limit * (1 + 2**-7), limit * (1 - 2**-7))
    return jnp.where(crosses, jnp.where(z < 0, -beside, beside), near)
