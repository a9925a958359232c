"""Tiles of pairs of query and key, and numbers along a form of them (`README.md`, "Forms")."""

import dataclasses
import math
from typing import Any

import numpy as np

Form = tuple[int, int]
"""Coefficients of query and key: values computed from forms alone are equal on two tiles whose corners give equal forms."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tiles:
    """First and last queries `[..., M, 1]` and keys `[..., 1, N]` of tiles, in int64; `head` is one number.

    `steps`: how far each tile begins after the one before it, if that is always the same; a last tile may end earlier.
    `picked`: the numbers `([n], [n])` of the tiles that count, if not all do.

    Numbers along a form are `[..., M, 1]` for queries, `[..., 1, N]` for keys, and else `[..., L]`, one for each different corner.
    """

    q: tuple[np.ndarray, np.ndarray]
    k: tuple[np.ndarray, np.ndarray]
    head: int = 0
    steps: tuple[int, int] | None = None
    picked: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def points(self) -> bool:
        """Tells whether each tile is a single pair."""
        return self.q[0] is self.q[1] and self.k[0] is self.k[1]

    @property
    def size(self) -> tuple[int, int]:
        """The number of query tiles and of key tiles."""
        return self.q[0].shape[-2], self.k[0].shape[-1]

    def strides(self, form: Form) -> tuple[int, int, int, int] | None:
        """The greatest common step along a form of both, the number of those steps from one query tile and from one key tile to the next, and
        the number of the first tile's corner. `None` if the corners are (almost) all different."""
        if self.steps is None:
            return None
        q, k = form[0] * self.steps[0], form[1] * self.steps[1]
        common = math.gcd(q, k)
        q, k = q // common, k // common
        rows, columns = self.size
        length = abs(q) * (rows - 1) + abs(k) * (columns - 1) + 1
        if not (rows and columns and 2 * length <= max(rows * columns, 2**10)):
            return None
        return common, q, k, -min(q * (rows - 1), 0) - min(k * (columns - 1), 0)

    def along(self, form: Form) -> tuple[Form | None, np.ndarray, np.ndarray]:
        """The least and the greatest value of a form on each tile, and the form that the numbers run along; `None`: one for each tile."""
        sides = [
            (c, side if c > 0 else side[::-1]) for c, side in zip(form, (self.q, self.k), strict=True) if c
        ]
        lows, highs = ([c * side[end] for c, side in sides] for end in (0, 1))
        common = math.gcd(*form)
        same = form[0] // common, form[1] // common  # its multiples have numbers at the same places
        if len(sides) == 1:
            return (abs(same[0]), abs(same[1])), lows[0], lows[0] if self.points else highs[0]
        strides = self.strides(form)
        if strides is None:
            low, high = lows[0] + lows[1], highs[0] + highs[1]
            if self.picked is not None:
                low, high = low[self.picked], high[self.picked]
            return None, low, low if self.points else high
        step, q, k, first = strides
        rows, columns = self.size
        count = abs(q) * (rows - 1) + abs(k) * (columns - 1) + 1
        corner = sum(c * side[0][..., 0, 0] for c, side in zip(form, (self.q, self.k), strict=True))
        low = np.asarray(corner)[..., None] + step * (np.arange(count) - first)
        if self.points:
            return same, low, low
        # Those of the first tile, which no other exceeds.
        extents = [
            c * int((side[1] - side[0]).flat[0]) for c, side in zip(form, (self.q, self.k), strict=True)
        ]
        return same, low + sum(min(x, 0) for x in extents), low + sum(max(x, 0) for x in extents)

    def spread(self, form: Form, x: Any) -> Any:
        """Numbers along a form, as numbers that broadcast with those of all tiles or of the picked ones; all tiles are a view."""
        if np.ndim(x) == 0:
            return x
        if 0 in form:
            if self.picked is None:
                return x
            return x[self.picked[0], 0] if form[0] else x[0, self.picked[1]]
        strides = self.strides(form)
        assert strides is not None
        _, q, k, first = strides
        if self.picked is not None:
            return x[first + q * self.picked[0] + k * self.picked[1]]
        shape, step = (*x.shape[:-1], *self.size), x.strides[-1]
        apart = (*x.strides[:-1], q * step, k * step)
        return np.lib.stride_tricks.as_strided(x[..., first:], shape, apart, writeable=False)
