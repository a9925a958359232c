"""Explicit broadcasting: with JAX's strict setting `jax_numpy_rank_promotion="raise"`, implicit rank promotion is an error."""

from jax import Array, lax


def aligned(*arrays: Array) -> tuple[Array, ...]:
    """The arrays with leading axes of size 1 up to the highest rank; nothing is copied or repeated."""
    rank = max(x.ndim for x in arrays)
    return tuple(lax.expand_dims(x, range(rank - x.ndim)) for x in arrays)


def like(x: Array, other: Array) -> Array:
    """`x` with leading axes of size 1, up to at least the rank of `other`."""
    return lax.expand_dims(x, range(max(other.ndim - x.ndim, 0)))
