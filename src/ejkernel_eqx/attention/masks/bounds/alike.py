"""Groups tiles of equal content by what the open conditions of a mask function depend on (`README.md`, "Equal contents")."""

import functools
from typing import Any, NamedTuple

import numpy as np

from ..pattern import Pattern
from ..tile_shape import Shape
from .evaluate import bounds_of, Condition, traced_once
from .interval import Bounds
from .tiles import Form, Tiles


class Column(NamedTuple):
    """Integers along a form, or one for each tile if that is `None`: tiles that differ in none of some columns are alike."""

    values: Any
    along: Form | None


def alike(pattern: Pattern, tiles: Tiles, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """The first of the picked tiles of each content, and for each tile which of those it equals."""
    assert tiles.picked is not None
    count = len(tiles.picked[0])
    _, conditions = bounds_of(traced_once(pattern.function), tiles)
    columns = [_of_condition(condition, tiles) for condition in conditions]
    # The last tiles of an axis may be shorter.
    for form, side, short in (
        ((1, 0), tiles.q, shape.queries % shape.block_q),
        ((0, 1), tiles.k, shape.keys % shape.block_k),
    ):
        if short:
            columns.append(Column(side[1] - side[0], form))
    if not columns:
        return np.zeros(1, np.int64), np.zeros(count, np.int64)
    joined = _joined(columns, tiles)
    number = _ranked(np.broadcast_to(_spread(joined, tiles), count))
    first = np.empty(int(number.max()) + 1, np.int64)
    first[number[::-1]] = np.arange(count - 1, -1, -1)
    return first, number


def _of_condition(condition: Condition, tiles: Tiles) -> Column:
    """Its value where it is decided, and what it compares where it is open."""
    columns = [column for x in condition.operands if x.forms for column in _of_operand(x, tiles)]
    where, value = Column(condition.where, condition.along), Column(condition.value, condition.along)
    content = _joined(columns, tiles)
    if content.along != where.along:
        where, value, content = (Column(_spread(x, tiles), None) for x in (where, value, content))
    values = np.where(where.values, content.values.astype(np.int64) + 2, value.values)
    return Column(values, where.along)


def _of_operand(x: Bounds, tiles: Tiles) -> list[Column]:
    """Its value where that is one number, else the corners of what it depends on."""
    one = np.equal(x.lo, x.hi)
    columns = [Column(np.where(one, x.lo, 0), x.along)]
    for form in sorted(x.forms):
        at, corner, _ = tiles.along(form)
        if x.along != at:
            corner, at = _spread(Column(corner, at), tiles), None
        columns.append(Column(np.where(one, np.iinfo(np.int64).min, corner), at))
    return columns


def _spread(column: Column, tiles: Tiles) -> Any:
    return column.values if column.along is None else tiles.spread(column.along, column.values)


def _joined(columns: list[Column], tiles: Tiles) -> Column:
    """One column that differs where any of some do."""
    by_form: dict[Form | None, list[Any]] = {}
    for column in columns:
        by_form.setdefault(column.along, []).append(_ranked(column.values))
    merged = [Column(functools.reduce(_pair, values), along) for along, values in by_form.items()]
    if len(merged) == 1:
        return merged[0]
    return Column(functools.reduce(_pair, (_spread(x, tiles) for x in merged)), None)


def _pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Numbers the pairs of numbers that count from 0."""
    return _ranked(a.astype(np.int64) * (int(b.max(initial=0)) + 1) + b)


def _ranked(values: Any) -> np.ndarray:
    """Equal numbers for equal values, from 0 on without gaps."""
    values = np.asarray(values)
    if values.dtype.kind in "biu" and values.size:
        low, high = int(values.min()), int(values.max())
        if high - low < max(4 * values.size, 2**16):
            at = values.astype(np.int64) - low
            present = np.zeros(high - low + 1, bool)
            present[at] = True
            return (np.cumsum(present, dtype=np.int32) - 1)[at]
    return np.unique(values, return_inverse=True)[1].reshape(values.shape)
