"""Defines what the kernels of a call read: arrays in the layout of a TPU, each with the block that a step needs, and numbers in scalar memory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...launch.by_name import given
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


class Rows(NamedTuple):
    """Holds what gradients need of each query: its cotangent `[B, T, H, V]`; and `[B, H, T]` its lse in log2 units, infinite if it sees nothing, and
    delta."""

    do: Array
    lse: Array
    delta: Array


def divided(x: Any, by: int) -> Any:
    """Of a number that is not negative, which takes one operation, not the six of `//`."""
    return x if by == 1 else jax.lax.div(x, jnp.int32(by))


def modulo(x: Any, by: int) -> Any:
    """Works as `divided`."""
    return jnp.int32(0) if by == 1 else jax.lax.rem(x, jnp.int32(by))


def padded(x: Array, axis: int, block: int, value: Any = 0) -> Array:
    """The array with an axis filled up to whole blocks."""
    short = -x.shape[axis] % block
    widths = [(0, short if n == axis else 0) for n in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if short else x


def query_tile(place: Place) -> tuple[Any, ...]:
    """Where a tile of queries is in an array `[B, H, T, D]`."""
    return place.batch, place.head, place.q_tile, 0


def key_tile(place: Place) -> tuple[Any, ...]:
    """Where a tile of keys is in an array `[B, K, S, D]`."""
    return place.batch, place.kv_head, place.k_tile, 0


def _by_head(x: Array, block: int, at: Callable[[Place], tuple[Any, ...]]) -> Operand:
    """`[B, T, H, D]` as `[B, H, tiles * block, D]`, which one copy makes."""
    return Operand(padded(x.swapaxes(1, 2), 2, block), (None, None, block, x.shape[3]), at)


def of_call(
    arrays: AttentionArrays, form: Form, k_rope: Array | None, contents: Array | None = None
) -> Operands:
    """The arrays that all kernels of a call read. `contents`: those of partly visible tiles."""
    block_q, block_k = form.block_q, form.block_k
    known = {
        "q": _by_head(arrays.q, block_q, query_tile),
        "k": _by_head(arrays.k, block_k, key_tile),
        "v": _by_head(arrays.v, block_k, key_tile),
    }
    if k_rope is not None:
        rope = padded(k_rope, 1, block_k)
        known["k_rope"] = Operand(rope, (None, block_k, form.shared), lambda p: (p.batch, p.k_tile, 0))
    if form.packed_rows:
        known["queries"] = _query_rows(arrays, form)
    if arrays.kv_segments is not None:
        known["key_segments"] = _key_segments(arrays.kv_segments, form)
    batch = arrays.q.shape[0]
    if arrays.bias is not None:
        known["bias"] = _over_scores(arrays.bias, form.spec.bias_run, batch, form)
    if arrays.mask is not None:
        known["mask"] = _over_scores(arrays.mask.astype(jnp.int8), form.spec.mask_run, batch, form)
    if contents is not None:
        known["bits"] = Operand(contents, (None, *contents.shape[1:]), lambda p: (p.content, 0, 0))
    if form.blocks is not None:
        assert arrays.blocks is not None
        known["map"] = _of_map(arrays.blocks, form.blocks, form)
    return known


def of_rows(rows: Rows, form: Form) -> Operands:
    """What gradients need of each query; padded with what keeps padding without weight."""
    at, block = lambda p: (p.batch, p.head, 0, p.q_tile), (None, None, 1, form.block_q)
    # An infinite lse makes weights zero.
    lse, delta = padded(rows.lse, 2, form.block_q, jnp.inf), padded(rows.delta, 2, form.block_q)
    return {
        "do": _by_head(rows.do, form.block_q, query_tile),
        "lse": Operand(lse[:, :, None], block, at),
        "delta": Operand(delta[:, :, None], block, at),
    }


def _query_rows(arrays: AttentionArrays, form: Form) -> Operand:
    """Ranges, positions and segments of queries side by side, in rows or in columns."""
    length, ids = arrays.q.shape[1], arrays.q_segments
    rows = (None, None, None) if arrays.rows is None else arrays.rows
    known = [*rows, None if ids is None else jnp.where(ids < 0, _NOBODY, ids)]
    batch = max(1 if x is None else x.shape[0] for x in known)
    fill = (0, 0, 0, _NOBODY)
    each = []
    for x, value in zip(known, fill, strict=True):
        numbers = jnp.asarray(value if x is None else x, jnp.int32)
        each.append(padded(jnp.broadcast_to(numbers, (batch, length)), 1, form.block_q, value))
    together = jnp.stack(each, axis=1 if form.by_key else 2)
    row = _row(batch)
    if form.by_key:
        return Operand(padded(together, 1, 8), (None, 8, form.block_q), lambda p: (row(p), 0, p.q_tile))
    return Operand(padded(together, 2, LANES), (None, form.block_q, LANES), lambda p: (row(p), p.q_tile, 0))


def _key_segments(ids: Array, form: Form) -> Operand:
    ids = jnp.where(ids < 0, -1, ids).astype(jnp.int32)
    ids, row = padded(ids, 1, form.block_k, -1), _row(ids.shape[0])
    if form.by_key:  # a column of a register
        columns = jnp.broadcast_to(ids[:, :, None], (*ids.shape, LANES))
        return Operand(columns, (None, form.block_k, LANES), lambda p: (row(p), p.k_tile, 0))
    return Operand(ids[:, None], (None, 1, form.block_k), lambda p: (row(p), 0, p.k_tile))


def _row(rows: int) -> Callable[[Place], Any]:
    return lambda p: p.batch if rows > 1 else 0


def _over_scores(x: Array, run: int, batch: int, form: Form) -> Operand:
    """A bias or mask `[rows, H or 1, T or 1, S or 1]`. Each of its rows serves `run` consecutive batch rows, and the rows repeat."""
    rows, heads, queries, keys = x.shape
    x = padded(x, 2, form.block_q if queries > 1 else 1)
    x = padded(x, 3, form.block_k if keys > 1 else 1)
    block = (form.block_q if queries > 1 else 1, form.block_k if keys > 1 else 1)

    def at(p: Place) -> tuple[Any, ...]:
        row = 0 if rows == 1 else p.batch if rows == batch else modulo(divided(p.batch, run), rows)
        tile = (p.q_tile if queries > 1 else 0, p.k_tile if keys > 1 else 0)
        return (row, p.head if heads > 1 else 0, *(tile[::-1] if form.by_key else tile))

    if form.by_key:
        x, block = x.mT, block[::-1]
    return Operand(x, (None, None, *block), at)


def _of_map(blocks: Array, size: tuple[int, int], form: Form) -> Operand:
    """The part of a map `[B or 1, H or 1, M, N]` that each tile touches, in bfloat16, its rows and columns filled up for products."""
    # Filled up to whole registers of bfloat16.
    rows, columns = (LANES, 16) if form.by_key else (16, LANES)
    down = _touched(form.queries, form.block_q, size[0], blocks.shape[2], rows)
    along = _touched(form.keys, form.block_k, size[1], blocks.shape[3], columns)
    parts = blocks[:, :, down][..., along]  # [B or 1, H or 1, query tiles, rows, key tiles, columns]
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


def scalars_of(arrays: AttentionArrays, steps: Steps | None) -> dict[str, Array]:
    """The numbers that are prefetched to scalar memory, absent ones left out."""
    batch = arrays.q.shape[0]
    every = lambda x: None if x is None else jnp.broadcast_to(x, (batch, *x.shape[1:])).reshape(-1)
    seeds = None if arrays.seeds is None else jax.lax.bitcast_convert_type(arrays.seeds, jnp.int32)
    known = {"slopes": every(arrays.alibi_slopes), "sinks": every(arrays.sinks), "seeds": every(seeds)}
    if steps is not None:
        known |= {"table": steps.table, "contents": steps.contents, "rows": steps.rows}
    known = {name: jnp.asarray(x) for name, x in known.items() if x is not None}
    return known or {"none": jnp.zeros(1, jnp.int32)}


def entry_of(steps: Steps, scalars: Any, program: Any, step: Any) -> tuple[Entry, Any]:
    """The entry of a step of a program, counted over batch and heads, and the number of its contents."""
    row = 0 if steps.rows is None else scalars.rows[program]
    at = row * steps.stride + step
    return unpacked(scalars.table[at]), 0 if steps.contents is None else scalars.contents[at]


def head_of(form: Form, scalars: Any, number: Any) -> Head:
    """The numbers of a head, counted over batch and heads."""
    seeds = tuple(scalars.seeds[number * form.seed_words + n] for n in range(form.seed_words))
    return Head(number, scalars.slopes[number] if form.alibi else 0.0, seeds)


def form_of(
    arrays: AttentionArrays, spec: AttentionSpec, tile: tuple[int, int], bits: bool, by_key: bool = False
) -> Form:
    """Queries are as wide as both parts of a key. `bits`: partly visible tiles have contents."""
    block_q, block_k = tile
    size = spec.block_size
    # Tiles that are parts of blocks are visible as a whole or not at all, and need no map.
    inside = size is None or (size[0] % block_q == 0 and size[1] % block_k == 0)
    return Form(
        spec=spec,
        block_q=block_q,
        block_k=block_k,
        queries=arrays.q.shape[1],
        keys=arrays.k.shape[1],
        blind=_blind(arrays, spec),
        bits=bits,
        blocks=None if inside else size,
        seed_words=0 if arrays.seeds is None else arrays.seeds.shape[-1],
        dtype=arrays.q.dtype,
        by_key=by_key,
        shared=arrays.q.shape[3] - arrays.k.shape[3],
        rows=arrays.rows is not None,
        **given(segments=arrays.q_segments, alibi=arrays.alibi_slopes, bias=arrays.bias),
        **given(mask=arrays.mask, sinks=arrays.sinks),
    )


def _blind(arrays: AttentionArrays, spec: AttentionSpec) -> bool:
    """Returns whether a key may be seen by no query, or a query see no key."""
    if arrays.rows is not None or arrays.q_segments is not None or arrays.mask is not None or spec.listed:
        return True
    return spec.ranged and not spec.covers(arrays.q.shape[1], arrays.k.shape[1])
