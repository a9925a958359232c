"""A traced mask function over whole tiles of pairs: bounds of its value on each tile, and what its content depends on.

Every value of the function is known by its least and greatest number on each tile (interval arithmetic), so a comparison that holds for
all or for no pair of a tile is decided without looking at the pairs. An operation that is not known here is unbounded: the tile is then
looked at pair by pair, so bounds affect time only. With single pairs for tiles the bounds are the values.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Form = tuple[int, int]
"""Coefficients of query and key: values computed from forms alone are equal on two tiles whose corners give equal forms."""

_LEAST, _MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max


class Bounds(NamedTuple):
    """The least and the greatest value on each tile, equal objects if known exactly."""

    lo: Any
    hi: Any
    forms: frozenset[Form] = frozenset()
    linear: tuple[int, int, int] | None = None
    """Coefficients of query and key, and a constant, if the value is such a sum."""

    @property
    def exact(self) -> bool:
        return self.lo is self.hi


@dataclasses.dataclass(frozen=True)
class Tiles:
    """First and last queries and keys of tiles, in int64, of any shapes that broadcast together; `head` is one number."""

    q: tuple[np.ndarray, np.ndarray]
    k: tuple[np.ndarray, np.ndarray]
    head: int = 0


class Undecided(NamedTuple):
    """Of a condition inside the function: on which tiles it is open, and the forms it depends on."""

    where: Any
    lo: Any
    forms: frozenset[Form]


def bounds_of(jaxpr: Any, tiles: Tiles) -> tuple[Bounds, list[Undecided]]:
    """Bounds of a function's result, and its conditions."""
    run = _Run(tiles)
    arguments = (
        Bounds(tiles.head, tiles.head),
        run.linear(1, 0, 0),
        run.linear(0, 1, 0),
    )
    arguments = tuple(Bounds(x.lo, x.lo, x.forms, x.linear) if x.lo is x.hi else x for x in arguments)
    (result,) = run.evaluate(jaxpr.jaxpr, jaxpr.consts, arguments)
    return result, run.conditions


class _Run:
    """One evaluation over tiles."""

    def __init__(self, tiles: Tiles):
        self.tiles, self.conditions = tiles, []
        self.points = tiles.q[0] is tiles.q[1] and tiles.k[0] is tiles.k[1]

    def linear(self, q: int, k: int, constant: int) -> Bounds:
        """`q * query + k * key + constant`."""
        if q == k == 0:
            return Bounds(constant, constant, linear=(0, 0, constant))
        ends = [(c, side) for c, side in ((q, self.tiles.q), (k, self.tiles.k)) if c]
        forms, linear = frozenset([(q, k)]), (q, k, constant)
        low = sum(c * side[0 if c > 0 else 1] for c, side in ends) + constant
        if self.points:
            if sum(abs(c) * int(np.max(side[1], initial=0)) for c, side in ends) + abs(constant) > _MOST:
                low, linear = _wrapped(low), None
            return Bounds(low, low, forms, linear)
        high = sum(c * side[1 if c > 0 else 0] for c, side in ends) + constant
        return _in_range(low, high, forms, linear)

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Bounds]) -> list[Bounds]:
        known: dict[Any, Bounds] = dict(zip(jaxpr.invars, arguments, strict=True))
        known |= zip(jaxpr.constvars, map(_constant, consts), strict=True)
        read = lambda x: _constant(x.val) if hasattr(x, "val") else known[x]
        for equation in jaxpr.eqns:
            results = self._apply(equation, [read(x) for x in equation.invars])
            known |= zip(equation.outvars, results, strict=True)
        return [read(x) for x in jaxpr.outvars]

    def _apply(self, equation: Any, given: list[Bounds]) -> list[Bounds]:
        name, parameters = equation.primitive.name, equation.params
        inner = parameters.get("jaxpr", parameters.get("call_jaxpr"))
        if inner is not None and name in _CALLS:
            closed = hasattr(inner, "consts")
            return self.evaluate(inner.jaxpr if closed else inner, inner.consts if closed else (), given)
        out = equation.outvars[0].aval
        rule = _RULES.get(name)
        found = None
        if rule is not None and len(equation.outvars) == 1 and math.prod(out.shape) == 1:
            found = rule(self, given, parameters, out)
        if found is None:
            forms = frozenset[Form]().union(*(x.forms for x in given))
            return [_unbounded(x.aval, forms) for x in equation.outvars]
        if out.dtype == np.bool_ and name in _CONDITIONS and found.forms and not found.exact:
            self.conditions.append(Undecided(found.lo != found.hi, found.lo, found.forms))
        return [found]


