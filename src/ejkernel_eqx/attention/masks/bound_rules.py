"""The operations of JAX whose bounds are known, by name."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .bounds import Bounds, constant, forms_of, in_range, is_int, LEAST, linear, MOST, Rule, wrapped
from .tables import Table
from .tiles import Tiles


def _finish(lo: Any, hi: Any, given: Sequence[Bounds], out: Any) -> Bounds:
    """The bounds of an arithmetic result. Exact 32-bit integers wrap around as they do on a device."""
    if lo is hi:
        lo = wrapped(lo) if is_int(out) else lo
        return Bounds(lo, lo, forms_of(given))
    return in_range(lo, hi, forms_of(given)) if is_int(out) else Bounds(lo, hi, forms_of(given))


def _sum(sign: int) -> Rule:
    def rule(tiles: Tiles, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds:
        a, b = given
        if a.linear and b.linear and is_int(out):
            return linear(tiles, *(x + sign * y for x, y in zip(a.linear, b.linear, strict=True)))
        if a.exact and b.exact:
            value = a.lo + sign * b.lo
            return _finish(value, value, given, out)
        lo, hi = (b.lo, b.hi) if sign > 0 else (b.hi, b.lo)
        return _finish(a.lo + sign * lo, a.hi + sign * hi, given, out)

    return rule


def _mul(tiles: Tiles, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds:
    a, b = given
    if a.linear and b.linear and is_int(out):
        for x, y in ((a.linear, b.linear), (b.linear, a.linear)):
            if x[:2] == (0, 0):
                return linear(tiles, *(x[2] * c for c in y))
    if a.exact and b.exact:
        value = np.multiply(a.lo, b.lo)
        return _finish(value, value, given, out)
    corners = [np.multiply(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    lo, hi = corners[0], corners[0]
    for x in corners[1:]:
        lo, hi = np.minimum(lo, x), np.maximum(hi, x)
    return _finish(lo, hi, given, out)


def _neg(tiles: Tiles, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds:
    (a,) = given
    if a.linear:
        return linear(tiles, *(-c for c in a.linear))
    lo = np.negative(a.hi)
    return _finish(lo, lo if a.exact else np.negative(a.lo), given, out)


def _rising(function: Callable[..., Any]) -> Rule:
    """Of a function that increases in every argument."""

    def rule(tiles: Tiles, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds:
        lo = function(*(x.lo for x in given))
        return Bounds(
            lo, lo if all(x.exact for x in given) else function(*(x.hi for x in given)), forms_of(given)
        )

    return rule


def _abs(tiles: Tiles, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds:
    (a,) = given
    if a.exact:
        value = np.abs(a.lo)
        return _finish(value, value, given, out)
    low, high = np.abs(a.lo), np.abs(a.hi)
    crosses = (np.asarray(a.lo) <= 0) & (np.asarray(a.hi) >= 0)
    return _finish(np.where(crosses, 0, np.minimum(low, high)), np.maximum(low, high), given, out)


def _truncated(x: Any, d: int) -> Any:
    quotient = np.abs(x) // abs(d)
    return np.where((np.asarray(x) < 0) != (d < 0), -quotient, quotient)


def _divisor(x: Bounds) -> int | None:
    """A divisor that is one number other than 0."""
    return int(x.lo) if x.exact and np.ndim(x.lo) == 0 and x.lo != 0 else None


def _div(tiles: Tiles, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
    a, d = given[0], _divisor(given[1])
    if not is_int(out) or d is None:
        return None
    lo = _truncated(a.lo, d)
    hi = lo if a.exact else _truncated(a.hi, d)
    return _finish(*((lo, hi) if d > 0 else (hi, lo)), [a], out)


def _rem(tiles: Tiles, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
    a, d = given[0], _divisor(given[1])
    if not is_int(out) or d is None:
        return None
    d = abs(d)
    lo = np.fmod(a.lo, d)
    if a.exact:
        return Bounds(lo, lo, a.forms)
    hi = np.fmod(a.hi, d)
    low, high = np.asarray(a.lo), np.asarray(a.hi)
    # One period, on one side of 0.
    within = (high - low < d) & (lo <= hi) & ((low >= 0) | (high <= 0))
    least = np.where(low >= 0, 0, np.maximum(low, 1 - d))
    most = np.where(high <= 0, 0, np.minimum(high, d - 1))
    return Bounds(np.where(within, lo, least), np.where(within, hi, most), a.forms)


def _compare(less: bool, strict: bool) -> Rule:
    def rule(tiles: Tiles, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds:
        a, b = given if less else given[::-1]
        compare = np.less if strict else np.less_equal
        lo = compare(a.hi, b.lo)
        hi = lo if a.exact and b.exact else compare(a.lo, b.hi)
        return Bounds(lo, hi, forms_of((a, b)))

    return rule


def _equal(tiles: Tiles, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds:
    a, b = given
    if a.exact and b.exact:
        value = np.equal(*(_narrow(x.lo) for x in given))
        return Bounds(value, value, forms_of((a, b)))
    overlap = np.less_equal(a.lo, b.hi) & np.less_equal(b.lo, a.hi)
    return Bounds(np.equal(a.lo, b.hi) & np.equal(a.hi, b.lo) & overlap, overlap, forms_of((a, b)))


def _narrow(x: Any) -> Any:
    """Integers that fit 32 bits as such, of which more are compared at once."""
    wide = isinstance(x, np.ndarray) and x.dtype == np.int64 and x.size > 0
    return x.astype(np.int32) if wide and LEAST <= x.min() and x.max() <= MOST else x


def _different(tiles: Tiles, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds:
    return _inverted(_equal(tiles, given, parameters, out))


def _inverted(a: Bounds) -> Bounds:
    lo = np.logical_not(a.hi)
    return Bounds(lo, lo if a.exact else np.logical_not(a.lo), a.forms)


def _not(tiles: Tiles, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
    return (
        _inverted(given[0])
        if out.dtype == np.bool_
        else _bitwise(np.bitwise_not)(tiles, given, parameters, out)
    )


def _bitwise(function: Callable[..., Any]) -> Rule:
    """Of integers, known of exact ones only."""

    def rule(tiles: Tiles, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
        if not all(x.exact for x in given):
            return None
        value = function(*(np.asarray(x.lo) for x in given))
        return _finish(value, value, given, out)

    return rule


def _logical(function: Callable[..., Any], bitwise: Callable[..., Any]) -> Rule:
    def rule(tiles: Tiles, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
        of = _rising(function) if out.dtype == np.bool_ else _bitwise(bitwise)
        return of(tiles, given, parameters, out)

    return rule


def _xor(tiles: Tiles, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
    if out.dtype == np.bool_:
        return _different(tiles, given, parameters, out)
    return _bitwise(np.bitwise_xor)(tiles, given, parameters, out)


def _select(tiles: Tiles, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
    which, *cases = given
    if len(cases) != 2:
        return None
    for always, case in ((False, cases[0]), (True, cases[1])):
        if np.all(which.lo == always) and np.all(which.hi == always):
            return case
    a, b = cases
    forms = forms_of((which, a, b))
    if which.exact and a.exact and b.exact:
        value = np.where(which.lo, b.lo, a.lo)
        return Bounds(value, value, forms)
    lo = np.where(which.lo, b.lo, np.where(which.hi, np.minimum(a.lo, b.lo), a.lo))
    hi = np.where(which.lo, b.hi, np.where(which.hi, np.maximum(a.hi, b.hi), a.hi))
    return Bounds(lo, hi, forms)


def _convert(tiles: Tiles, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
    (a,) = given
    if out.dtype == np.bool_:
        return (
            a if np.asarray(a.lo).dtype == np.bool_ else _different(tiles, [a, constant(0)], parameters, out)
        )
    if np.asarray(a.lo).dtype == np.bool_:
        lo = np.asarray(a.lo).astype(np.int64)
        return Bounds(lo, lo if a.exact else np.asarray(a.hi).astype(np.int64), a.forms)
    # A wider type changes nothing, and neither does a float that holds every int32.
    if out.dtype in (np.int32, np.int64, np.float64) and np.issubdtype(np.asarray(a.lo).dtype, np.integer):
        if a.linear or not is_int(out):
            return a if is_int(out) else a._replace(linear=None)
        return _finish(a.lo, a.hi, given, out) if out.dtype == np.int32 else a
    return None


def _same(tiles: Tiles, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
    """Of operations that only change a shape of one element."""
    return given[0]


def _power(tiles: Tiles, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
    return _mul(tiles, [given[0]] * 2, parameters, out) if parameters["y"] == 2 else None


def _lookup(tiles: Tiles, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
    """One element of an array that is known, at indices known by their bounds."""
    operand, *indices = given
    table = Table(operand.lo) if isinstance(operand.lo, np.ndarray) else operand.lo
    if operand.forms or not isinstance(table, Table) or table.entries.ndim != len(indices):
        return None
    entries, forms = table.entries, forms_of(indices)
    clipped = [_clipped(i, size - 1) for i, size in zip(indices, entries.shape, strict=True)]
    if all(i.exact for i in clipped):
        value = _widened(entries[tuple(np.asarray(i.lo) for i in clipped)], out)
        return Bounds(value, value, forms)
    fixed = [i.exact and np.ndim(i.lo) == 0 for i in clipped]
    lead = lambda axes: tuple(int(i.lo) for i in clipped[:-axes])
    if entries.dtype == np.bool_ and len(fixed) >= 2 and all(fixed[:-2]):
        some, every = table.any_and_all(lead(2), *((i.lo, i.hi) for i in clipped[-2:]))
        return Bounds(every, some, forms)
    if all(fixed[:-1]):
        low, high = table.extremes(lead(1), np.asarray(clipped[-1].lo), np.asarray(clipped[-1].hi))
        return Bounds(_widened(low, out), _widened(high, out), forms)
    return None


def _clipped(index: Bounds, most: int) -> Bounds:
    lo = np.clip(index.lo, 0, most)
    return Bounds(lo, lo if index.exact else np.clip(index.hi, 0, most), index.forms)


def _widened(value: np.ndarray, out: Any) -> np.ndarray:
    return value if value.dtype == np.bool_ else value.astype(np.int64 if is_int(out) else np.float64)


RULES: dict[str, Rule] = {
    "add": _sum(1),
    "add_any": _sum(1),
    "sub": _sum(-1),
    "mul": _mul,
    "neg": _neg,
    "max": _rising(np.maximum),
    "min": _rising(np.minimum),
    "abs": _abs,
    "sign": _rising(np.sign),
    "div": _div,
    "rem": _rem,
    "integer_pow": _power,
    "square": lambda tiles, given, parameters, out: _mul(tiles, given * 2, parameters, out),
    "lt": _compare(True, True),
    "le": _compare(True, False),
    "gt": _compare(False, True),
    "ge": _compare(False, False),
    "eq": _equal,
    "ne": _different,
    "and": _logical(np.logical_and, np.bitwise_and),
    "or": _logical(np.logical_or, np.bitwise_or),
    "xor": _xor,
    "not": _not,
    "select_n": _select,
    "convert_element_type": _convert,
    "dynamic_slice": _lookup,
    **dict.fromkeys(("squeeze", "reshape", "broadcast_in_dim", "copy", "stop_gradient", "copy_p", "expand_dims"), _same),
}  # fmt: skip
