"""For each block of keys the queries that chose it, in their order, made on the device."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .._broadcast import like
from .._take import take_along
from ..sequences.packing import ended
from .spec import NativeArrays


class Lists(NamedTuple):
    """Of each row and key head. A pair is a query and one of its blocks, `t * n + slot`; places in `pairs` are counted from 0 for each."""

    pairs: Array  # [B, K, T * n]: those of a block one after the other
    owner: Array  # [B, K, PIECES]: the block of each piece of a list
    begin: Array  # [B, K, PIECES]: its first place in `pairs`
    end: Array  # [B, K, PIECES]: one past its last place
    piece: Array  # [B, K, M + 1]: the first piece of each block


def lists_of(indices: Array, blocks: int, span: int, *, together: bool = False) -> Lists:
    """The lists of `indices [B, T, K, n]`, cut into pieces of up to `span` queries. `together`: sorted as one list, which is faster on a GPU, but
    where devices share rows or heads exchanges them."""
    batch, length, heads, count = indices.shape
    # A bound that is known while tracing: each block adds at most one piece that is not full.
    most = blocks + length * count // span
    by_row = jnp.moveaxis(indices, 2, 1).reshape(batch, heads, length * count)
    # Slots without a block sort behind all blocks.
    block = jnp.where(by_row < 0, blocks, by_row)
    pair = jnp.broadcast_to(like(jnp.arange(length * count, dtype=jnp.int32), block), block.shape)
    # The keys of all lists have to fit int32.
    if together and batch * heads * (blocks + 1) < 2**31:
        row = jnp.arange(batch * heads, dtype=jnp.int32).reshape(batch, heads, 1) * (blocks + 1)
        key, pairs = lax.sort(((block + row).reshape(-1), pair.reshape(-1)), num_keys=1, is_stable=True)
        key, pairs = key.reshape(block.shape) - row, pairs.reshape(block.shape)
    else:
        key, pairs = lax.sort((block, pair), num_keys=1, is_stable=True)
    bounds = _begins(key, blocks)
    begin, end = bounds[..., :-1], bounds[..., 1:]
    pieces = jnp.cumsum(-(-(end - begin) // span), -1, dtype=jnp.int32)
    piece = jnp.concatenate([jnp.zeros_like(pieces[..., :1]), pieces], -1)
    owner = ended(pieces, most)
    is_used = owner < blocks
    # Unused pieces read the last block's entries, and `is_used` leaves them empty.
    owner = jnp.minimum(owner, blocks - 1)
    take = lambda x: take_along(x, owner, -1)
    number = like(jnp.arange(most, dtype=jnp.int32), owner)
    start = jnp.where(is_used, take(begin) + (number - take(piece[..., :-1])) * span, 0)
    return Lists(pairs, owner, start, jnp.where(is_used, jnp.minimum(start + span, take(end)), 0), piece)


def _begins(key: Array, blocks: int) -> Array:
    """The first place of each block among sorted keys `[..., L]`, or of a later one if it has none, `[..., blocks + 1]`."""

    def of_row(key: Array) -> Array:
        new = jnp.concatenate([jnp.ones_like(key[:1], bool), key[1:] != key[:-1]])
        place, length = jnp.arange(key.shape[0], dtype=jnp.int32), key.shape[0]
        # Only the first of equal ones is written, as many writes to one place would wait for each other.
        first = jnp.full((blocks + 1,), length, jnp.int32)
        first = first.at[jnp.where(new, key, blocks + 1)].set(place, mode="drop")
        return lax.cummin(first, reverse=True)

    return jnp.vectorize(of_row, signature="(l)->(m)")(key)


def by_key(x: Array, arrays: NativeArrays) -> Array:
    """`[B, S, K, D]` from the keys of blocks `[B, K, M, block, D]`."""
    batch, heads, blocks, size, channels = x.shape
    x = jnp.moveaxis(x.reshape(batch, heads, blocks * size, channels), 1, 2)
    if arrays.begin is None:
        return x[:, : arrays.k.shape[1]]
    assert arrays.position is not None and arrays.first is not None and arrays.base is not None
    place = arrays.position - arrays.first  # keys are queries, as the call is packed
    at = jnp.where(place < 0, 0, arrays.base * size + place)[..., None, None]
    return jnp.where((place < 0)[..., None, None], 0, take_along(x, at, 1))
