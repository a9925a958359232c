"""Defines what the kernels of a call read: arrays in the layout of a TPU, each with the block that a step needs, and numbers in scalar memory."""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...launch.sizes import cdiv
from ..spec import AttentionArrays, AttentionSpec
from .steps import Entry, Steps, unpacked
from .tile import Form, Head, LANES

_NOBODY = -(2**31)  # the segment of queries that are padding; that of such keys is another


class Place(NamedTuple):
    """Holds where a step is: its batch row, head, key head, and its tiles of queries and keys."""

    batch: Any
    head: Any
    kv_head: Any
    q_tile: Any
    k_tile: Any
    content: Any = 0
    ids: tuple[Any, ...] = ()


class Operand(NamedTuple):
    """An array, the block of it that a step sees (`None` for an axis that it does not), and where that is, in blocks."""

    array: Array
    block: tuple[int | None, ...]
    at: Callable[[Place], tuple[Any, ...]]


Operands = dict[str, Operand]


def divided(x: Any, by: int) -> Any:
    """Of a number that is not negative, which takes one operation, not the six of `//`."""
    return x if by == 1 else jax.lax.div(x, jnp.int32(by))


def modulo(x: Any, by: int) -> Any:
    """Works as `divided`."""
    return jnp.int32(0) if by == 1 else jax.lax.rem(x, jnp.int32(by))


def padded(x: Array, axis: int, block: int, value: Any = 0) -> Array:
    """The array with an axis filled up to whole blocks."""
    short = -x.shape[axis] % block
    return (
        jnp.pad(x, [(0, short if n == axis else 0) for n in range(x.ndim)], constant_values=value)
        if short
        else x
    )


def by_head(x: Array, block: int) -> Array:
    """`[B, T, H, D]` as `[B, H, tiles * block, D]`, which one copy makes."""
    return padded(x.swapaxes(1, 2), 2, block)


def of_call(arrays: AttentionArrays, form: Form, k_rope: Array | None) -> Operands:
    """The arrays that all kernels of a call read."""
    q, k, v = arrays.q, arrays.k, arrays.v
    block_q, block_k = form.block_q, form.block_k
    found = {
        "q": Operand(
            by_head(q, block_q), (None, None, block_q, q.shape[3]), lambda p: (p.batch, p.head, p.q_tile, 0)
        ),
        "k": Operand(
            by_head(k, block_k),
            (None, None, block_k, k.shape[3]),
            lambda p: (p.batch, p.kv_head, p.k_tile, 0),
        ),
        "v": Operand(
            by_head(v, block_k),
            (None, None, block_k, v.shape[3]),
            lambda p: (p.batch, p.kv_head, p.k_tile, 0),
        ),
    }
    if k_rope is not None:
        found["k_rope"] = Operand(
            padded(k_rope, 1, block_k), (None, block_k, form.shared), lambda p: (p.batch, p.k_tile, 0)
        )
    if form.packed_rows:
        found["queries"] = _query_rows(arrays, form)
    if arrays.kv_segments is not None:
        found["key_segments"] = _key_segments(arrays.kv_segments, form)
    return found


def of_queries(rows: Mapping[str, Array], form: Form) -> Operands:
    """Numbers of each query and head, `[B, H, T]`, as rows of a block; padded with what keeps padding without weight."""
    fill = {"lse": jnp.inf}
    return {
        name: Operand(
            padded(x, 2, form.block_q, fill.get(name, 0))[:, :, None],
            (None, None, 1, form.block_q),
            lambda p: (p.batch, p.head, 0, p.q_tile),
        )
        for name, x in rows.items()
    }


