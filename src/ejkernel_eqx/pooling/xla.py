"""Pooling in plain XLA, which reads the tokens once and writes nothing of their size.

Rows are cut into segments by a reshape. Packed segments are cut into short pieces, all reduced together, a few tokens at a time; the pieces of a
segment are then combined in pairs, always in the same order. The derivative is written in terms of two linear functions, `_share`
and `_collect`, each the transpose of the other, so a gradient is one pass that gathers, whatever the forward pass does.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._broadcast import like
from .._shapes import as_value, is_symbolic
from .._take import take_along
from ..core.arguments import accumulator
from ..core.platforms import Plain
from ..sequences.tokens import over
from .spec import counts, last_tokens, longest, num_segments, PoolArrays, PoolSpec
from .tables import Pieces, pieces_of

_NO_TOKEN = 2**31 - 1
_PIECE, _TILE = 128, 8  # tokens of packed segments that are reduced one after the other, and at once
Leaves = tuple[Array, ...]


def apply(arrays: PoolArrays, spec: PoolSpec) -> dict[str, Array]:
    """`out [*, S, C]` in the dtype of `x`."""
    pooled = _pooled(spec, arrays.x, arrays._replace(x=None))  # pyright: ignore[reportArgumentType]
    return {"out": normalised(pooled, spec).astype(arrays.x.dtype)}


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _pooled(spec: PoolSpec, x: Array, tables: PoolArrays) -> Array:
    """`[*, S, C]` in the dtype of sums."""
    arrays, wide = tables._replace(x=x), accumulator(x.dtype)
    if spec.reduction == "last":
        return rows_at(x, last_tokens(arrays, spec)).astype(wide)
    count = like(counts(arrays, spec), x[..., 0])[..., None]
    if spec.reduction == "max":
        (largest,) = _reduced(_LARGEST, (x,), arrays, spec)
        return jnp.where(count > 0, largest, 0).astype(wide)
    (total,) = _reduced(_SUM, (x,), arrays, spec)
    return total if spec.reduction == "sum" else total / jnp.maximum(count, 1).astype(wide)


@_pooled.defjvp
def _derivative(spec: PoolSpec, primals: Any, tangents: Any) -> tuple[Array, Array]:
    (x, tables), (dx, _) = primals, tangents
    arrays, wide = tables._replace(x=x), accumulator(x.dtype)
    token = jnp.arange(x.shape[-2], dtype=jnp.int32)[:, None]
    share = functools.partial(_share, arrays=arrays, spec=spec)
    by_segment = lambda x: like(x, arrays.x[..., 0])[..., None]
    is_used: Any = True if arrays.segment is None else (arrays.segment >= 0)[..., None]
    if spec.reduction == "last":
        is_used &= share(by_segment(last_tokens(arrays, spec))) == like(token, x)
    elif spec.reduction == "max":
        index = jnp.broadcast_to(like(token, x), (*x.shape[:-1], 1))
        _, first = _reduced(_FIRST_LARGEST, (lax.stop_gradient(x), index), arrays, spec)
        is_used &= share(first) == like(token, x)
    moved = dx.astype(wide) if is_used is True else jnp.where(is_used, dx.astype(wide), 0)
    out = _collect(moved, arrays, spec)
    if spec.reduction == "mean":
        out = out / jnp.maximum(by_segment(counts(arrays, spec)), 1).astype(wide)
    return _pooled(spec, x, tables), out


def normalised(pooled: Array, spec: PoolSpec) -> Array:
    """`pooled / max(norm, eps)`, with the Euclidean norm over all channels, in the dtype of `pooled`. The
    gradient of a result of 0 is finite."""
    if not spec.normalize:
        return pooled
    square = jnp.sum(pooled * pooled, -1, keepdims=True)
    is_long = square > spec.eps * spec.eps
    return pooled * jnp.where(is_long, lax.rsqrt(jnp.where(is_long, square, 1)), 1 / spec.eps)


# Tokens of segments, and segments of tokens


def rows_at(x: Array, token: Array) -> Array:
    """`x [*, T, C]` at the tokens `[*, S]` or `[S]`: `[*, S, C]`, 0 for those below 0."""
    token = jnp.broadcast_to(token, (*x.shape[:-2], token.shape[-1]))[..., None]
    return jnp.where(token >= 0, take_along(x, jnp.maximum(token, 0), -2), 0)


def _share(x: Array, arrays: PoolArrays, spec: PoolSpec) -> Array:
    """The value of each token's segment: `[*, T, K]` from `[*, S, K]`; any for tokens of none."""
    length, most = arrays.x.shape[-2], longest(arrays, spec)
    if arrays.begin is not None:
        assert arrays.segment is not None
        return take_along(x, jnp.maximum(arrays.segment, 0)[..., None], -2)
    *lead, segments, width = x.shape
    whole = jnp.broadcast_to(x[..., None, :], (*lead, segments, most, width))
    return whole.reshape(*lead, segments * most, width)[..., :length, :]


