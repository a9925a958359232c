"""Lists of the tiles that a pattern leaves visible, built on the host, once for each pattern and shape.

A list holds the tiles of one query tile (or, inverted, of one key tile) that run: first those that are visible as a whole and need no mask,
then those that are partly visible. Bounds of the pattern's function decide most tiles; the pairs of the others are looked at, each distinct
tile once. Nothing ever holds one entry for each pair of query and key.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from .functions import evaluate
from .pattern import Pattern, traced_once
from .ranges import bounds_of, Tiles

NONE, PARTIAL, FULL = 0, 1, 2
_COARSE = 16  # tiles along each side of a block of tiles that is looked at first
_DIRECTLY = 2**14  # fewer tiles are looked at one by one
_MOSTLY_OPEN = 0.3  # above this share of undecided blocks, all tiles are looked at one by one
_MOST_PAIRS = 2**24  # looked at together
_WORD = 32


class Shape(NamedTuple):
    """Queries, keys, and the tiles that they are cut into. `by_key`: lists are those of key tiles, and bits are stored key by key."""

    queries: int
    keys: int
    block_q: int
    block_k: int
    by_key: bool = False

    @property
    def grid(self) -> tuple[int, int]:
        """The number of query tiles and of key tiles."""
        return -(-self.queries // self.block_q), -(-self.keys // self.block_k)


class Kinds(NamedTuple):
    """The tiles of a pattern, for all heads of one kind."""

    kinds: np.ndarray  # int8 [query tiles, key tiles]
    patterns: np.ndarray  # int32, of partly visible tiles in order: which bits


class Classified(NamedTuple):
    """All tiles of a pattern."""

    heads: np.ndarray  # int32 [heads or 1]: which of the rows a head has
    rows: tuple[Kinds, ...]
    bits: np.ndarray  # bool [patterns, block_q, block_k], the first all true
    blind: bool


@functools.lru_cache(maxsize=32)
def classify(pattern: Pattern, shape: Shape) -> Classified:
    """Which tiles of a pattern are visible, exactly."""
    shape = shape._replace(by_key=False)
    heads, rows, found = [], {}, _Bits(shape)
    blind = False
    for head in range(max(pattern.heads, 1)):
        kinds = _by_bounds(pattern, shape, head)
        row = _looked_at(pattern, shape, head, kinds, found)
        key = (row.kinds.tobytes(), row.patterns.tobytes())
        if key not in rows:
            blind = blind or _blind(row, found.all(), shape)
        heads.append(rows.setdefault(key, (len(rows), row))[0])
    return Classified(np.array(heads, np.int32), tuple(row for _, row in rows.values()), found.all(), blind)


def visible_share(pattern: Pattern, queries: int, keys: int, block: int = 128) -> float:
    """The visible tiles over all tiles, on average over heads."""
    known = classify(pattern, Shape(queries, keys, block, block))
    shares = [float((row.kinds != NONE).mean()) if row.kinds.size else 0.0 for row in known.rows]
    return float(np.mean([shares[n] for n in known.heads]))


def touched(
    pattern: Pattern, queries: tuple[np.ndarray, np.ndarray], keys: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """`[M, N]`: whether a pattern may leave anything visible, for any head, of tiles with these first and last queries `[M]` and keys `[N]`."""
    m, n = (tuple(x.astype(np.int64) for x in ends) for ends in (queries, keys))
    q = tuple(x[:, None] + pattern.offset for x in m)
    seen = np.zeros((len(m[0]), len(n[0])), bool)
    for head in range(max(pattern.heads, 1)):
        result, _ = bounds_of(
            traced_once(pattern.function), Tiles((q[0], q[1]), (n[0][None], n[1][None]), head)
        )
        seen |= result.hi
    return seen


def _edges(shape: Shape, side: int, first: np.ndarray, tiles: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """First and last query (`side` 0) or key of blocks of `tiles` tiles, within the length."""
    block, length = ((shape.block_q, shape.queries), (shape.block_k, shape.keys))[side]
    low = first.astype(np.int64) * block
    return low, np.minimum(low + tiles * block, length) - 1


def _by_bounds(pattern: Pattern, shape: Shape, head: int) -> np.ndarray:
    """The kinds of all tiles as far as bounds tell: those of partly visible ones may be any."""
    rows, columns = shape.grid

    def everywhere(step: int) -> np.ndarray:
        m, n = np.arange(0, rows, step)[:, None], np.arange(0, columns, step)[None]
        return _bounded(pattern, shape, head, m, n, step)

    if rows * columns <= _DIRECTLY:
        return everywhere(1)
    kinds = everywhere(_COARSE)
    if (kinds == PARTIAL).mean() > _MOSTLY_OPEN:
        return everywhere(1)
    kinds = kinds.repeat(_COARSE, 0).repeat(_COARSE, 1)[:rows, :columns]
    m, n = np.nonzero(kinds == PARTIAL)
    kinds[m, n] = _bounded(pattern, shape, head, m, n, 1)
    return kinds


def _bounded(
    pattern: Pattern, shape: Shape, head: int, m: np.ndarray, n: np.ndarray, step: int
) -> np.ndarray:
    (q_low, q_high), k = _edges(shape, 0, m, step), _edges(shape, 1, n, step)
    tiles = Tiles((q_low + pattern.offset, q_high + pattern.offset), k, head)
    result, _ = bounds_of(traced_once(pattern.function), tiles)
    some, every = np.broadcast_to(result.hi, np.broadcast_shapes(m.shape, n.shape)), np.asarray(result.lo)
    return np.where(some, np.where(every, FULL, PARTIAL), NONE).astype(np.int8)


class _Bits:
    """The contents of partly visible tiles, each once."""

    def __init__(self, shape: Shape):
        self.shape = shape
        every = np.ones((shape.block_q, shape.block_k), bool)
        self._found, self._number = [every], {np.packbits(every).tobytes(): 0}

    def number(self, tile: np.ndarray) -> int:
        key = np.packbits(tile).tobytes()
        if key not in self._number:
            self._number[key] = len(self._found)
            self._found.append(tile)
        return self._number[key]

    def all(self) -> np.ndarray:
        return np.stack(self._found)


def _looked_at(pattern: Pattern, shape: Shape, head: int, kinds: np.ndarray, found: _Bits) -> Kinds:
    """The kinds of all tiles, after a look at those that bounds leave open, and numbers of the contents of partly visible ones."""
    ragged = shape.keys % shape.block_k
    if ragged and shape.keys:
        # Keys past the end are hidden, but no mask hides them from a whole tile.
        kinds[:, -1] = np.where(kinds[:, -1] == FULL, PARTIAL, kinds[:, -1])
    m, n = np.nonzero(kinds == PARTIAL)
    if not len(m):
        return Kinds(kinds, np.zeros(0, np.int32))
    first, same = _alike(pattern, shape, head, m, n)
    numbers, of_kind = np.zeros(len(first), np.int32), np.zeros(len(first), np.int8)
    for at, tiles in _contents(pattern, shape, head, m[first], n[first]):
        some, every = tiles.any((1, 2)), tiles.all((1, 2))
        of_kind[at : at + len(tiles)] = np.where(every, FULL, np.where(some, PARTIAL, NONE))
        for i in np.nonzero(some & ~every)[0]:
            numbers[at + i] = found.number(tiles[i])
    kinds[m, n] = of_kind[same]
    return Kinds(kinds, numbers[same][of_kind[same] == PARTIAL])


def _alike(
    pattern: Pattern, shape: Shape, head: int, m: np.ndarray, n: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The first of the tiles of each content, and for each tile which of those it equals, by what open conditions depend on."""
    q, k = _edges(shape, 0, m), _edges(shape, 1, n)
    tiles = Tiles((q[0] + pattern.offset, q[1] + pattern.offset), k, head)
    result, conditions = bounds_of(traced_once(pattern.function), tiles)
    # The last tiles of an axis may be shorter.
    columns = [(q[1] - q[0] + 1) * (shape.block_k + 1) + (k[1] - k[0] + 1)]
    forms = sorted(result.forms.union(*(c.forms for c in conditions)))
    for a, b in forms:
        open_here = np.zeros(len(m), bool)
        for condition in conditions:
            if (a, b) in condition.forms:
                open_here |= condition.where
        if not conditions or result.forms - frozenset().union(*(c.forms for c in conditions)):
            open_here[:] = True
        corner = a * tiles.q[0] + b * k[0]
        columns.append(np.where(open_here, corner, np.iinfo(np.int64).max))
    columns += [np.broadcast_to(np.where(c.where, 2, c.lo), m.shape).astype(np.int64) for c in conditions]
    number = np.zeros(len(m), np.int64)
    for column in columns:
        if (column == column[0]).all():
            continue
        _, inverse = np.unique(column, return_inverse=True)
        _, number = np.unique(number * (int(inverse.max()) + 1) + inverse, return_inverse=True)
    return np.unique(number, return_index=True)[1], number