def _query_rows(arrays: AttentionArrays, form: Form) -> Operand:
    """Ranges, positions and segments of queries side by side, in rows or in columns."""
    length = arrays.q.shape[1]
    rows = (None, None, None) if arrays.rows is None else arrays.rows
    hidden = (
        None if arrays.q_segments is None else jnp.where(arrays.q_segments < 0, _NOBODY, arrays.q_segments)
    )
    known = [*rows, hidden]
    batch = max(1 if x is None else x.shape[0] for x in known)
    fill = (0, 0, 0, _NOBODY)
    each = [
        jnp.broadcast_to(jnp.asarray(value if x is None else x, jnp.int32), (batch, length))
        for x, value in zip(known, fill, strict=True)
    ]
    each = [padded(x, 1, form.block_q, value) for x, value in zip(each, fill, strict=True)]
    together = jnp.stack(each, axis=1 if form.by_key else 2)
    row = _row(batch)
    if form.by_key:
        return Operand(padded(together, 1, 8), (None, 8, form.block_q), lambda p: (row(p), 0, p.q_tile))
    return Operand(padded(together, 2, LANES), (None, form.block_q, LANES), lambda p: (row(p), p.q_tile, 0))


def _key_segments(ids: Array, form: Form) -> Operand:
    ids = jnp.where(ids < 0, -1, ids).astype(jnp.int32)
    ids, row = padded(ids, 1, form.block_k, -1), _row(ids.shape[0])
    if form.by_key:
        columns = jnp.broadcast_to(ids[:, :, None], (*ids.shape, LANES))
        return Operand(columns, (None, form.block_k, LANES), lambda p: (row(p), p.k_tile, 0))
    return Operand(ids[:, None], (None, 1, form.block_k), lambda p: (row(p), 0, p.k_tile))


def _row(rows: int) -> Callable[[Place], Any]:
    return lambda p: p.batch if rows > 1 else 0


def over_scores(x: Array, run: int, batch: int, form: Form) -> Operand:
    """A bias or mask `[rows, H or 1, T or 1, S or 1]`. Each of its rows serves `run` consecutive batch rows, and the rows repeat."""
    rows, heads, queries, keys = x.shape
    x = padded(x, 2, form.block_q if queries > 1 else 1)
    x = padded(x, 3, form.block_k if keys > 1 else 1)
    block = (form.block_q if queries > 1 else 1, form.block_k if keys > 1 else 1)

    def at(p: Place) -> tuple[Any, ...]:
        row = 0 if rows == 1 else p.batch if rows == batch else modulo(divided(p.batch, run), rows)
        tile = (p.q_tile if queries > 1 else 0, p.k_tile if keys > 1 else 0)
        return (row, p.head if heads > 1 else 0, *(tile[::-1] if form.by_key else tile))

    return (
        Operand(x.mT, (None, None, *block[::-1]), at) if form.by_key else Operand(x, (None, None, *block), at)
    )


def of_contents(contents: Array) -> Operand:
    return Operand(contents, (None, *contents.shape[1:]), lambda p: (p.content, 0, 0))


def of_map(blocks: Array, size: tuple[int, int], form: Form, queries: int, keys: int) -> Operand:
    """The part of a map `[B or 1, H or 1, M, N]` that each tile touches, in bfloat16, its rows and columns filled up for products."""
    touched = [
        _touched(length, tile, block, blocks.shape[2 + axis], 16 if axis == form.query_axis else LANES)
        for axis, (length, tile, block) in enumerate(
            ((queries, form.block_q, size[0]), (keys, form.block_k, size[1]))
        )
    ]
    parts = blocks[:, :, touched[0]][
        ..., touched[1]
    ]  # [B or 1, H or 1, query tiles, rows, key tiles, columns]
    parts = parts.transpose(0, 1, 2, 4, *((5, 3) if form.by_key else (3, 5)))
    batch, heads = _row(blocks.shape[0]), blocks.shape[1]
    return Operand(
        parts.astype(jnp.bfloat16),
        (None, None, None, None, *parts.shape[4:]),
        lambda p: (batch(p), p.head if heads > 1 else 0, p.q_tile, p.k_tile, 0, 0),
    )