Rule = Callable[[_Run, list[Bounds], dict[str, Any], Any], Bounds | None]


def _constant(value: Any) -> Bounds:
    x = np.asarray(value)
    if x.ndim:
        return Bounds(x, x)
    number = x.item()
    is_int = isinstance(number, int) and not isinstance(number, bool)
    return Bounds(number, number, linear=(0, 0, number) if is_int else None)


def _unbounded(aval: Any, forms: frozenset[Form]) -> Bounds:
    if aval.dtype == np.bool_:
        return Bounds(False, True, forms)
    if np.issubdtype(aval.dtype, np.integer):
        return Bounds(_LEAST, _MOST, forms)
    return Bounds(-math.inf, math.inf, forms)


def _in_range(lo: Any, hi: Any, forms: frozenset[Form], linear: Any = None) -> Bounds:
    """Bounds of a 32-bit integer; what may wrap around is unbounded."""
    if np.min(lo) < _LEAST or np.max(hi) > _MOST:
        wraps = (np.asarray(lo) < _LEAST) | (np.asarray(hi) > _MOST)
        return Bounds(np.where(wraps, _LEAST, lo), np.where(wraps, _MOST, hi), forms)
    return Bounds(lo, hi, forms, linear)


def _wrapped(x: Any) -> Any:
    """32-bit integers as a device computes them."""
    return np.asarray(x).astype(np.int32).astype(np.int64)


def _forms(*given: Bounds) -> frozenset[Form]:
    return frozenset[Form]().union(*(x.forms for x in given))


def _is_int(aval: Any) -> bool:
    return np.issubdtype(aval.dtype, np.integer)


def _finish(run: _Run, lo: Any, hi: Any, given: Sequence[Bounds], out: Any) -> Bounds:
    """The bounds of an arithmetic result. Exact 32-bit integers wrap around as they do on a device."""
    if lo is hi:
        lo = _wrapped(lo) if _is_int(out) else lo
        return Bounds(lo, lo, _forms(*given))
    return _in_range(lo, hi, _forms(*given)) if _is_int(out) else Bounds(lo, hi, _forms(*given))


