"""Defines which tiles of scores each device computes in which step, decided while tracing from positions alone.

In a step of shift `d`, device `r` has the keys of device `(r - d) mod n`. A device's tokens are one chunk of consecutive positions, or two in
zigzag order. A piece is a call of a kernel for some of its queries and keys.
"""

import functools
import itertools
from typing import NamedTuple

from .spec import CHUNKS, Order, Reach

MOST_BRANCHES = 3
"""With more different pieces than this in the steps of one loop, they take positions from arrays instead."""


class Piece(NamedTuple):
    """Queries `start .. start + size` by keys likewise, counted in the device's own order, and the window between them: that of
    `AttentionSpec`, or `None` if positions are read from arrays."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    window: Reach | None


Pieces = tuple[Piece, ...]


class Run(NamedTuple):
    """Steps one after another that differ in their shift only: they are a loop.

    `came`: how many places keys have moved before each step. `following`: how many they move while it computes. `branches`: what a device may have
    to compute, and `table[step][device]` which of these it does.
    """

    shifts: tuple[int, ...]
    came: int
    following: int
    branches: tuple[Pieces, ...]
    table: tuple[tuple[int, ...], ...]


class Sizes(NamedTuple):
    """The tokens of one device, and how many chunks of consecutive positions they are."""

    devices: int
    queries: int
    keys: int
    order: Order

    @property
    def chunks(self) -> int:
        return CHUNKS[self.order]

    def starts(self, device: int, length: int) -> tuple[int, ...]:
        """The first position of each chunk of a device."""
        if self.order == "contiguous":
            return (device * length,)
        half = length // 2
        return device * half, (2 * self.devices - 1 - device) * half


@functools.lru_cache(maxsize=256)
def runs(
    sizes: Sizes, reach: Reach, fixed: bool, positional: bool, backward: bool = False
) -> tuple[Run, ...]:
    """The steps that see anything, in order: the device's own keys first. `fixed`: the window is all that there is to the mask besides segments
    and arrays over scores; else positions are read from arrays. `positional`: scores depend on positions, too.

    The backward goes the other way round: else a compiler could keep what arrives in the forward, all keys on every device, and not send it
    again.
    """
    n = sizes.devices
    steps = [[_pieces(sizes, reach, r, (r - shift) % n, positional) for r in range(n)] for shift in range(n)]
    shifts = [shift for shift in range(n) if any(steps[shift])]
    if backward:
        shifts = shifts[:1] + shifts[:0:-1]
    moves = [later - before for before, later in itertools.pairwise([0, *shifts, *shifts[-1:]])]
    alike = itertools.groupby(range(len(shifts)), lambda step: (step == 0, moves[step], moves[step + 1]))
    groups = [(key, [shifts[step] for step in group]) for key, group in alike]
    return tuple(
        _run(sizes, tuple(own), came, following, [steps[shift] for shift in own], fixed)
        for (_, came, following), own in groups
    )


def _run(
    sizes: Sizes, shifts: tuple[int, ...], came: int, following: int, steps: list[list[Pieces]], fixed: bool
) -> Run:
    if not fixed or len({pieces for by_device in steps for pieces in by_device if pieces}) > MOST_BRANCHES:
        steps = [[_from_arrays(sizes, pieces) for pieces in by_device] for by_device in steps]
    branches = tuple(dict.fromkeys(pieces for by_device in steps for pieces in by_device))
    table = tuple(tuple(branches.index(pieces) for pieces in by_device) for by_device in steps)
    return Run(shifts, came, following, branches, table)


def _pieces(sizes: Sizes, reach: Reach, ours: int, theirs: int, positional: bool) -> Pieces:
    """Returns what the queries of one device see of the keys of another."""
    rows, columns = sizes.queries // sizes.chunks, sizes.keys // sizes.chunks
    left, right, offset = reach
    windows: dict[tuple[int, int], Reach] = {}
    for i, first in enumerate(sizes.starts(ours, sizes.queries)):
        for j, key in enumerate(sizes.starts(theirs, sizes.keys)):
            at = first + offset - key  # of the first query, counted from the first key
            if (left is not None and at - left >= columns) or (
                right is not None and at + rows - 1 + right < 0
            ):
                continue
            whole_left = left is None or at + rows - 1 - left <= 0
            whole_right = right is None or at + right >= columns - 1
            sides = (None if whole_left else left, None if whole_right else right)
            windows[i, j] = (*sides, at if positional or sides != (None, None) else 0)
    return _joined(sizes, windows, positional)


def _joined(sizes: Sizes, windows: dict[tuple[int, int], Reach], positional: bool) -> Pieces:
    """Chunks with nothing to tell them apart in one call."""
    rows, columns = sizes.queries // sizes.chunks, sizes.keys // sizes.chunks
    whole, causal = (None, None, 0), (None, 0, 0)
    if windows and not positional:
        ours, theirs = (sorted({pair[side] for pair in windows}) for side in (0, 1))
        if windows == {(i, j): whole for i in ours for j in theirs}:
            queries, keys = (ours[0] * rows, len(ours) * rows), (theirs[0] * columns, len(theirs) * columns)
            return (Piece(queries, keys, whole),)
        if rows == columns and windows == {(0, 0): causal, (1, 0): whole, (1, 1): causal}:
            return (Piece((0, sizes.queries), (0, sizes.keys), causal),)
    return tuple(
        Piece((i * rows, rows), (j * columns, columns), window) for (i, j), window in windows.items()
    )


def _from_arrays(sizes: Sizes, pieces: Pieces) -> Pieces:
    """The chunks of keys that any piece reads, for all queries."""
    columns = sizes.keys // sizes.chunks
    read = {start // columns for piece in pieces for start in range(piece.keys[0], sum(piece.keys), columns)}
    return tuple(Piece((0, sizes.queries), (j * columns, columns), None) for j in sorted(read))
