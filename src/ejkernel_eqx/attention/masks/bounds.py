"""What a rule of `bound_rules` takes and gives: the least and greatest number of a value on each tile.

The value of a function is known on each tile by interval arithmetic, so a comparison that holds for all or for no pair of a tile is decided
without looking at the pairs. Values of one form alone are kept along it (`tiles`). With single pairs for tiles the bounds are the values.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .tiles import Form, Tiles

LEAST, MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max


class Bounds(NamedTuple):
    """The least and the greatest value on each tile, equal objects if known exactly."""

    lo: Any
    hi: Any
    forms: frozenset[Form] = frozenset()
    linear: tuple[int, int, int] | None = None
    """Coefficients of query and key, and a constant, if the value is such a sum."""
    along: Form | None = None
    """The form that the numbers run along; `None` if there is one for each tile, or one for all."""

    @property
    def exact(self) -> bool:
        return self.lo is self.hi

    def spread(self, tiles: Tiles) -> "Bounds":
        """With numbers that broadcast with those of all tiles."""
        if self.along is None:
            return self
        lo = tiles.spread(self.along, self.lo)
        return self._replace(lo=lo, hi=lo if self.exact else tiles.spread(self.along, self.hi), along=None)


Rule = Callable[[Tiles, list[Bounds], dict[str, Any], Any], Bounds | None]
"""From the tiles, the operands, the parameters of the operation and the type of its result; `None` if nothing is known."""


def linear(tiles: Tiles, q: int, k: int, constant: int) -> Bounds:
    """`q * query + k * key + constant`, of 32 bits."""
    q, k, constant = ((x - LEAST) % 2**32 + LEAST for x in (q, k, constant))
    if q == k == 0:
        return Bounds(constant, constant, linear=(0, 0, constant))
    form = (q, k)
    along, low, high = tiles.along(form)
    forms, coefficients = frozenset([form]), (q, k, constant)
    if low is high:
        low = low + constant
        if low.size and (low.min() < LEAST or low.max() > MOST):
            low, coefficients = wrapped(low), None
        return Bounds(low, low, forms, coefficients, along)
    return in_range(low + constant, high + constant, forms, coefficients)._replace(along=along)


def constant(value: Any) -> Bounds:
    """A known number."""
    x = np.asarray(value)
    if x.ndim:
        return Bounds(x, x)
    number = x.item()
    whole = isinstance(number, int) and not isinstance(number, bool)
    return Bounds(number, number, linear=(0, 0, number) if whole else None)


def unbounded(aval: Any, forms: frozenset[Form]) -> Bounds:
    if aval.dtype == np.bool_:
        return Bounds(False, True, forms)
    if is_int(aval):
        limits = np.iinfo(aval.dtype)
        return Bounds(int(limits.min), int(limits.max), forms)
    return Bounds(-math.inf, math.inf, forms)


def in_range(
    lo: Any, hi: Any, forms: frozenset[Form], coefficients: tuple[int, int, int] | None = None
) -> Bounds:
    """Bounds of a 32-bit integer; what may wrap around is unbounded."""
    if np.size(lo) and np.size(hi) and (np.min(lo) < LEAST or np.max(hi) > MOST):
        wraps = (np.asarray(lo) < LEAST) | (np.asarray(hi) > MOST)
        return Bounds(np.where(wraps, LEAST, lo), np.where(wraps, MOST, hi), forms)
    return Bounds(lo, hi, forms, coefficients)


def wrapped(x: Any) -> Any:
    """32-bit integers as a device computes them."""
    return np.asarray(x).astype(np.int32).astype(np.int64)


def forms_of(given: Sequence[Bounds]) -> frozenset[Form]:
    return frozenset[Form]().union(*(x.forms for x in given))


def is_int(aval: Any) -> bool:
    return np.issubdtype(aval.dtype, np.integer)
