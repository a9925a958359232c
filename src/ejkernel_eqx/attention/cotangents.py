"""Terms of the backward that every platform derives from the cotangents; rows that see no key contribute nothing, even if they hold NaN."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from .spec import AttentionArrays


class RowTerms(NamedTuple):
    """Per query and head, `[B, H, T]`."""

    delta: Array
    """`rowsum(dout * out) - dlse`, float32 (float64 for float64)."""
    empty: Array
    """Whether the row sees no key, judged by its results: the output is 0 and the denominator holds the sinks only."""


def row_terms(arrays: AttentionArrays, out: Array, lse: Array, dout: Array, dlse: Array | None) -> RowTerms:
    """A row that sees no key outputs the constant 0, so its cotangent, which may be NaN, is ignored. Its lse is constant too,
    except for sinks, which receive the finite part."""
    zero = out == 0
    # Where the output is exactly 0 the product is 0, also in rows that see a key.
    product = jnp.where(zero, 0, dout.astype(lse.dtype) * out.astype(lse.dtype)).sum(-1).swapaxes(1, 2)
    if arrays.sinks is None:
        empty = lse == -jnp.inf
        alone = empty
    else:
        sinks = arrays.sinks.astype(lse.dtype)[..., None]
        # The kernels compute the logarithm in other units, so the sink comes back rounded.
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


def sinks_gradient(arrays: AttentionArrays, lse: Array, delta: Array) -> Array | None:
    """The gradient of each head's sink, if there are sinks, from its share of the denominator and `delta`."""
    if arrays.sinks is None:
        return None
    nothing = lse == -jnp.inf
    share = jnp.exp(arrays.sinks.astype(lse.dtype)[..., None] - jnp.where(nothing, 0, lse))
    return sum_batch(-jnp.where(nothing, 0, share * delta).sum(-1), arrays.sinks)


def sum_batch(per_row: Array, like: Array) -> Array:
    """The gradient of an array that the batch may share, from that of each batch row."""
    return per_row if like.shape[0] == per_row.shape[0] else per_row.sum(0, keepdims=True)