def _collect(x: Array, arrays: PoolArrays, spec: PoolSpec) -> Array:
    """The sums over the tokens of each segment: `[*, S, C]` from `[*, T, C]`, which is 0 at tokens of none."""
    if arrays.begin is None:
        return _cut(x, arrays, spec, 0).sum(-2)
    assert arrays.segment is not None
    segments = num_segments(arrays, spec)
    where = jnp.where(arrays.segment < 0, segments, arrays.segment)
    return over(x.ndim - 2, functools.partial(jax.ops.segment_sum, num_segments=segments))(x, where)


def _cut(x: Array, arrays: PoolArrays, spec: PoolSpec, fill: Any) -> Array:
    """`[*, S, L, C]` from `[*, T, C]`; the last segment is filled up."""
    segments, most = num_segments(arrays, spec), longest(arrays, spec)
    *lead, length, channels = x.shape
    missing = segments * most - length
    if is_symbolic(missing) or missing:
        x = lax.pad(x, jnp.asarray(fill, x.dtype), [(0, 0, 0)] * len(lead) + [(0, missing, 0), (0, 0, 0)])
    return x.reshape(*lead, segments, most, channels)


# Reductions


class _Reduction(NamedTuple):
    """`combine(a, b)` of two partial results, and the results of nothing in the dtypes of `leaves`."""

    combine: Callable[[Leaves, Leaves], Leaves]
    nothing: Callable[[Leaves], Sequence[Any]]


def _least(x: Array) -> Any:
    return jnp.asarray(-jnp.inf, x.dtype)


def _first_largest(a: Leaves, b: Leaves) -> Leaves:
    """The larger value; of equal ones the first. A NaN is the largest."""
    (x, i), (y, j) = a, b
    same = (x == y) | ((x != x) & (y != y))
    takes = (x > y) | ((x != x) & (y == y)) | (same & (i < j))
    return jnp.where(takes, x, y), jnp.where(takes, i, j)


_SUM = _Reduction(lambda a, b: (a[0] + b[0],), lambda leaves: (jnp.zeros((), leaves[0].dtype),))
_LARGEST = _Reduction(lambda a, b: (jnp.maximum(a[0], b[0]),), lambda leaves: (_least(leaves[0]),))
_FIRST_LARGEST = _Reduction(_first_largest, lambda leaves: (_least(leaves[0]), jnp.int32(_NO_TOKEN)))


