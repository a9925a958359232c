"""What the cotangents of a call give to every backward: nothing of rows that see nothing, whatever they hold."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from .spec import AttentionArrays


class RowTerms(NamedTuple):
    """Of every query and head, `[B, H, T]`."""

    delta: Array
    """`rowsum(dout * out) - dlse`, float32 (float64 for float64)."""
    empty: Array
    """Whether the row sees nothing, as far as its results tell: output 0 and no more in the denominator than the sinks."""


def row_terms(arrays: AttentionArrays, out: Array, lse: Array, dout: Array, dlse: Array | None) -> RowTerms:
    """A row that sees nothing has output 0, a constant: its cotangent, which may be NaN, counts for nothing. Its lse is a constant
    too, but for sinks, which get what is finite."""
    zero = out == 0
    # An output of exactly 0 shares nothing with its cotangent, in rows that see something too.
    product = jnp.where(zero, 0, dout.astype(lse.dtype) * out.astype(lse.dtype)).sum(-1).swapaxes(1, 2)
    if arrays.sinks is None:
        empty = lse == -jnp.inf
        alone = empty
    else:
        sinks = arrays.sinks.astype(lse.dtype)[..., None]
        # The kernels take the logarithm in other units, so that the sink comes back rounded.
        near = jnp.abs(lse - sinks) <= 1e-5 * (1 + jnp.abs(sinks))
        empty = zero.all(-1).swapaxes(1, 2) & ((lse == -jnp.inf) | near)
        alone = empty & ((lse == -jnp.inf) | (False if dlse is None else ~jnp.isfinite(dlse)))
    if dlse is None:
        return RowTerms(product, empty)
    return RowTerms(product - jnp.where(alone, 0, dlse.astype(lse.dtype)), empty)


def clean_cotangent(dout: Array, empty: Array) -> Array:
    """`dout [B, T, H, V]` without NaN and infinity in rows that see nothing."""
    hidden = empty.swapaxes(1, 2)[..., None] & ~jnp.isfinite(dout)
    return jnp.where(hidden, jnp.zeros((), dout.dtype), dout)


def sinks_gradient(arrays: AttentionArrays, lse: Array, delta: Array) -> Array:
    """`[B, H]`: of each head's sink, whose share of the denominator shrinks or grows as `delta` says."""
    assert arrays.sinks is not None
    nothing = lse == -jnp.inf
    share = jnp.exp(arrays.sinks.astype(lse.dtype)[..., None] - jnp.where(nothing, 0, lse))
    return -jnp.where(nothing, 0, share * delta).sum(-1)
