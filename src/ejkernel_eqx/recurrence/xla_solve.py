"""The systems that the delta rule solves in every chunk: unit lower triangular matrices, by blockwise forward substitution."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from .xla_chunks import BLOCK, halves, joined, squares

INVERSE = "ejkernel_eqx.recurrence.inverse"
"""The name of the inverses for policies of `jax.checkpoint`: of all that is here, only they need many steps."""


@jax.custom_jvp
def solve(below: Array, known: tuple[Array, ...]) -> tuple[Array, ...]:
    """`(I + below)^-1 x` for each `x [B, M, C, X]` of `known`; `below [B, M, C, C]` is zero on and above the diagonal."""
    inverse = _inverse(below)
    return tuple(_apply(inverse, x) for x in known)


@solve.defjvp
def _(primals: Any, tangents: Any) -> Any:
    below, known = primals
    change, changes = tangents
    inverse = checkpoint_name(_inverse(below), INVERSE)
    solved = tuple(_apply(inverse, x) for x in known)
    return solved, tuple(_apply(inverse, d - _apply(change, x)) for d, x in zip(changes, solved, strict=True))


def _apply(matrix: Array, x: Array) -> Array:
    return jnp.einsum("...rs,...sv->...rv", matrix, x, precision=lax.Precision.HIGHEST)


def _inverse(below: Array) -> Array:
    """The inverse, from single tokens up: that of two blocks together from their inverses and the square between them."""
    size, block = below.shape[2], min(below.shape[2], BLOCK)
    inverse = _inverse_of_blocks(squares(below, block))
    for step in (block << n for n in range((size // block).bit_length() - 1)):
        early, late = halves(inverse)
        corner = -_apply(late, _apply(squares(below, step, below=True), early))
        inverse = joined(inverse, corner)
    return inverse


def _inverse_of_blocks(below: Array) -> Array:
    """`_inverse` within `[B, blocks, s, s]`, all squares of a level at once, with one body that a scan repeats."""
    size = below.shape[2]
    i, j = np.arange(size)[:, None], np.arange(size)
    # With the sharding and varying axes of the matrices.
    single = jnp.zeros_like(below) + np.eye(size, dtype=below.dtype)[None, None]
    steps = [1 << n for n in range(size.bit_length() - 1)]
    if not steps:
        return single
    between = np.stack([(i // step == j // step + 1) & (j // step % 2 == 0) for step in steps])

    def body(inverse: Array, between: Array) -> tuple[Array, None]:
        corner = _apply(inverse, _apply(jnp.where(between[None, None], below, 0), inverse))
        return inverse - corner, None

    return lax.scan(body, single, jnp.asarray(between))[0]
