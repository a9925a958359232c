"""Interval arithmetic: the rule of each of JAX's operations that has one, by name (`README.md`, "Rules")."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .interval import Bounds, constant, forms_of, int32, is_int, LEAST, linear, MOST
from .tables import Table
from .tiles import Tiles

Ends = tuple[Any, Any]


class Call(NamedTuple):
    """One operation on tiles: its operands, its parameters and the type of its result."""

    tiles: Tiles
    operands: list[Bounds]
    parameters: dict[str, Any]
    out: Any

    def result(self, lo: Any, hi: Any) -> Bounds:
        forms = forms_of(self.operands)
        return int32(lo, hi, forms) if is_int(self.out) else Bounds(lo, hi, forms)


Rule = Callable[[Call], Bounds | None]
"""The bounds of a result; `None` if nothing is known."""


def _rule(function: Callable[..., Any], ends: Callable[..., Ends] | None = None) -> Rule:
    """A rule from the function of exact operands, and from the ends of the results of others; without `ends`, those are unknown."""

    def rule(call: Call) -> Bounds | None:
        if all(x.exact for x in call.operands):
            value = function(*(x.lo for x in call.operands))
            return call.result(value, value)
        return call.result(*ends(*call.operands)) if ends else None

    return rule


def _monotone(function: Callable[..., Any], *rising: bool) -> Rule:
    """A rule of a function that rises or falls in each operand."""

    def ends(*operands: Bounds) -> Ends:
        low = [x.lo if up else x.hi for x, up in zip(operands, rising, strict=True)]
        high = [x.hi if up else x.lo for x, up in zip(operands, rising, strict=True)]
        return function(*low), function(*high)

    return _rule(function, ends)


def _by_type(boolean: Rule, integer: Rule) -> Rule:
    return lambda call: (boolean if call.out.dtype == np.bool_ else integer)(call)


def _mul(call: Call) -> Bounds | None:
    a, b = call.operands
    if a.linear and b.linear and is_int(call.out):
        for x, y in ((a.linear, b.linear), (b.linear, a.linear)):
            if x[:2] == (0, 0):
                return linear(call.tiles, *(x[2] * c for c in y))
    return _rule(np.multiply, _corners)(call)


def _corners(a: Bounds, b: Bounds) -> Ends:
    corners = [np.multiply(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    return functools.reduce(np.minimum, corners), functools.reduce(np.maximum, corners)


def _square(call: Call) -> Bounds | None:
    return _mul(call._replace(operands=call.operands * 2)) if call.parameters.get("y", 2) == 2 else None


def _abs_ends(a: Bounds) -> Ends:
    low, high = np.abs(a.lo), np.abs(a.hi)
    crosses = (np.asarray(a.lo) <= 0) & (np.asarray(a.hi) >= 0)
    return np.where(crosses, 0, np.minimum(low, high)), np.maximum(low, high)


def _by_constant(make: Callable[[int], Rule]) -> Rule:
    """A rule of the division of integers by one number other than 0."""

    def rule(call: Call) -> Bounds | None:
        a, d = call.operands
        if not (is_int(call.out) and d.exact and np.ndim(d.lo) == 0 and d.lo != 0):
            return None
        return make(int(d.lo))(call._replace(operands=[a]))

    return rule


def _quotient(d: int) -> Rule:
    def truncated(x: Any) -> Any:
        quotient = np.abs(x) // abs(d)
        return np.where((np.asarray(x) < 0) != (d < 0), -quotient, quotient)

    return _monotone(truncated, d > 0)


def _remainder(d: int) -> Rule:
    d = abs(d)

    def ends(a: Bounds) -> Ends:
        lo, hi = np.fmod(a.lo, d), np.fmod(a.hi, d)
        low, high = np.asarray(a.lo), np.asarray(a.hi)
        # One period, on one side of 0.
        within = (high - low < d) & (lo <= hi) & ((low >= 0) | (high <= 0))
        least = np.where(low >= 0, 0, np.maximum(low, 1 - d))
        most = np.where(high <= 0, 0, np.minimum(high, d - 1))
        return np.where(within, lo, least), np.where(within, hi, most)

    return _rule(lambda x: np.fmod(x, d), ends)


def _equal_ends(a: Bounds, b: Bounds) -> Ends:
    overlap = np.less_equal(a.lo, b.hi) & np.less_equal(b.lo, a.hi)
    return np.equal(a.lo, b.hi) & np.equal(a.hi, b.lo) & overlap, overlap


def _different_ends(a: Bounds, b: Bounds) -> Ends:
    lo, hi = _equal_ends(a, b)
    return np.logical_not(hi), np.logical_not(lo)


def _narrow(x: Any) -> Any:
    """Integers that fit 32 bits as such, of which more are compared at once."""
    wide = isinstance(x, np.ndarray) and x.dtype == np.int64 and x.size > 0
    return x.astype(np.int32) if wide and LEAST <= x.min() and x.max() <= MOST else x


_EQUAL = _rule(lambda a, b: np.equal(_narrow(a), _narrow(b)), _equal_ends)
_DIFFERENT = _rule(lambda a, b: np.not_equal(_narrow(a), _narrow(b)), _different_ends)


def _select(call: Call) -> Bounds | None:
    if len(call.operands) != 3:
        return None
    which, a, b = call.operands
    for always, case in ((False, a), (True, b)):
        if np.all(which.lo == always) and np.all(which.hi == always):
            return case
    return _CASES(call)


def _case_ends(which: Bounds, a: Bounds, b: Bounds) -> Ends:
    lo = np.where(which.lo, b.lo, np.where(which.hi, np.minimum(a.lo, b.lo), a.lo))
    return lo, np.where(which.lo, b.hi, np.where(which.hi, np.maximum(a.hi, b.hi), a.hi))


_CASES = _rule(lambda which, a, b: np.where(which, b, a), _case_ends)


def _convert(call: Call) -> Bounds | None:
    (a,), out = call.operands, call.out
    numbers = np.asarray(a.lo).dtype
    if out.dtype == np.bool_:
        return a if numbers == np.bool_ else _DIFFERENT(call._replace(operands=[a, constant(0)]))
    if numbers == np.bool_:
        lo = np.asarray(a.lo).astype(np.int64)
        return Bounds(lo, lo if a.exact else np.asarray(a.hi).astype(np.int64), a.forms)
    # A wider type changes nothing, and neither does a float that holds every int32.
    if out.dtype in (np.int32, np.int64, np.float64) and np.issubdtype(numbers, np.integer):
        if out.dtype == np.int32 and not a.linear:
            return call.result(a.lo, a.hi)
        return a if is_int(out) else a._replace(linear=None)
    return None


def _lookup(call: Call) -> Bounds | None:
    """One element of an array that is known, at indices known by their bounds."""
    operand, *indices = call.operands
    table = Table(operand.lo) if isinstance(operand.lo, np.ndarray) else operand.lo
    if operand.forms or not isinstance(table, Table) or table.entries.ndim != len(indices):
        return None
    entries, forms = table.entries, forms_of(indices)
    clipped = [_clipped(i, size - 1) for i, size in zip(indices, entries.shape, strict=True)]
    widened = lambda x: x if x.dtype == np.bool_ else x.astype(np.int64 if is_int(call.out) else np.float64)
    if all(i.exact for i in clipped):
        value = widened(entries[tuple(np.asarray(i.lo) for i in clipped)])
        return Bounds(value, value, forms)
    fixed = [i.exact and np.ndim(i.lo) == 0 for i in clipped]
    lead = lambda axes: tuple(int(i.lo) for i in clipped[:-axes])
    if entries.dtype == np.bool_ and len(fixed) >= 2 and all(fixed[:-2]):
        some, every = table.any_and_all(lead(2), *((i.lo, i.hi) for i in clipped[-2:]))
        return Bounds(every, some, forms)
    if all(fixed[:-1]):
        low, high = table.extremes(lead(1), np.asarray(clipped[-1].lo), np.asarray(clipped[-1].hi))
        return Bounds(widened(low), widened(high), forms)
    return None


def _clipped(index: Bounds, most: int) -> Bounds:
    lo = np.clip(index.lo, 0, most)
    return Bounds(lo, lo if index.exact else np.clip(index.hi, 0, most), index.forms)


SUMS: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "add_any": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "neg": lambda a: -a,
}
"""Operations of sums of query and key that are the same operation of their coefficients."""

RULES: dict[str, Rule] = {
    "add": _monotone(np.add, True, True),
    "add_any": _monotone(np.add, True, True),
    "sub": _monotone(np.subtract, True, False),
    "mul": _mul,
    "neg": _monotone(np.negative, False),
    "max": _monotone(np.maximum, True, True),
    "min": _monotone(np.minimum, True, True),
    "abs": _rule(np.abs, _abs_ends),
    "sign": _monotone(np.sign, True),
    "div": _by_constant(_quotient),
    "rem": _by_constant(_remainder),
    "integer_pow": _square,
    "square": _square,
    "lt": _monotone(np.less, False, True),
    "le": _monotone(np.less_equal, False, True),
    "gt": _monotone(np.greater, True, False),
    "ge": _monotone(np.greater_equal, True, False),
    "eq": _EQUAL,
    "ne": _DIFFERENT,
    "and": _by_type(_monotone(np.logical_and, True, True), _rule(np.bitwise_and)),
    "or": _by_type(_monotone(np.logical_or, True, True), _rule(np.bitwise_or)),
    "xor": _by_type(_DIFFERENT, _rule(np.bitwise_xor)),
    "not": _by_type(_monotone(np.logical_not, False), _rule(np.bitwise_not)),
    "select_n": _select,
    "convert_element_type": _convert,
    "dynamic_slice": _lookup,
    **dict.fromkeys(
        ("squeeze", "reshape", "broadcast_in_dim", "copy", "stop_gradient", "copy_p", "expand_dims"),
        lambda call: call.operands[0],  # only the shape of one element changes
    ),
}