def _reduced(reduction: _Reduction, leaves: Leaves, arrays: PoolArrays, spec: PoolSpec) -> Leaves:
    """The results of all segments, `[*, S, C]` each, of leaves `[*, T, C]` or `[*, T, 1]`."""
    if arrays.begin is None:
        nothing = reduction.nothing(leaves)
        if arrays.segment is not None:
            is_used = (arrays.segment >= 0)[..., None]
            leaves = tuple(jnp.where(is_used, x, fill) for x, fill in zip(leaves, nothing, strict=True))
        cut = tuple(_cut(x, arrays, spec, fill) for x, fill in zip(leaves, nothing, strict=True))
        return _along(reduction, cut, nothing)
    tables = {name: x for name, x in arrays._asdict().items() if name != "x" and x is not None}
    row = lambda leaves, tables: _packed(reduction, leaves, PoolArrays(leaves[0], **tables), spec)
    return over(arrays.x.ndim - 2, row)(leaves, tables)


def _along(reduction: _Reduction, leaves: Leaves, nothing: Sequence[Any]) -> Leaves:
    """Reduces the second last axis."""
    if reduction is _SUM:
        return (leaves[0].sum(-2, dtype=accumulator(leaves[0].dtype)),)
    if reduction is _LARGEST:
        return (leaves[0].max(-2),)
    leaves = tuple(jnp.broadcast_arrays(*leaves))
    return tuple(lax.reduce(leaves, tuple(nothing), reduction.combine, (leaves[0].ndim - 2,)))


def _packed(reduction: _Reduction, leaves: Leaves, arrays: PoolArrays, spec: PoolSpec) -> Leaves:
    """The results of one row, `[S, C]` each."""
    begin, end, length = arrays.begin, arrays.end, arrays.x.shape[0]
    assert begin is not None and end is not None
    segments, nothing = begin.shape[0], reduction.nothing(leaves)
    is_known = not (is_symbolic(length) or is_symbolic(segments))
    size = min(_PIECE, max(1, length // segments)) if is_known else _PIECE
    pieces = pieces_of(begin, end, length, size)

    def tile(step: Any) -> Leaves:
        """The result over a few tokens of each piece."""
        place = (pieces.begin + step * _TILE)[:, None] + jnp.arange(min(_TILE, size), dtype=jnp.int32)[None]
        inside = place < pieces.end[:, None]
        token = jnp.clip(place, 0, length - 1)
        token = token if arrays.order is None else arrays.order[token]
        if spec.holes:
            assert arrays.segment is not None
            inside &= arrays.segment[token] == pieces.owner[:, None]
        pairs = zip(leaves, nothing, strict=True)
        return _along(reduction, tuple(jnp.where(inside[..., None], x[token], y) for x, y in pairs), nothing)

    parts = tile(jnp.int32(0))
    if size > _TILE:
        add = lambda step, parts: reduction.combine(parts, tile(step))
        parts = lax.fori_loop(1, -(-size // _TILE), add, parts)
    parts = _up_to(reduction, parts, pieces, as_value(-(-length // size)))
    last = jnp.maximum(pieces.first + pieces.number - 1, 0)
    is_empty, pairs = (pieces.number == 0)[:, None], zip(parts, nothing, strict=True)
    return tuple(jnp.where(is_empty, identity.astype(x.dtype), x[last]) for x, identity in pairs)


def _up_to(reduction: _Reduction, parts: Leaves, pieces: Pieces, most: Any) -> Leaves:
    """Each piece combined with all before it in its segment, of at most so many. Each round doubles the span.

    The number of rounds depends on no table, over which devices would have to agree."""
    piece = jnp.arange(pieces.owner.shape[0], dtype=jnp.int32)
    rank = piece - pieces.first[pieces.owner]

    def round_(carry: tuple[Array, Leaves]) -> tuple[Array, Leaves]:
        shift, parts = carry
        before = tuple(x[jnp.maximum(piece - shift, 0)] for x in parts)
        joined, has_more = reduction.combine(before, parts), (rank >= shift)[:, None]
        pairs = zip(joined, parts, strict=True)
        return shift * 2, tuple(jnp.where(has_more, x, y) for x, y in pairs)

    return lax.while_loop(lambda carry: carry[0] < most, round_, (jnp.int32(1), parts))[1]


platform = Plain(apply)
