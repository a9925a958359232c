"""Lists of the tiles that a pattern leaves visible, built on the host, once for each pattern and shape.

A list holds the tiles of one query tile (or, inverted, of one key tile) that run: first those that are visible as a whole and need no mask,
then those that are partly visible.
"""

from typing import NamedTuple

import numpy as np

from ..._jitted import while_alive
from .bounds.classify import classify, Kinds, seen_by_any
from .bounds.contents import packed
from .pattern import Pattern
from .tile_shape import FULL, PARTIAL, Shape

_TOGETHER = 64  # contents that are turned at once


class PatternLists(NamedTuple):
    """The lists of a pattern for a kernel with `M` tiles of its own. Entries of one list are contiguous."""

    heads: np.ndarray  # int32 [heads or 1]: which row of lists a head reads
    tiles: np.ndarray
    """int32 `[rows, M, 8]`: for each of the kernel's tiles, by length of their lists, longest first, what a program reads at once, so that no read
    waits for another: the tile; where its list begins, where partly visible tiles begin, where it ends, how far patterns are from entries; and
    the entries at the first two of these."""
    entries: np.ndarray  # uint16 or, with many tiles, int32 [entries + 1]: listed tiles
    patterns: np.ndarray  # int32: of every entry of a partly visible tile, which bits
    bits: np.ndarray | None  # int32 [patterns, rows of a tile, words]
    blind: bool
    """Tells whether a query may see no key, or a key be seen by no query."""


@while_alive
def lists_of(pattern: Pattern, shape: Shape) -> PatternLists:
    """The lists of a pattern that nothing else hides."""
    known = classify(pattern, shape._replace(by_key=False))
    tiles, entries, patterns, first, before = [], [], [], 0, 0
    for row in known.rows:
        bounds, listed, partial = _entries(row, shape.by_key)
        # Patterns of a list follow those of the lists before it.
        counts = bounds[:, 2] - bounds[:, 1]
        away = before + np.cumsum(counts) - counts - bounds[:, 1]
        tiles.append(np.concatenate([bounds + first, (away - first)[:, None]], axis=1).astype(np.int32))
        entries.append(listed)
        patterns.append(partial)
        first, before = first + len(listed), before + len(partial)
    stacked = np.stack(tiles)
    # One more entry, which the kernels read ahead.
    every = np.concatenate([*entries, np.zeros(1, entries[0].dtype)])
    lengths = (stacked[..., 2] - stacked[..., 0]).sum(0)
    # The longest first; of equal ones the last, as causal masks have the most keys there.
    order = np.lexsort((-np.arange(len(lengths)), -lengths)).astype(np.int32)
    stacked = stacked[:, order]
    tile = np.broadcast_to(order[:, None], (*stacked.shape[:2], 1))
    records = [tile, stacked, every[stacked[..., :2]], np.zeros_like(tile)]
    return PatternLists(
        known.heads,
        np.concatenate(records, axis=-1, dtype=np.int32),
        every,
        np.concatenate([*patterns, np.zeros(1, np.int32)]),
        packed_bits(known.bits, shape) if len(known.bits) > 1 else None,
        known.blind,
    )


@while_alive
def grids_of(pattern: Pattern, shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Grids of a pattern that data is combined with: the row of each head, kinds and bits of all tiles `[rows, query tiles, key tiles]`, and the
    bits."""
    known = classify(pattern, shape._replace(by_key=False))
    numbers = np.zeros((len(known.rows), *shape.grid), np.int32)
    for number, row in zip(numbers, known.rows, strict=True):
        number[row.partial] = row.patterns
    return known.heads, np.stack([row.kinds for row in known.rows]), numbers, packed_bits(known.bits, shape)


@while_alive
def keys_seen(pattern: Pattern, shape: Shape) -> np.ndarray:
    """Keys that any query sees: booleans `[rows, keys]`."""
    known = classify(pattern, shape._replace(by_key=False))
    if not known.blind:
        return np.ones((len(known.rows), shape.keys), bool)
    return np.stack([seen_by_any(row, known.bits, shape)[1] for row in known.rows])


def _entries(row: Kinds, by_key: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The lists of one row: bounds `[M, 3]`, entries in order, and the patterns of partly visible ones."""
    kinds, (_, n), patterns = row
    if by_key:
        kinds = np.ascontiguousarray(kinds.T)
        n = n.astype(np.uint16 if len(kinds) < 2**16 else np.int32)  # 16 bits are sorted in linear time
        patterns = patterns[np.argsort(n, kind="stable")]
    count, others = kinds.shape
    dtype = np.uint16 if others < 2**16 else np.int32
    places = [np.flatnonzero(kinds == kind) for kind in (FULL, PARTIAL)]
    begins = [np.searchsorted(at, np.arange(count + 1) * others) for at in places]
    whole, some = (np.diff(x) for x in begins)
    begin = begins[0][:-1] + begins[1][:-1]
    listed = np.zeros(len(places[0]) + len(places[1]), dtype)
    # Whole tiles come after the partly visible ones of the lists before.
    for at, of_kind, before in ((places[0], whole, begins[1][:-1]), (places[1], some, begins[0][1:])):
        numbers = (at - np.repeat(np.arange(count) * others, of_kind)).astype(dtype)
        listed[np.arange(len(at)) + np.repeat(before, of_kind)] = numbers
    return np.stack([begin, begin + whole, begin + whole + some], 1), listed, patterns


def packed_bits(bits: np.ndarray, shape: Shape) -> np.ndarray:
    """int32 `[patterns, rows, words]` of the bits of `Classified`; if lists are those of key tiles, keys are the rows."""
    if shape.by_key:
        parts = (bits[at : at + _TOGETHER] for at in range(0, len(bits), _TOGETHER))
        apart = (np.unpackbits(x, axis=2, count=shape.block_k, bitorder="little") for x in parts)
        bits = np.concatenate([packed(x.swapaxes(1, 2)) for x in apart])
    return bits.view("<i4").astype(np.int32)
