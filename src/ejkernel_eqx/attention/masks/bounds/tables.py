"""`Table`: a known array that a mask function looks things up in."""

from typing import Any

import numpy as np

_Ends = tuple[Any, Any]


class Table:
    """A known array, and what has been found out about ranges of its entries."""

    def __init__(self, entries: np.ndarray):
        self.entries = entries
        self._runs: dict[tuple[int, ...], list[tuple[np.ndarray, np.ndarray]]] = {}
        self._sums: dict[tuple[int, ...], np.ndarray] = {}

    def extremes(self, lead: tuple[int, ...], lo: np.ndarray, hi: np.ndarray) -> _Ends:
        """The least and greatest of the entries `lo .. hi` of a line: of two overlapping runs whose length is a power of two."""
        line = self.entries[lead]
        runs = self._runs.setdefault(lead, [(line, line)])
        power = np.frexp((hi - lo + 1).astype(np.float64))[1] - 1
        for n in range(len(runs) - 1, int(power.max(initial=0))):
            (a, b), half = runs[-1], 1 << n
            runs.append((np.minimum(a[:-half], a[half:]), np.maximum(b[:-half], b[half:])))
        low, high = np.zeros(power.shape, line.dtype), np.zeros(power.shape, line.dtype)
        for n in range(len(runs)):
            at = power == n
            if at.any():
                (a, b), first, second = runs[n], lo[at], hi[at] + 1 - (1 << n)
                low[at], high[at] = np.minimum(a[first], a[second]), np.maximum(b[first], b[second])
        return low, high

    def any_and_all(self, lead: tuple[int, ...], rows: _Ends, columns: _Ends) -> _Ends:
        """Tells whether any and whether all of the entries of rectangles are true, given the first and last row and column of each."""
        (top, bottom), (left, right) = (tuple(np.asarray(x) for x in ends) for ends in (rows, columns))
        grid = top.ndim == left.ndim == 2 and top.shape[1] == left.shape[0] == 1
        if (top == bottom).all() and (left == right).all():
            entries = self.entries[lead]
            one = entries[top[:, 0]][:, left[0]] if grid else entries[top, left]
            return one, one
        sums = self._summed(lead)
        if grid:  # of each of some ranges of rows with each of some ranges of columns
            lines = sums[bottom[:, 0] + 1] - sums[top[:, 0]]
            count = lines[:, right[0] + 1] - lines[:, left[0]]
        else:
            at = lambda row, column: sums[row, column]
            count = at(bottom + 1, right + 1) - at(top, right + 1) - at(bottom + 1, left) + at(top, left)
        area = (bottom + 1 - top).astype(np.int32) * (right + 1 - left).astype(np.int32)
        return count > 0, count == area

    def _summed(self, lead: tuple[int, ...]) -> np.ndarray:
        """The number of true entries in all rectangles that begin at the first entry."""
        if lead not in self._sums:
            entries = self.entries[lead]
            sums = np.zeros((entries.shape[0] + 1, entries.shape[1] + 1), np.int32)
            np.cumsum(entries, 0, np.int32, sums[1:, 1:])
            self._sums[lead] = np.cumsum(sums, 1, np.int32)
        return self._sums[lead]
