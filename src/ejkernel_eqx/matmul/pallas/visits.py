"""The rows of the steps of a kernel's grid: tables made on the device, of statically known length, that a TPU fetches ahead of the blocks."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ...launch.sizes import cdiv


class Visits(NamedTuple):
    """The visits of tiles of `block` rows, in order: each is by one group. Consecutive groups that share a tile visit it one after the other, so
    that it stays in vector memory between them. Rows are counted over all leading axes."""

    tile: Array  # int32 [V]
    matrix: Array  # int32 [V], the matrix of the visiting group, or, of rows past the last group, one that has been loaded before
    begin: Array  # int32 [V], the first row of the group
    end: Array  # int32 [V], the row past its last one
    kind: Array  # int32 [V], the sum of some of the flags below


REAL, FIRST, LAST = 1, 2, 4
"""Flags of a visit: it is by a group, not by rows past the last one; it is the first one by a matrix; it is the last one."""


def row_visits(sizes: Array, rows: int, block: int, mapped: bool) -> tuple[Visits, Array]:
    """Every tile of `rows` rows for each leading axis of `sizes [B, E]`, by the groups that it has rows of, and their number. Those of no group
    are a group, of all but the flag `REAL`."""
    batch, count = sizes.shape
    past = rows - sizes.sum(-1, keepdims=True, dtype=jnp.int32)
    size = jnp.concatenate([sizes, past], -1).reshape(-1)
    place = jnp.arange(size.shape[0], dtype=jnp.int32)
    is_real = place % (count + 1) < count
    # Of rows past the last group: the matrix before theirs, which costs no load.
    known = lax.cummax(jnp.where(is_real & (size > 0), place, 0))
    matrix = known % (count + 1) + (known // (count + 1) * count if mapped else 0)
    ends = jnp.cumsum(size, dtype=jnp.int32)
    return _visits(ends - size, ends, matrix, is_real, block, batch * rows, 0)


def group_visits(sizes: Array, rows: int, block: int, mapped: bool) -> tuple[Visits, Array]:
    """Every group of `sizes [B, E]` by the tiles that it has rows in, and the number of these visits. A group without rows visits one tile, as
    its sum is written too. Groups that share a matrix, for each leading axis one, follow one another."""
    batch, count = sizes.shape
    row = jnp.arange(batch, dtype=jnp.int32)[:, None] * rows
    ends = jnp.cumsum(sizes, -1, dtype=jnp.int32) + row
    matrix = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), sizes.shape)
    if mapped:
        matrix = matrix + jnp.arange(batch, dtype=jnp.int32)[:, None] * count
    order = (lambda x: x.reshape(-1)) if mapped else (lambda x: x.T.reshape(-1))
    every = jnp.ones(batch * count, bool)
    return _visits(order(ends - sizes), order(ends), order(matrix), every, block, batch * rows, 1)


def _visits(
    begin: Array, end: Array, matrix: Array, is_real: Array, block: int, rows: int, least: int
) -> tuple[Visits, Array]:
    tiles = jnp.where(end > begin, (end - 1) // block - begin // block + 1, least)
    upto = jnp.cumsum(tiles, dtype=jnp.int32)
    total = upto[-1]
    segments = begin.shape[0]
    # A group shares its first tile with the one before it, so that each adds at most one visit.
    number = jnp.arange(cdiv(rows, block) + segments * (1 + least), dtype=jnp.int32)
    segment = jnp.minimum(jnp.searchsorted(upto, number, side="right", method="compare_all"), segments - 1)
    take = lambda x: jnp.take(x, segment, axis=0)
    own = take(matrix)
    is_new, edge = own[1:] != own[:-1], jnp.ones(1, bool)
    first = jnp.concatenate([edge, is_new])
    last = jnp.concatenate([is_new, edge]) | (number == total - 1)
    tile = take(begin) // block + number - take(upto - tiles)
    of = lambda flag, holds: flag * holds.astype(jnp.int32)
    kind = of(REAL, take(is_real)) + of(FIRST, first) + of(LAST, last)
    limit = max(cdiv(rows, block) - 1, 0)
    return Visits(jnp.clip(tile, 0, limit).astype(jnp.int32), own, take(begin), take(end), kind), total
