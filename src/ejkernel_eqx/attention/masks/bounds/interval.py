"""`Bounds`: the least and the greatest number of a value on each tile."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .tiles import Form, Tiles

LEAST, MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max
Coefficients = tuple[int, int, int]


class Bounds(NamedTuple):
    """The least and the greatest value on each tile, equal objects if known exactly."""

    lo: Any
    hi: Any
    forms: frozenset[Form] = frozenset()
    linear: Coefficients | None = None
    """Coefficients of query and key, and a constant, if the value is such a sum."""
    along: Form | None = None
    """The form that the numbers run along; `None` if there is one for each tile, or one for all."""

    @property
    def exact(self) -> bool:
        return self.lo is self.hi

    def spread(self, tiles: Tiles) -> "Bounds":
        """Spreads the numbers over all tiles, so that they broadcast."""
        if self.along is None:
            return self
        lo = tiles.spread(self.along, self.lo)
        return self._replace(lo=lo, hi=lo if self.exact else tiles.spread(self.along, self.hi), along=None)


def linear(tiles: Tiles, q: int, k: int, constant: int) -> Bounds:
    """`q * query + k * key + constant`, of 32 bits."""
    q, k, constant = ((x - LEAST) % 2**32 + LEAST for x in (q, k, constant))
    if q == k == 0:
        return Bounds(constant, constant, linear=(0, 0, constant))
    along, low, high = tiles.along((q, k))
    exact = low is high
    low = low + constant
    return int32(low, low if exact else high + constant, frozenset([(q, k)]), (q, k, constant))._replace(
        along=along
    )


def constant(value: Any) -> Bounds:
    """A known number."""
    x = np.asarray(value)
    if x.ndim:
        return Bounds(x, x)
    number = x.item()
    whole = isinstance(number, int) and not isinstance(number, bool)
    return Bounds(number, number, linear=(0, 0, number) if whole else None)


def unbounded(aval: Any, forms: frozenset[Form]) -> Bounds:
    """Bounds of a value of which only the type is known."""
    if aval.dtype == np.bool_:
        return Bounds(False, True, forms)
    if is_int(aval):
        limits = np.iinfo(aval.dtype)
        return Bounds(int(limits.min), int(limits.max), forms)
    return Bounds(-math.inf, math.inf, forms)


def int32(lo: Any, hi: Any, forms: frozenset[Form], coefficients: Coefficients | None = None) -> Bounds:
    """Bounds of a 32-bit integer. An exact one wraps around as on a device; others are then unbounded."""
    if not (np.size(lo) and np.size(hi) and (np.min(lo) < LEAST or np.max(hi) > MOST)):
        return Bounds(lo, hi, forms, coefficients)
    if lo is hi:
        lo = np.asarray(lo).astype(np.int32).astype(np.int64)
        return Bounds(lo, lo, forms)
    wraps = (np.asarray(lo) < LEAST) | (np.asarray(hi) > MOST)
    return Bounds(np.where(wraps, LEAST, lo), np.where(wraps, MOST, hi), forms)


def forms_of(operands: Sequence[Bounds]) -> frozenset[Form]:
    return frozenset[Form]().union(*(x.forms for x in operands))


def is_int(aval: Any) -> bool:
    return np.issubdtype(aval.dtype, np.integer)
