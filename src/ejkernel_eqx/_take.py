"""Reading arrays at indices that are known to be in bounds: five operations of XLA, and 27 where each is compared with the bounds."""

import jax.numpy as jnp
from jax import Array


def take_along(x: Array, index: Array, axis: int = -1) -> Array:
    """`jax.numpy.take_along_axis` of indices that are neither negative nor past the end."""
    return jnp.take_along_axis(x, index, axis, mode="promise_in_bounds", wrap_negative_indices=False)
