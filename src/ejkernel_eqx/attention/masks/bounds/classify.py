"""Classifies the tiles of a pattern exactly: full, empty or mixed.

Bounds of the pattern's function decide most tiles (`ranges`); the pairs of the others are looked at, each distinct tile once (`contents`).
Nothing ever holds one entry for each pair of query and key.
"""

from typing import NamedTuple

import numpy as np

from ...._jitted import while_alive
from ..pattern import Pattern
from ..tile_shape import FULL, NONE, PARTIAL, Shape
from .alike import alike
from .contents import Contents, looked_at, packed
from .evaluate import visible
from .tiles import Tiles

_COARSE = 16  # tiles along each side of a block of tiles that is looked at first
_DIRECTLY = 2**22  # fewer tiles are looked at one by one
_MOSTLY_OPEN = 0.3  # above this share of undecided blocks, all tiles are looked at one by one


class Kinds(NamedTuple):
    """The tiles of a pattern, for all heads of one kind."""

    kinds: np.ndarray  # int8 [query tiles, key tiles]
    partial: tuple[np.ndarray, np.ndarray]  # query and key tiles of the partly visible ones, in order
    patterns: np.ndarray  # int32, of these: which bits


class Classified(NamedTuple):
    """All tiles of a pattern."""

    heads: np.ndarray  # int32 [heads or 1]: which of the rows a head has
    rows: tuple[Kinds, ...]
    bits: np.ndarray  # uint8 [patterns, block_q, bytes]: contents of tiles, the first all true
    blind: bool


@while_alive
def classify(pattern: Pattern, shape: Shape) -> Classified:
    """Classifies all tiles of a pattern, exactly."""
    shape = shape._replace(by_key=False)
    heads, rows, contents = [], {}, Contents(shape)
    for head in range(max(pattern.heads, 1)):
        row = _of_head(pattern, shape, head, contents)
        key = (row.kinds.tobytes(), row.patterns.tobytes()) if pattern.heads else None
        heads.append(rows.setdefault(key, (len(rows), row))[0])
    known, bits = tuple(row for _, row in rows.values()), contents.all()
    blind = any(not x.all() for row in known for x in seen_by_any(row, bits, shape))
    return Classified(np.array(heads, np.int32), known, bits, blind)


def visible_share(pattern: Pattern, queries: int, keys: int, block: int = 128) -> float:
    """The visible tiles over all tiles, on average over heads."""
    known = classify(pattern, Shape(queries, keys, block, block))
    shares = [float((row.kinds != NONE).mean()) if row.kinds.size else 0.0 for row in known.rows]
    return float(np.mean([shares[n] for n in known.heads]))


