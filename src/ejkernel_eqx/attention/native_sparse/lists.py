"""For each block of keys the queries that chose it, in their order, made on the device."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ..._broadcast import like
from ...sequences.packing import ended
from .spec import NativeArrays


class Lists(NamedTuple):
    """Of each row and key head; places in `tokens` are counted from 0 for each."""

    tokens: Array  # [B, K, T * n]: queries, those of a block one after the other
    owner: Array  # [B, K, PIECES]: the block of each piece of a list
    begin: Array  # [B, K, PIECES]: its first place in `tokens`
    end: Array  # [B, K, PIECES]: one past its last place
    piece: Array  # [B, K, M + 1]: the first piece of each block


def lists_of(indices: Array, blocks: int, span: int) -> Lists:
    """The lists of `indices [B, T, K, n]`, cut into pieces of up to `span` queries."""
    batch, length, heads, count = indices.shape
    most = blocks + length * count // span
    by_row = jnp.moveaxis(indices, 2, 1).reshape(batch, heads, length * count)
    block = jnp.where(by_row < 0, blocks, by_row)
    token = like(jnp.arange(length * count, dtype=jnp.int32) // count, block)
    key, tokens = lax.sort((block, jnp.broadcast_to(token, block.shape)), num_keys=1, is_stable=True)
    bounds = ended(key + 1, blocks + 1)  # how many are of earlier blocks
    begin, end = bounds[..., :-1], bounds[..., 1:]
    pieces = jnp.cumsum(-(-(end - begin) // span), -1, dtype=jnp.int32)
    piece = jnp.concatenate([jnp.zeros_like(pieces[..., :1]), pieces], -1)
    owner = ended(pieces, most)
    is_used = owner < blocks
    owner = jnp.minimum(owner, blocks - 1)
    take = lambda x: jnp.take_along_axis(x, owner, -1)
    number = like(jnp.arange(most, dtype=jnp.int32), owner)
    start = jnp.where(is_used, take(begin) + (number - take(piece[..., :-1])) * span, 0)
    return Lists(tokens, owner, start, jnp.where(is_used, jnp.minimum(start + span, take(end)), 0), piece)


def by_key(x: Array, arrays: NativeArrays) -> Array:
    """`[B, S, K, D]` from the keys of blocks `[B, K, M, block, D]`."""
    batch, heads, blocks, size, channels = x.shape
    x = jnp.moveaxis(x.reshape(batch, heads, blocks * size, channels), 1, 2)
    if arrays.begin is None:
        return x[:, : arrays.k.shape[1]]
    assert arrays.position is not None and arrays.first is not None and arrays.base is not None
    place = arrays.position - arrays.first  # keys are queries, as the call is packed
    at = jnp.where(place < 0, 0, arrays.base * size + place)[..., None, None]
    return jnp.where((place < 0)[..., None, None], 0, jnp.take_along_axis(x, at, 1))
