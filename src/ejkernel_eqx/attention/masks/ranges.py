"""A traced mask function over whole tiles of pairs: bounds of its value on each tile, and what its content depends on.

An operation without a rule is unbounded: the tile is then looked at pair by pair, so bounds affect time only.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .bound_rules import RULES
from .bounds import Bounds, constant, forms_of, is_int, linear, unbounded
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
        found = self._tables.get(id(value))
        if found is None or found[0] is not value:
            found = self._tables[id(value)] = value, Table(np.asarray(value))
        return Bounds(found[1], found[1])


def bounds_of(function: Function, tiles: Tiles) -> tuple[Bounds, list[Condition]]:
    """Bounds of a function's result, and its conditions."""
    run = _Run(function, tiles)
    arguments = (Bounds(tiles.head, tiles.head), linear(tiles, 1, 0, 0), linear(tiles, 0, 1, 0))
    (result,) = run.evaluate(function.jaxpr.jaxpr, function.jaxpr.consts, arguments)
    return result, run.conditions


class _Run:
    """One evaluation over tiles."""

    def __init__(self, function: Function, tiles: Tiles):
        self.function, self.tiles = function, tiles
        self.conditions: list[Condition] = []

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Bounds]) -> list[Bounds]:
        known: dict[Any, Bounds] = dict(zip(jaxpr.invars, arguments, strict=True))
        known |= zip(jaxpr.constvars, map(self.function.constant, consts), strict=True)
        read = lambda x: constant(x.val) if hasattr(x, "val") else known[x]
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
        types = {x.aval.dtype for x in equation.invars}
        if name in _COMPARISONS and types == {np.dtype(np.int32)}:
            given = self._difference(given)
        along = None
        if name not in _LINEAR or any(x.linear is None for x in given):
            given, along = self._together(given)
        found, rule = None, RULES.get(name)
        if name in _ARITHMETIC and is_int(out) and out.dtype != np.int32:
            rule = None  # rules know 32 bits with a sign
        if rule is not None and len(equation.outvars) == 1 and math.prod(out.shape) == 1:
            found = rule(self.tiles, given, parameters, out)
        if found is None:
            results = [unbounded(x.aval, forms_of(given)) for x in equation.outvars]
        else:
            results = [found._replace(along=along) if found.forms and found.along is None else found]
        if out.dtype == np.bool_ and (found is None or name in _CONDITIONS):
            self._remember(results[0], given)
        return results

    def _together(self, given: list[Bounds]) -> tuple[list[Bounds], Form | None]:
        """Operands whose numbers broadcast, and the form that all run along."""
        forms = {x.along for x in given if x.forms}
        if len(forms) == 1:
            return given, forms.pop()
        return [x.spread(self.tiles) for x in given], None

    def _difference(self, given: list[Bounds]) -> list[Bounds]:
        """What to compare: of two sums of query and key, their difference and 0, unless that exceeds 32 bits."""
        a, b = (x.linear for x in given)
        if a and b:
            x = linear(self.tiles, *(x - y for x, y in zip(a, b, strict=True)))
            if x.linear:
                return [x, constant(0)]
        return given

    def _remember(self, found: Bounds, operands: Sequence[Bounds]) -> None:
        if found.forms and not found.exact:
            where = np.not_equal(found.lo, found.hi)
            self.conditions.append(Condition(where, found.lo, found.along, tuple(operands)))


_CALLS = frozenset((
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint",
))  # fmt: skip
_COMPARISONS = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))
_CONDITIONS = _COMPARISONS | {"dynamic_slice", "convert_element_type"}
_LINEAR = frozenset(("add", "sub", "neg"))
_ARITHMETIC = _LINEAR | {
    "add_any", "mul", "abs", "div", "rem", "integer_pow", "square", "sign", "and", "or", "xor", "not"
}  # fmt: skip
