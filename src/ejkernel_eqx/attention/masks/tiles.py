"""Tiles of pairs of query and key, and numbers along them: of a function of `a * query + b * key` alone there are about as many different
ones as query and key tiles together, not as many as tiles."""

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
    `picked`: of all tiles, only those with these numbers `([n], [n])`.

    Numbers along a form are `[..., M, 1]` for queries, `[..., 1, N]` for keys, and else `[..., L]`, one for each different corner.
    """

    q: tuple[np.ndarray, np.ndarray]
    k: tuple[np.ndarray, np.ndarray]
    head: int = 0
    steps: tuple[int, int] | None = None
    picked: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def points(self) -> bool:
        """Whether each tile is a single pair."""
        return self.q[0] is self.q[1] and self.k[0] is self.k[1]

    def strides(self, form: Form) -> tuple[int, int, int] | None:
        """Along a form of both: the greatest common step, and by how many of those it changes from one query and one key tile to the next.
        `None` if the corners are (almost) all different."""
        if self.steps is None:
            return None
        q, k = form[0] * self.steps[0], form[1] * self.steps[1]
        common = math.gcd(q, k)
        q, k = q // common, k // common
        rows, columns = self.q[0].shape[-2], self.k[0].shape[-1]
        length = abs(q) * (rows - 1) + abs(k) * (columns - 1) + 1
        return (common, q, k) if rows and columns and 2 * length <= max(rows * columns, 2**10) else None

    def along(self, form: Form) -> tuple[Form | None, np.ndarray, np.ndarray]:
        """The least and the greatest value of a form on each tile, and along which form the numbers are; `None`: one for each tile."""
        shortest = math.gcd(*form)
        same = form[0] // shortest, form[1] // shortest  # its multiples have numbers at the same places
        ends = [(c, side) for c, side in zip(form, (self.q, self.k), strict=True) if c]
        if len(ends) == 1:
            ((c, side),) = ends
            low = c * side[0 if c > 0 else 1]
            return (abs(same[0]), abs(same[1])), low, low if self.points else c * side[1 if c > 0 else 0]
        strides = self.strides(form)
        if strides is None:
            of_q, of_k = ends
            low, high = (
                np.add(*(c * side[end if c > 0 else 1 - end] for c, side in (of_q, of_k))) for end in (0, 1)
            )
            if self.picked is not None:
                m, n = self.picked
                low, high = low[m, n], high[m, n]
            return None, low, low if self.points else high
        common, q, k = strides
        rows, columns = self.q[0].shape[-2], self.k[0].shape[-1]
        first = min(q * (rows - 1), 0) + min(k * (columns - 1), 0)
        steps = common * np.arange(first, first + abs(q) * (rows - 1) + abs(k) * (columns - 1) + 1)
        corner = sum(c * side[0][..., 0, 0] for c, side in ends)
        low = np.asarray(corner)[..., None] + steps
        if self.points:
            return same, low, low
        # Those of the first tile, which no other exceeds.
        extents = [c * int((side[1] - side[0]).flat[0]) for c, side in ends]
        return same, low + sum(x for x in extents if x < 0), low + sum(x for x in extents if x > 0)

    def spread(self, form: Form, x: Any) -> Any:
        """Numbers along a form as such that broadcast with those of all tiles, or those of the picked ones; without a copy if of all."""
        if np.ndim(x) == 0:
            return x
        if 0 in form:
            if self.picked is None:
                return x
            return x[self.picked[0], 0] if form[0] else x[0, self.picked[1]]
        strides = self.strides(form)
        assert strides is not None
        _, q, k = strides
        rows, columns = self.q[0].shape[-2], self.k[0].shape[-1]
        corner = -min(q * (rows - 1), 0) - min(k * (columns - 1), 0)
        if self.picked is not None:
            return x[corner + q * self.picked[0] + k * self.picked[1]]
        step = x.strides[-1]
        return np.lib.stride_tricks.as_strided(
            x[..., corner:],
            (*x.shape[:-1], rows, columns),
            (*x.strides[:-1], q * step, k * step),
            writeable=False,
        )
