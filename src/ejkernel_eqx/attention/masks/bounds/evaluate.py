"""A traced mask function over whole tiles of pairs: bounds of its value on each tile, and the conditions that its content depends on."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...._jitted import while_alive
from ..functions import interpreted, PairFunction, traced
from .interval import Bounds, constant, forms_of, is_int, linear, unbounded
from .rules import Call, RULES, SUMS
from .tables import Table
from .tiles import Form, Tiles


class Condition(NamedTuple):
    """A condition inside the function: on which tiles it is open, its value on the others, and what it compares."""

    where: Any
    value: Any
    along: Form | None
    operands: tuple[Bounds, ...]


class Function:
    """A traced function of head, query and key, and its tables."""

    def __init__(self, jaxpr: Any):
        self.jaxpr = jaxpr
        self._tables: dict[int, tuple[Any, Table]] = {}

    def constant(self, value: Any) -> Bounds:
        if np.size(value) <= 1:
            return constant(value)
        known = self._tables.get(id(value))
        if known is None or known[0] is not value:
            known = self._tables[id(value)] = value, Table(np.asarray(value))
        return Bounds(known[1], known[1])


@while_alive
def traced_once(function: PairFunction) -> Function:
    """A function that closes over known values only."""
    return Function(traced(function))


def bounds_of(function: Function, tiles: Tiles) -> tuple[Bounds, list[Condition]]:
    """Bounds of a function's result, and its conditions."""
    run = _Run(function, tiles)
    arguments = (Bounds(tiles.head, tiles.head), linear(tiles, 1, 0, 0), linear(tiles, 0, 1, 0))
    (result,) = run.evaluate(function.jaxpr.jaxpr, function.jaxpr.consts, arguments)
    return result, run.conditions


def visible(function: PairFunction, tiles: Tiles) -> Bounds:
    """Tells whether all and whether any pairs of each tile are visible, as far as bounds tell."""
    return bounds_of(traced_once(function), tiles)[0].spread(tiles)


class _Run:
    """One evaluation over tiles."""

    def __init__(self, function: Function, tiles: Tiles):
        self.function, self.tiles = function, tiles
        self.conditions: list[Condition] = []

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Bounds]) -> list[Bounds]:
        return interpreted(jaxpr, map(self.function.constant, consts), arguments, self._apply, constant)

    def _apply(self, equation: Any, operands: list[Bounds]) -> list[Bounds]:
        name, parameters = equation.primitive.name, equation.params
        inner = parameters.get("jaxpr", parameters.get("call_jaxpr"))
        if inner is not None and name in _CALLS:
            closed = hasattr(inner, "consts")
            return self.evaluate(inner.jaxpr if closed else inner, inner.consts if closed else (), operands)
        out = equation.outvars[0].aval
        # Rules of arithmetic know 32 bits with a sign.
        ruled = name in RULES and not (name in _ARITHMETIC and is_int(out) and out.dtype != np.int32)
        ruled = ruled and len(equation.outvars) == 1 and math.prod(out.shape) == 1
        if ruled and name in SUMS and is_int(out) and all(x.linear for x in operands):
            coefficients = zip(*(x.linear for x in operands if x.linear), strict=True)
            return [linear(self.tiles, *(SUMS[name](*several) for several in coefficients))]
        if name in _COMPARISONS and {x.aval.dtype for x in equation.invars} == {np.dtype(np.int32)}:
            operands = self._difference(operands)
        operands, along = self._together(operands)
        result = RULES[name](Call(self.tiles, operands, parameters, out)) if ruled else None
        if result is None:
            results = [unbounded(x.aval, forms_of(operands)) for x in equation.outvars]
        else:
            results = [result._replace(along=along) if result.forms and result.along is None else result]
        if out.dtype == np.bool_ and (result is None or name in _CONDITIONS):
            self._remember(results[0], operands)
        return results

    def _together(self, operands: list[Bounds]) -> tuple[list[Bounds], Form | None]:
        """Operands whose numbers broadcast, and the form that all run along."""
        forms = {x.along for x in operands if x.forms}
        if len(forms) == 1:
            return operands, forms.pop()
        return [x.spread(self.tiles) for x in operands], None

    def _difference(self, operands: list[Bounds]) -> list[Bounds]:
        """Operands of a comparison: of two sums, their difference and 0, unless that exceeds 32 bits."""
        a, b = (x.linear for x in operands)
        if a and b:
            x = linear(self.tiles, *(x - y for x, y in zip(a, b, strict=True)))
            if x.linear:
                return [x, constant(0)]
        return operands

    def _remember(self, result: Bounds, operands: Sequence[Bounds]) -> None:
        if result.forms and not result.exact:
            where = np.not_equal(result.lo, result.hi)
            self.conditions.append(Condition(where, result.lo, result.along, tuple(operands)))


_CALLS = frozenset((
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint",
))  # fmt: skip
_COMPARISONS = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))
_CONDITIONS = _COMPARISONS | {"dynamic_slice", "convert_element_type"}
_ARITHMETIC = {
    *SUMS, "mul", "abs", "div", "rem", "integer_pow", "square", "sign", "and", "or", "xor", "not"
}  # fmt: skip