def touched(
    pattern: Pattern, queries: tuple[np.ndarray, np.ndarray], keys: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """`[M, N]`: whether a pattern may leave anything visible, for any head, of tiles with these first and last queries `[M]` and keys `[N]`."""
    q = tuple(x.astype(np.int64)[:, None] + pattern.offset for x in queries)
    k = tuple(x.astype(np.int64)[None] for x in keys)
    seen = np.zeros((q[0].shape[0], k[0].shape[1]), bool)
    for head in range(max(pattern.heads, 1)):
        tiles = Tiles((q[0], q[1]), (k[0], k[1]), head)
        seen |= visible(pattern.function, tiles).hi
    return seen


def _of_head(pattern: Pattern, shape: Shape, head: int, contents: Contents) -> Kinds:
    kinds = _by_bounds(pattern, shape, head)
    if shape.keys % shape.block_k and shape.keys:
        # Keys past the end are hidden, but no mask hides them from a whole tile.
        kinds[:, -1] = np.minimum(kinds[:, -1], PARTIAL)
    m, n = _numbers_of(kinds == PARTIAL)
    if not len(m):
        return Kinds(kinds, (m, n), np.zeros(0, np.int32))
    first, same = alike(pattern, _tiles(pattern, shape, head, 1, (m, n)), shape)
    of_kind, numbers = looked_at(pattern, shape, head, m[first], n[first], contents)
    kinds[m, n] = of_tile = of_kind[same]
    m, n, same = (x[of_tile == PARTIAL] for x in (m, n, same))
    return Kinds(kinds, (m, n), numbers[same])


def _by_bounds(pattern: Pattern, shape: Shape, head: int) -> np.ndarray:
    """The kinds of all tiles as far as bounds tell: those of partly visible ones may be any."""
    rows, columns = shape.grid
    everywhere = lambda step: _bounded(pattern, _tiles(pattern, shape, head, step))
    if rows * columns <= _DIRECTLY:
        return everywhere(1)
    kinds = everywhere(_COARSE)
    if (kinds == PARTIAL).mean() > _MOSTLY_OPEN:
        return everywhere(1)
    kinds = kinds.repeat(_COARSE, 0).repeat(_COARSE, 1)[:rows, :columns]
    m, n = _numbers_of(kinds == PARTIAL)
    kinds[m, n] = _bounded(pattern, _tiles(pattern, shape, head, 1, (m, n)))
    return kinds


def _bounded(pattern: Pattern, tiles: Tiles) -> np.ndarray:
    result = visible(pattern.function, tiles)
    size = tiles.picked[0].shape if tiles.picked else tiles.size
    some, every = (np.broadcast_to(np.asarray(x, bool), size).view(np.int8) for x in (result.hi, result.lo))
    return some + every


def _tiles(
    pattern: Pattern, shape: Shape, head: int, step: int, picked: tuple[np.ndarray, np.ndarray] | None = None
) -> Tiles:
    """Blocks of `step` by `step` tiles."""

    def edges(block: int, length: int, axis: int, first: int) -> tuple[np.ndarray, np.ndarray]:
        low = np.expand_dims(np.arange(0, length, block * step, dtype=np.int64), axis)
        return low + first, np.minimum(low + block * step, length) - 1 + first

    q = edges(shape.block_q, shape.queries, 1, pattern.offset)
    k = edges(shape.block_k, shape.keys, 0, 0)
    return Tiles(q, k, head, (shape.block_q * step, shape.block_k * step), picked)


def _numbers_of(which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes `np.nonzero` of two axes, in less time."""
    rows, columns = which.shape
    at = np.flatnonzero(which)
    m = np.repeat(np.arange(rows), np.diff(np.searchsorted(at, np.arange(rows + 1) * columns)))
    at -= m * columns
    return m, at


def seen_by_any(row: Kinds, bits: np.ndarray, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """The queries that see any key, and the keys that any query sees."""
    m, n = row.partial
    keys = np.unpackbits(np.bitwise_or.reduce(bits, 1), axis=1, count=shape.block_k, bitorder="little")
    queries = np.bitwise_or.reduce(bits, 2)
    return (
        _seen(row, 1, m, queries > 0).reshape(-1)[: shape.queries],
        _seen(row, 0, n, keys > 0).reshape(-1)[: shape.keys],
    )


def _seen(row: Kinds, axis: int, tile: np.ndarray, some: np.ndarray) -> np.ndarray:
    """`[tiles of the other axis, its block]`: what any tile along an axis shows; `some`: what each of the contents does."""
    # A partly visible tile in which all of these see something is as good as a whole one.
    covered: np.ndarray = np.asarray((row.kinds == FULL).any(axis))
    whole: np.ndarray = np.asarray(some.all(1))
    covered[tile[whole[row.patterns]]] = True
    seen = np.repeat(covered[:, None], some.shape[1], 1)
    rest = np.flatnonzero(~covered[tile])
    if len(rest):
        rest = rest[np.argsort(tile[rest], kind="stable")]
        starts = np.flatnonzero(np.diff(tile[rest], prepend=-1))
        words = packed(some[None])[0].view(np.uint32)
        union = np.bitwise_or.reduceat(words[row.patterns[rest]], starts).view(np.uint8)
        unpacked = np.unpackbits(union, axis=1, count=some.shape[1], bitorder="little")
        seen[tile[rest[starts]]] = unpacked > 0
    return seen