def _sum(sign: int) -> Rule:
    def rule(run: _Run, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds:
        a, b = given
        if a.linear and b.linear and _is_int(out):
            return run.linear(*(x + sign * y for x, y in zip(a.linear, b.linear, strict=True)))
        if a.exact and b.exact:
            value = a.lo + sign * b.lo
            return _finish(run, value, value, given, out)
        lo, hi = (b.lo, b.hi) if sign > 0 else (b.hi, b.lo)
        return _finish(run, a.lo + sign * lo, a.hi + sign * hi, given, out)

    return rule


def _mul(run: _Run, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds:
    a, b = given
    if a.linear and b.linear and _is_int(out):
        for x, y in ((a.linear, b.linear), (b.linear, a.linear)):
            if x[:2] == (0, 0):
                return run.linear(*(x[2] * c for c in y))
    if a.exact and b.exact:
        value = np.multiply(a.lo, b.lo)
        return _finish(run, value, value, given, out)
    corners = [np.multiply(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    lo, hi = corners[0], corners[0]
    for x in corners[1:]:
        lo, hi = np.minimum(lo, x), np.maximum(hi, x)
    return _finish(run, lo, hi, given, out)


def _neg(run: _Run, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds:
    (a,) = given
    if a.linear:
        return run.linear(*(-c for c in a.linear))
    lo = np.negative(a.hi)
    return Bounds(lo, lo if a.exact else np.negative(a.lo), a.forms)


def _rising(function: Callable[..., Any]) -> Rule:
    """Of a function that increases in every argument."""

    def rule(run: _Run, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds:
        lo = function(*(x.lo for x in given))
        return Bounds(
            lo, lo if all(x.exact for x in given) else function(*(x.hi for x in given)), _forms(*given)
        )

    return rule


def _abs(run: _Run, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds:
    (a,) = given
    if a.exact:
        value = np.abs(a.lo)
        return Bounds(value, value, a.forms)
    low, high = np.abs(a.lo), np.abs(a.hi)
    crosses = (np.asarray(a.lo) <= 0) & (np.asarray(a.hi) >= 0)
    return Bounds(np.where(crosses, 0, np.minimum(low, high)), np.maximum(low, high), a.forms)


def _truncated(x: Any, d: int) -> Any:
    quotient = np.abs(x) // abs(d)
    return np.where((np.asarray(x) < 0) != (d < 0), -quotient, quotient)


def _divisor(x: Bounds) -> int | None:
    """A divisor that is one number other than 0."""
    return int(x.lo) if x.exact and np.ndim(x.lo) == 0 and x.lo != 0 else None


def _div(run: _Run, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
    a, d = given[0], _divisor(given[1])
    if not _is_int(out) or d is None:
        return None
    lo = _truncated(a.lo, d)
    hi = lo if a.exact else _truncated(a.hi, d)
    return Bounds(lo, hi, a.forms) if d > 0 else Bounds(hi, lo, a.forms)


def _rem(run: _Run, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
    a, d = given[0], _divisor(given[1])
    if not _is_int(out) or d is None:
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
    def rule(run: _Run, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds:
        a, b = given if less else given[::-1]
        if a.linear and b.linear and not run.points:
            a, b = run.linear(*(x - y for x, y in zip(a.linear, b.linear, strict=True))), _constant(0)
        compare = np.less if strict else np.less_equal
        lo = compare(a.hi, b.lo)
        hi = lo if a.exact and b.exact else compare(a.lo, b.hi)
        return Bounds(lo, hi, _forms(a, b))

    return rule


def _equal(run: _Run, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds:
    a, b = given
    if a.linear and b.linear and not run.points:
        a, b = run.linear(*(x - y for x, y in zip(a.linear, b.linear, strict=True))), _constant(0)
    if a.exact and b.exact:
        value = np.equal(a.lo, b.lo)
        return Bounds(value, value, _forms(a, b))
    overlap = np.less_equal(a.lo, b.hi) & np.less_equal(b.lo, a.hi)
    return Bounds(np.equal(a.lo, b.hi) & np.equal(a.hi, b.lo) & overlap, overlap, _forms(a, b))


def _different(run: _Run, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds:
    return _inverted(_equal(run, given, parameters, out))


def _inverted(a: Bounds) -> Bounds:
    lo = np.logical_not(a.hi)
    return Bounds(lo, lo if a.exact else np.logical_not(a.lo), a.forms)


def _not(run: _Run, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
    return (
        _inverted(given[0])
        if out.dtype == np.bool_
        else _bitwise(np.bitwise_not)(run, given, parameters, out)
    )


def _bitwise(function: Callable[..., Any]) -> Rule:
    """Of integers, known of exact ones only."""

    def rule(run: _Run, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
        if not all(x.exact for x in given):
            return None
        value = function(*(np.asarray(x.lo) for x in given))
        return _finish(run, value, value, given, out)

    return rule


def _logical(function: Callable[..., Any], bitwise: Callable[..., Any]) -> Rule:
    def rule(run: _Run, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
        of = _rising(function) if out.dtype == np.bool_ else _bitwise(bitwise)
        return of(run, given, parameters, out)

    return rule


def _xor(run: _Run, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
    if out.dtype == np.bool_:
        return _different(run, given, parameters, out)
    return _bitwise(np.bitwise_xor)(run, given, parameters, out)


def _select(run: _Run, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
    which, *cases = given
    if len(cases) != 2:
        return None
    for always, case in ((False, cases[0]), (True, cases[1])):
        if np.all(which.lo == always) and np.all(which.hi == always):
            return case
    a, b = cases
    forms = _forms(which, a, b)
    if which.exact and a.exact and b.exact:
        value = np.where(which.lo, b.lo, a.lo)
        return Bounds(value, value, forms)
    lo = np.where(which.lo, b.lo, np.where(which.hi, np.minimum(a.lo, b.lo), a.lo))
    hi = np.where(which.lo, b.hi, np.where(which.hi, np.maximum(a.hi, b.hi), a.hi))
    return Bounds(lo, hi, forms)


def _convert(run: _Run, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
    (a,) = given
    if out.dtype == np.bool_:
        return (
            a if np.asarray(a.lo).dtype == np.bool_ else _different(run, [a, _constant(0)], parameters, out)
        )
    if np.asarray(a.lo).dtype == np.bool_:
        lo = np.asarray(a.lo).astype(np.int64)
        return Bounds(lo, lo if a.exact else np.asarray(a.hi).astype(np.int64), a.forms)
    # A wider type changes nothing, and neither does a float that holds every int32.
    if out.dtype in (np.int32, np.int64, np.float64) and np.issubdtype(np.asarray(a.lo).dtype, np.integer):
        return a if _is_int(out) else a._replace(linear=None)
    return None


def _same(run: _Run, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
    """Of operations that only change a shape of one element."""
    return given[0]


def _power(run: _Run, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
    return _mul(run, [given[0]] * 2, parameters, out) if parameters["y"] == 2 else None


def _lookup(run: _Run, given: list[Bounds], parameters: dict[str, Any], out: Any) -> Bounds | None:
    """One element of an array that is known, at indices known by their bounds."""
    operand, *indices = given
    table = operand.lo
    if operand.forms or not isinstance(table, np.ndarray) or table.ndim != len(indices):
        return None
    clipped = [_clipped(i, size - 1) for i, size in zip(indices, table.shape, strict=True)]
    forms = _forms(*indices)
    if all(i.exact for i in clipped):
        value = table[tuple(np.asarray(i.lo) for i in clipped)]
        value = value if value.dtype == np.bool_ else value.astype(np.int64 if _is_int(out) else np.float64)
        return Bounds(value, value, forms)
    fixed = [i.exact and np.ndim(i.lo) == 0 for i in clipped]
    if table.dtype == np.bool_ and table.ndim >= 2 and all(fixed[:-2]):
        return Bounds(*_any_and_all(table[tuple(int(i.lo) for i in clipped[:-2])], *clipped[-2:]), forms)
    if all(fixed[:-1]):
        line = table[tuple(int(i.lo) for i in clipped[:-1])]
        return Bounds(*_extremes(line, clipped[-1]), forms)
    return None


def _clipped(index: Bounds, most: int) -> Bounds:
    lo = np.clip(index.lo, 0, most)
    return Bounds(lo, lo if index.exact else np.clip(index.hi, 0, most), index.forms)


def _any_and_all(table: np.ndarray, rows: Bounds, columns: Bounds) -> tuple[Any, Any]:
    """Whether all and whether any entries of rectangles are true, from sums over all that begin at the first entry."""
    sums = np.pad(table.cumsum(0, np.int32).cumsum(1, np.int32), ((1, 0), (1, 0)))
    top, bottom = np.asarray(rows.lo), np.asarray(rows.hi) + 1
    left, right = np.asarray(columns.lo), np.asarray(columns.hi) + 1
    count = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
    return count == (bottom - top) * (right - left), count > 0


def _extremes(line: np.ndarray, index: Bounds) -> tuple[Any, Any]:
    """The least and greatest of the elements `lo .. hi`: of two overlapping runs whose length is a power of two."""
    lo, hi = np.asarray(index.lo), np.asarray(index.hi)
    level = np.frexp((hi - lo + 1).astype(np.float64))[1] - 1
    wide = line.astype(np.int64 if line.dtype.kind in "biu" else np.float64)
    least, most = [wide], [wide]
    for n in range(int(level.max(initial=0))):
        half = 1 << n
        least.append(np.minimum(least[-1][:-half], least[-1][half:]))
        most.append(np.maximum(most[-1][:-half], most[-1][half:]))
    low = high = None
    for n, (a, b) in enumerate(zip(least, most, strict=True)):
        at = level == n
        if not at.any():
            continue
        first = np.minimum(lo, len(a) - 1)
        second = np.clip(hi + 1 - (1 << n), 0, len(a) - 1)
        x, y = np.minimum(a[first], a[second]), np.maximum(b[first], b[second])
        low = x if low is None else np.where(at, x, low)
        high = y if high is None else np.where(at, y, high)
    assert low is not None and high is not None
    return (low != 0, high != 0) if line.dtype == np.bool_ else (low, high)


_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat",
    "checkpoint",
)
_CONDITIONS = frozenset(("lt", "le", "gt", "ge", "eq", "ne", "dynamic_slice", "convert_element_type"))
_RULES: dict[str, Rule] = {
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
    "square": lambda run, given, parameters, out: _mul(run, given * 2, parameters, out),
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