def _contents(
    pattern: Pattern, shape: Shape, head: int, m: np.ndarray, n: np.ndarray
) -> Iterator[tuple[int, np.ndarray]]:
    """Every pair of some tiles, `[tiles, block_q, block_k]`, and the number of the first of them. Queries past the end are like the last
    one, and keys past it hidden."""
    area = shape.block_q * shape.block_k
    step = max(1, _MOST_PAIRS // area)
    for at in range(0, len(m), step):
        q = m[at : at + step, None, None] * shape.block_q + np.arange(shape.block_q)[:, None]
        k = n[at : at + step, None, None] * shape.block_k + np.arange(shape.block_k)
        past = k >= shape.keys
        q, k = np.minimum(q, shape.queries - 1) + pattern.offset, np.minimum(k, shape.keys - 1)
        q, k = q.astype(np.int32), k.astype(np.int32)
        result, _ = bounds_of(traced_once(pattern.function), Tiles((q, q), (k, k), head))
        full = (len(q), shape.block_q, shape.block_k)
        if result.exact:
            seen = np.broadcast_to(np.asarray(result.lo, bool), full)
        else:
            seen = _by_jax(pattern, head, q, k)
        yield at, seen & ~past


def _by_jax(pattern: Pattern, head: int, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """For functions with operations that `ranges` does not know."""
    import jax

    with jax.ensure_compile_time_eval():
        heads = jnp.full(1, head, jnp.int32)
        wide = lambda x: jnp.asarray(x, jnp.int32)
        of_tile = lambda q, k: evaluate(pattern.function, heads, q, k)[0]
        return np.asarray(jax.jit(jax.vmap(of_tile))(wide(q[:, :, 0]), wide(k[:, 0])))


def _blind(row: Kinds, bits: np.ndarray, shape: Shape) -> bool:
    """Whether a query sees no key, or a key is seen by no query."""
    m, n = np.nonzero(row.kinds == PARTIAL)
    for axis, length, block, tile in (
        (1, shape.queries, shape.block_q, m),
        (0, shape.keys, shape.block_k, n),
    ):
        sees: np.ndarray = np.repeat((row.kinds == FULL).any(axis), block).reshape(-1, block)
        # Of partly visible tiles, which queries or keys see anything; the contents are few.
        some = np.asarray(bits.any(2 if axis else 1))
        open_tiles = ~sees[tile, 0]
        np.logical_or.at(sees, tile[open_tiles], some[row.patterns[open_tiles]])
        if not sees.reshape(-1)[:length].all():
            return True
    return False


class PatternLists(NamedTuple):
    """The lists of a pattern for a kernel with `M` tiles of its own. Entries of one list are contiguous."""

    heads: np.ndarray  # int32 [heads or 1]: which row of lists a head reads
    tiles: np.ndarray  # int32 [rows, M, 4]: a list's first entry, its first partly visible one, its end, and how far patterns are from entries
    order: np.ndarray  # int32 [M]: the tiles by length of their lists, longest first
    entries: np.ndarray  # uint16 or, with many tiles, int32 [entries + 1]: listed tiles
    patterns: np.ndarray  # int32: of every entry of a partly visible tile, which bits
    bits: np.ndarray | None  # int32 [patterns, rows of a tile, words]
    blind: bool
    """Whether a query may see no key, or a key be seen by no query."""

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self if isinstance(x, np.ndarray))


@functools.lru_cache(maxsize=32)
def lists_of(pattern: Pattern, shape: Shape) -> PatternLists:
    """The lists of a pattern that nothing else hides."""
    known = classify(pattern, shape._replace(by_key=False))
    tiles, entries, patterns, first, before = [], [], [], 0, 0
    for row in known.rows:
        kinds, partial = row.kinds, row.patterns
        if shape.by_key:
            partial = partial[np.lexsort(np.nonzero(kinds == PARTIAL))]  # in the order of key tiles
            kinds = np.ascontiguousarray(kinds.T)
        bounds, listed = _entries(kinds)
        # Patterns of a list follow those of the lists before it.
        counts = bounds[:, 2] - bounds[:, 1]
        away = before + np.cumsum(counts) - counts - bounds[:, 1]
        tiles.append(np.concatenate([bounds + first, (away - first)[:, None]], axis=1).astype(np.int32))
        entries.append(listed)
        patterns.append(partial)
        first, before = first + len(listed), before + len(partial)
    stacked = np.stack(tiles)
    # One more entry, which the kernels read ahead.
    end = np.zeros(1, entries[0].dtype)
    return PatternLists(
        known.heads,
        stacked,
        _longest_first((stacked[..., 2] - stacked[..., 0]).sum(0)),
        np.concatenate([*entries, end]),
        np.concatenate([*patterns, np.zeros(1, np.int32)]),
        packed_bits(known.bits, shape.by_key) if len(known.bits) > 1 else None,
        known.blind,
    )


def _longest_first(lengths: np.ndarray) -> np.ndarray:
    """Of equal lengths the last first, as causal masks have the most keys there."""
    return np.lexsort((-np.arange(len(lengths)), -lengths)).astype(np.int32)


@functools.lru_cache(maxsize=32)
def grids_of(pattern: Pattern, shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For a pattern that data is combined with: the row of each head, kinds and bits of all tiles `[rows, query tiles, key tiles]`, and the
    bits."""
    known = classify(pattern, shape._replace(by_key=False))
    numbers = np.zeros((len(known.rows), *shape.grid), np.int32)
    for number, row in zip(numbers, known.rows, strict=True):
        number[row.kinds == PARTIAL] = row.patterns
    return (
        known.heads,
        np.stack([row.kinds for row in known.rows]),
        numbers,
        packed_bits(known.bits, shape.by_key),
    )


def _entries(kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lists of one row: bounds `[M, 3]`, and entries in order."""
    counts = [(kinds == kind).sum(1) for kind in (FULL, PARTIAL)]
    ends = np.cumsum(counts[0] + counts[1])
    begin = ends - counts[0] - counts[1]
    bounds = np.stack([begin, begin + counts[0], ends], 1)
    listed = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint16 if kinds.shape[1] < 2**16 else np.int32)
    for kind, count, start in ((FULL, counts[0], bounds[:, 0]), (PARTIAL, counts[1], bounds[:, 1])):
        m, n = np.nonzero(kinds == kind)
        listed[np.arange(len(m)) - (np.cumsum(count) - count)[m] + start[m]] = n
    return bounds, listed


def packed_bits(bits: np.ndarray, by_key: bool) -> np.ndarray:
    """int32 `[patterns, rows, words]` of tiles `[patterns, block_q, block_k]`; `by_key`, keys are the rows."""
    bits = bits.swapaxes(1, 2) if by_key else bits
    padded = np.pad(bits, ((0, 0), (0, 0), (0, -bits.shape[2] % _WORD)))
    return np.packbits(padded, axis=2, bitorder="little").view("<i4").astype(np.int32)
