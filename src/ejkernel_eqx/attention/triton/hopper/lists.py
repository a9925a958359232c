"""Tables that Hopper's kernel over lists reads: which program takes which tiles of queries, where their lists are, and which keys no query sees."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...masks.call_lists import kinds_of, tile_lists
from ...masks.pattern import Pattern
from ...masks.tile_lists import keys_seen, lists_of
from ...masks.tile_shape import NONE, Shape
from ...spec import AttentionArrays, AttentionSpec
from .schedule import dealt, schedule

_FIXED_COST = 0.5
"""The cost of a tile of queries besides its entries, in entries: most of it happens while others multiply."""


class Listed(NamedTuple):
    """Tables on the device, or constants of it."""

    schedule: (
        Array | np.ndarray
    )  # int32 [most + 1, programs, 8], of each tile: its number, and of its record the list's bounds
    entries: Array
    patterns: Array
    bits: Array | None


def listed(arrays: AttentionArrays, spec: AttentionSpec, shape: Shape, group: int, programs: int) -> Listed:
    """The lists of a call, and who runs them."""
    batch, _, heads, _ = arrays.q.shape
    lists = tile_lists(arrays, spec, shape)
    if spec.pattern is not None and arrays.heads is None:
        table = _known(spec.pattern, shape, batch, heads, group, programs)
    else:
        order, place = _order(spec, shape, batch * heads, group, programs)
        row, tile = np.divmod(np.maximum(order, 0), shape.grid[0])
        records = lists.tiles[lists.row.reshape(-1)[row], place[tile]]
        table = jnp.where(np.arange(8) == 0, order[..., None], records)
    return Listed(table, lists.entries, lists.patterns, lists.bits)


@functools.lru_cache(maxsize=32)
def _known(pattern: Pattern, shape: Shape, batch: int, heads: int, group: int, programs: int) -> np.ndarray:
    """The schedule of lists that are constants."""
    lists = lists_of(pattern, shape)
    by_tile = lists.tiles[:, np.argsort(lists.tiles[0, :, 0])]
    row = np.tile(np.broadcast_to(lists.heads, heads), batch)  # of batch times heads: which row of lists
    records = by_tile[row].reshape(-1, 8).copy()
    records[:, 0] = np.arange(len(records))
    return _longest_first(records, records[:, 3] - records[:, 1], shape.grid[0], group, programs)


def _order(
    spec: AttentionSpec, shape: Shape, rows: int, group: int, programs: int
) -> tuple[np.ndarray, np.ndarray]:
    """The schedule of lists whose rows, or which themselves, are known on the device only: numbers of tiles `[most + 1, programs]`; and where among
    records each tile's is."""
    tiles = shape.grid[0]
    if spec.pattern is None:
        left, right = (-1 if side is None else side for side in (spec.left, spec.right))
        order = schedule(rows, shape.queries, shape.keys, spec.offset, left, right, shape.block_q, shape.block_k, group, programs)  # fmt: skip
        return order, np.arange(tiles)[::-1]
    records = lists_of(spec.pattern, shape).tiles
    place = np.argsort(records[0, :, 0])
    on_average = (records[..., 3] - records[..., 1]).mean(0)[place]
    numbers = np.arange(rows * tiles)[:, None]
    return _longest_first(numbers, np.tile(on_average, rows), tiles, group, programs)[..., 0], place


def _longest_first(
    records: np.ndarray, length: np.ndarray, tiles: int, group: int, programs: int
) -> np.ndarray:
    """Tiles of rows in groups as in `schedule`, the longest lists of a group first."""
    number = records[:, 0]
    order = np.lexsort((-(number % tiles), -length, number // (tiles * group)))
    table = dealt(records[order].T, np.maximum(length[order], 1) + _FIXED_COST, programs)
    table.setflags(write=False)
    return table


def seen_keys(arrays: AttentionArrays, spec: AttentionSpec, shape: Shape) -> Array | None:
    """The keys that any query of a key head sees, `[B or 1, S, K or 1]`; `None` if those that are read all are. Lists are those of a pattern, or of a map with
    a static window."""
    if spec.pattern is not None:
        seen, row = keys_seen(spec.pattern, shape), lists_of(spec.pattern, shape).heads
        if seen.all():
            return None
        row = row if arrays.heads is None else jnp.asarray(row)[arrays.heads[0]]
        by_head = jnp.asarray(seen)[row][None]  # [1, H or 1, S]
    else:
        reach = _reach(shape, spec)
        if reach is None:
            return None
        low, high = (jnp.asarray(x)[:, None] for x in reach)  # [M, 1]
        key = jnp.arange(shape.keys, dtype=jnp.int32)[None]
        kinds = kinds_of(arrays, spec, shape)[0]  # [B or 1, H or 1, M, N]
        listed_keys = jnp.repeat(kinds != NONE, shape.block_k, axis=-1)[..., : shape.keys]
        by_head = (listed_keys & ((key >= low) & (key <= high))[None, None]).any(-2)
    if by_head.shape[1] > 1:
        by_head = by_head.reshape(by_head.shape[0], arrays.k.shape[2], -1, shape.keys).any(2)
    return by_head.mT


def _reach(shape: Shape, spec: AttentionSpec) -> tuple[np.ndarray, np.ndarray] | None:
    """First and last key that the queries of each tile see by the static window, int32 `[M]`; `None` if each of them sees all keys of every tile that any of
    them sees."""
    (count, others), most = shape.grid, shape.keys - 1
    first = np.arange(count) * shape.block_q + spec.offset
    last = np.minimum(first + shape.block_q, shape.queries + spec.offset) - 1
    low = np.zeros_like(first) if spec.left is None else first - spec.left
    high = np.full_like(last, most) if spec.right is None else last + spec.right
    begin = np.arange(others) * shape.block_k
    end = np.minimum(begin + shape.block_k - 1, most)
    apart = (begin > high[:, None]) | (end < low[:, None])
    if (apart | ((begin >= low[:, None]) & (end <= high[:, None]))).all():
        return None
    return low.astype(np.int32), high.astype(np.int32)
