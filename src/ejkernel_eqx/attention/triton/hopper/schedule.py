"""The schedule of Hopper's forward kernel, of each program its tiles of queries in their order: decided on the host where it knows what tiles see, so that
the last programs end together."""

import functools
import heapq

import numpy as np

_FIXED_COST = 1.0
"""The cost of a tile of queries besides its tiles of keys, in tiles of keys."""


@functools.lru_cache(maxsize=256)
def schedule(rows: int, queries: int, keys: int, offset: int, left: int, right: int, block_q: int, block_k: int, group: int, programs: int) -> np.ndarray:  # fmt: skip
    """The tiles of each program, int32 `[most + 1, programs]`, and -1 behind its last. Tile `m` of queries of row `r` of `rows`, of batch times
    heads, is number `r * tiles + m`.

    Rows run in groups of `group`, few enough for the cache; in a group the tiles with the most keys (`left` and `right` of a query, -1 for all)
    run first, each on the program that is free first."""
    # In the order in which tiles are handed out: the group, then the tile from the last one on, then the row.
    tiles = -(-queries // block_q)
    number = np.arange(tiles * rows)
    first_row = number // (tiles * group) * group
    inside, width = number % (tiles * group), np.minimum(rows - first_row, group)
    tile, row = tiles - 1 - inside // width, first_row + inside % width
    begin = tile * block_q + offset
    end = np.minimum((tile + 1) * block_q, queries) + offset
    # Tiles of keys that the tile's first to last query see.
    low, high = np.zeros_like(tile), np.full_like(tile, -(-keys // block_k))
    if left >= 0:
        low = np.maximum(begin - left, 0) // block_k
    if right >= 0:
        high = np.minimum(high, -(-np.maximum(end + right, 0) // block_k))
    table = dealt((row * tiles + tile)[None], np.maximum(high - low, 1) + _FIXED_COST, programs)[..., 0]
    table.setflags(write=False)
    return table


def dealt(records: np.ndarray, costs: np.ndarray, programs: int) -> np.ndarray:
    """Each tile, in this order, to the program that is free first: int32 `[most + 1, programs, n]` from what is known of each tile, `[n, tiles]`, the number of
    each first; -1 behind a program's last. No program is left without a tile if there are as many."""
    assigned: list[list[int]] = [[] for _ in range(programs)]
    # A heap of when each program is free.
    free = [(0.0, program) for program in range(programs)]
    for tile, cost in enumerate(costs.tolist()):
        until, program = free[0]
        assigned[program].append(tile)
        heapq.heapreplace(free, (until + cost, program))
    table = np.zeros((max(map(len, assigned)) + 1, programs, len(records)), np.int32)
    table[..., 0] = -1
    for program, tiles in enumerate(assigned):
        table[: len(tiles), program] = records[:, tiles].T
    return table
