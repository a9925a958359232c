"""Broadcasting said aloud: under JAX's strict setting, `jax_numpy_rank_promotion="raise"`, numpy's rule for ranks is an error."""

from jax import Array, lax


def aligned(*arrays: Array) -> tuple[Array, ...]:
    """The arrays, each with axes of 1 in front up to the greatest rank: nothing is copied or repeated."""
    rank = max(x.ndim for x in arrays)
    return tuple(lax.expand_dims(x, range(rank - x.ndim)) for x in arrays)


def like(x: Array, other: Array) -> Array:
    """`x` with axes of 1 in front, of at least the rank of `other`."""
    return lax.expand_dims(x, range(max(other.ndim - x.ndim, 0)))