def _touched(length: int, tile: int, block: int, blocks: int, multiple: int) -> np.ndarray:
    """`[tiles, n]`: the blocks from the first that a tile touches on; past the end, the last one again."""
    count = cdiv((tile - 1) // block + 2, multiple) * multiple
    first = np.arange(cdiv(length, tile)) * tile // block
    return np.minimum(first[:, None] + np.arange(count), blocks - 1)


class Scalars(NamedTuple):
    """Holds what is prefetched to scalar memory, absent numbers left out."""

    names: tuple[str, ...]
    arrays: tuple[Array, ...]

    def by_name(self, refs: Sequence[Any]) -> Any:
        """The references by name, which may be followed by others."""
        return types.SimpleNamespace(**dict(zip(self.names, refs, strict=False)))


def scalars_of(arrays: AttentionArrays, steps: Steps | None) -> Scalars:
    batch = arrays.q.shape[0]
    every = lambda x: None if x is None else jnp.broadcast_to(x, (batch, *x.shape[1:])).reshape(-1)
    seeds = None if arrays.seeds is None else jax.lax.bitcast_convert_type(arrays.seeds, jnp.int32)
    known = {
        "slopes": every(arrays.alibi_slopes),
        "sinks": every(arrays.sinks),
        "seeds": every(seeds),
    }
    if steps is not None:
        known |= {"table": steps.table, "contents": steps.contents, "rows": steps.rows}
    known = {name: jnp.asarray(x) for name, x in known.items() if x is not None}
    if not known:
        known = {"none": jnp.zeros(1, jnp.int32)}
    return Scalars(tuple(known), tuple(known.values()))


def entry_of(steps: Steps, scalars: Any, program: Any, step: Any) -> tuple[Entry, Any]:
    """The entry of a step of a program, counted over batch and heads, and the number of its contents."""
    row = 0 if steps.rows is None else scalars.rows[program]
    at = row * steps.stride + step
    return unpacked(scalars.table[at]), 0 if steps.contents is None else scalars.contents[at]


def head_of(form: Form, scalars: Any, number: Any) -> Head:
    """The numbers of a head, counted over batch and heads."""
    seeds = (
        ()
        if form.dropout == 0
        else tuple(scalars.seeds[number * form.seed_words + n] for n in range(form.seed_words))
    )
    return Head(scalars.slopes[number] if form.alibi else 0.0, seeds)


def form_of(
    arrays: AttentionArrays,
    spec: AttentionSpec,
    block_q: int,
    block_k: int,
    *,
    contents: Any,
    by_key: bool = False,
) -> Form:
    """Queries are as wide as both parts of a key."""
    size = spec.block_size
    inside = size is None or (size[0] % block_q == 0 and size[1] % block_k == 0)
    return Form(
        block_q=block_q,
        block_k=block_k,
        queries=arrays.q.shape[1],
        keys=arrays.k.shape[1],
        blind=_blind(arrays, spec),
        scale=spec.scale,
        cap=spec.logits_soft_cap,
        left=spec.left,
        right=spec.right,
        offset=spec.offset,
        rows=arrays.rows is not None,
        segments=arrays.q_segments is not None,
        alibi=arrays.alibi_slopes is not None,
        bias=arrays.bias is not None,
        mask=arrays.mask is not None,
        bits=contents is not None,
        blocks=None if inside else size,
        sinks=arrays.sinks is not None,
        dropout=spec.dropout_rate,
        seed_words=0 if arrays.seeds is None else arrays.seeds.shape[-1],
        dtype=arrays.q.dtype,
        by_key=by_key,
        shared=arrays.q.shape[3] - arrays.k.shape[3],
    )


def _blind(arrays: AttentionArrays, spec: AttentionSpec) -> bool:
    """Returns whether a key may be seen by no query, or a query see no key."""
    if arrays.rows is not None or arrays.q_segments is not None or arrays.mask is not None or spec.listed:
        return True
    return spec.ranged and not spec.covers(arrays.q.shape[1], arrays.k.shape[1])
