"""What the delta rule solves in every chunk: systems of unit lower triangular matrices, by blocks that are substituted forward."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .xla_chunks import halves, merge


@jax.custom_jvp
def solve(below: Array, known: tuple[Array, ...]) -> tuple[Array, ...]:
    """`(I + below)^-1 x` for each `x [B, M, C, X]` of `known`; `below [B, M, C, C]` is zero on and above the diagonal."""
    inverse = _inverse(below)
    return tuple(_apply(inverse, x) for x in known)


@solve.defjvp
def _(primals: Any, tangents: Any) -> Any:
    below, known = primals
    change, changes = tangents
    inverse = _inverse(below)
    solved = tuple(_apply(inverse, x) for x in known)
    return solved, tuple(_apply(inverse, d - _apply(change, x)) for d, x in zip(changes, solved, strict=True))


def _apply(matrix: Array, x: Array) -> Array:
    return jnp.einsum("...rs,...sv->...rv", matrix, x, precision=lax.Precision.HIGHEST)


def _inverse(below: Array) -> Array:
    """From single tokens up: of two blocks that are inverted, and the square between them, the block of both."""
    inverse = merge(jnp.ones_like(below[..., :1]), 1)[..., None]
    for step in (1 << n for n in range(below.shape[2].bit_length() - 1)):
        early, late = halves(inverse)
        corner = -_apply(late, _apply(_corners(below, step), early))
        above = jnp.concatenate([early, jnp.zeros_like(early)], -1)
        inverse = jnp.concatenate([above, jnp.concatenate([corner, late], -1)], 2)
    return inverse


def _corners(x: Array, step: int) -> Array:
    """The lower left quarters of the blocks of `2 * step` along the diagonals of `[B, M, C, C]`."""
    at = range(0, x.shape[2], 2 * step)
    return merge(jnp.stack([x[..., i + step : i + 2 * step, i : i + step] for i in at], 2), 1)
