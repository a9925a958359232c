"""For each block of keys the queries that chose it, in their order, made on the device."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ....sequences.packing import ended


class Lists(NamedTuple):
    """`R` are the rows of the batch by key heads."""

    tokens: Array  # [R * T * n]: queries, those of a block one after the other
    owner: Array  # [R, PIECES]: the block of each piece of a list
    begin: Array  # [R, PIECES]: its first place in `tokens`
    end: Array  # [R, PIECES]: one past its last place
    piece: Array  # [R, M + 1]: the first piece of each block


def lists_of(indices: Array, blocks: int, span: int) -> Lists:
    """The lists of `indices [B, T, K, n]`, cut into pieces of up to `span` queries."""
    batch, length, heads, count = indices.shape
    rows, most = batch * heads, blocks + length * count // span
    by_row = jnp.moveaxis(indices, 2, 1).reshape(rows, length * count)
    block = jnp.where(by_row < 0, blocks, by_row) + jnp.arange(rows, dtype=jnp.int32)[:, None] * (blocks + 1)
    token = jnp.broadcast_to(jnp.arange(length * count, dtype=jnp.int32) // count, by_row.shape)
    key, tokens = lax.sort((block.reshape(-1), token.reshape(-1)), num_keys=1, is_stable=True)
    bounds = jnp.searchsorted(key, jnp.arange(rows * (blocks + 1) + 1, dtype=jnp.int32)).astype(jnp.int32)
    begin = bounds[:-1].reshape(rows, blocks + 1)[:, :-1]
    end = bounds[1:].reshape(rows, blocks + 1)[:, :-1]
    pieces = jnp.cumsum(-(-(end - begin) // span), -1, dtype=jnp.int32)
    piece = jnp.concatenate([jnp.zeros((rows, 1), jnp.int32), pieces], -1)
    number = jnp.arange(most, dtype=jnp.int32)[None]
    owner = ended(pieces, most)
    is_used = owner < blocks
    owner = jnp.minimum(owner, blocks - 1)
    take = lambda x: jnp.take_along_axis(x, owner, -1)
    start = take(begin) + (number - take(piece[:, :-1])) * span
    start = jnp.where(is_used, start, 0)
    return Lists(tokens, owner, start, jnp.where(is_used, jnp.minimum(start + span, take(end)), 0), piece)
