"""Operations on one tile of scores, shared by all Pallas kernels of attention.

A tile is `[BQ, BK]` or, in the kernel of the keys' gradient, `[BK, BQ]`, where `by_key` holds. Vectors over queries and keys come in the shape
that broadcasts to the tile. Scores are kept in units of log2.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from ...launch.by_name import LOG2E, MOST_NATURAL
from ..philox import philox, threshold
from ..spec import AttentionSpec
from .steps import PARTLY, WHOLE

LANES, _SUBLANES = 128, 8
QUERY_ROWS = ("start", "end", "position", "segment")
"""What the packed rows of queries hold, by column or row."""


@dataclasses.dataclass(frozen=True)
class Form:
    """Holds what is compiled into the kernels of a call."""

    spec: AttentionSpec
    block_q: int
    block_k: int
    queries: int
    keys: int
    """Queries and keys that the call has; those behind them are padding."""
    blind: bool
    """Whether a key may be seen by no query, or a query see no key. Then padding must see nothing either."""
    rows: bool
    segments: bool
    alibi: bool
    bias: bool
    mask: bool
    bits: bool
    blocks: tuple[int, int] | None
    """Queries and keys of a block of the map, if tiles are not parts of blocks."""
    sinks: bool
    seed_words: int
    dtype: Any
    by_key: bool = False
    shared: int = 0
    """Channels of a key that all heads share, behind those of its head."""

    @property
    def folded(self) -> bool:
        """Returns whether the last factor of scores is left to the subtraction of the maximum."""
        return not self.bias and not self.alibi and self.spec.scale > 0

    @property
    def multiplier(self) -> float:
        return (self.spec.logits_soft_cap or self.spec.scale) * LOG2E if self.folded else 1.0

    @property
    def query_axis(self) -> int:
        return 1 if self.by_key else 0

    @property
    def shape(self) -> tuple[int, int]:
        return (self.block_k, self.block_q) if self.by_key else (self.block_q, self.block_k)

    @property
    def ever_whole(self) -> bool:
        """Returns whether a tile may be visible as a whole: a mask may hide any entry."""
        return not self.mask

    @property
    def ever_partly(self) -> bool:
        """Returns whether a tile may be visible in part."""
        ranged = self.spec.ranged or self.keys % self.block_k != 0
        return ranged or self.packed_rows or self.mask or self.bits or self.blocks is not None

    @property
    def packed_rows(self) -> bool:
        """Returns whether queries have numbers of their own."""
        return self.rows or self.segments


def run_step(form: Form, flags: Any, step: Callable[[bool], None]) -> None:
    """Runs `step(masked)` as the flags of an entry say: for a tile that is visible as a whole or in part, or not at all."""
    if form.ever_whole:
        pl.when(flags & WHOLE != 0)(lambda: step(False))
    if form.ever_partly:
        pl.when(flags & PARTLY != 0)(lambda: step(True))


class Head(NamedTuple):
    """Numbers of a batch row and head, and which it is, counted over both."""

    number: Any
    slope: Any
    seeds: tuple[Any, ...]


def dot(form: Form, a: Array, b: Array, *, transposed: bool = False) -> Array:
    """`a @ b`, or `a @ b.T`, summed in float32; float32 operands are multiplied as such."""
    contract = (((1,), (1 if transposed else 0,)), ((), ()))
    precision = jax.lax.Precision.HIGHEST if form.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def keys_of(form: Form, refs: Any) -> Array:
    """A tile of keys `[BK, D]`. A product takes both parts in one pass: where the first fills whole registers, joining them moves nothing."""
    own = refs.k[...]
    return jnp.concatenate([own, refs.k_rope[...]], axis=1) if form.shared else own


def wide(x: Array, columns: int) -> Array:
    """A matrix whose columns are all alike, with another number of them."""
    if columns <= x.shape[1]:
        return x[:, :columns]
    return jnp.concatenate([x] * -(-columns // x.shape[1]), axis=1)[:, :columns]


def upright(row: Array, columns: int = LANES) -> Array:
    """A row of numbers `[1, n]` as `columns` equal columns `[n, columns]`."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :columns]


def positions(form: Form, q_tile: Any, k_tile: Any) -> tuple[Array, Array]:
    """The numbers of queries and keys. Those that vary by row of the tile are computed for the lanes of one register and repeated, those that vary
    by column are one row."""
    (rows, columns), first = form.shape, (q_tile * form.block_q, k_tile * form.block_k)
    down = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 0) + first[form.query_axis]
    along = jax.lax.broadcasted_iota(jnp.int32, (1, columns), 1) + first[1 - form.query_axis]
    down = wide(down, columns)
    return (along, down) if form.by_key else (down, along)


def compared(form: Form, q_tile: Any, k_tile: Any, number: int) -> tuple[Array, Array]:
    """Two arrays whose difference is that of query and key, plus a number. The first repeats its first rows, the second has one number for as many,
    so the compiler compares one register with constants of instructions, and neither keeps nor computes the numbers of rows."""
    (rows, columns), sign = form.shape, -1 if form.by_key else 1
    first = q_tile * form.block_q - k_tile * form.block_k + number
    down, along = (jax.lax.broadcasted_iota(jnp.int32, (_SUBLANES, LANES), axis) for axis in (0, 1))
    near = sign * (down - along) + first
    constant = lambda row: jnp.full((_SUBLANES, LANES), -sign * row, jnp.int32)
    line = jnp.concatenate([constant(row) for row in range(0, rows, _SUBLANES)])
    limit = jnp.concatenate([line + sign * column for column in range(0, columns, LANES)], axis=1)
    return wide(jnp.concatenate([near] * (rows // _SUBLANES)), columns), limit


def query_number(form: Form, refs: Any, name: str) -> Array:
    """One of the `QUERY_ROWS`, broadcastable to the tile."""
    at = QUERY_ROWS.index(name)
    if form.by_key:
        return refs.queries[at : at + 1, :]
    return refs.queries[:, at : at + 1]


def scores(form: Form, qk: Array, refs: Any, head: Head, q_tile: Any, k_tile: Any) -> tuple[Array, Array]:
    """Scores in log2 units, without `form.multiplier`, and the tanh whose square the backward needs."""
    t, cap, scale = qk, form.spec.logits_soft_cap, form.spec.scale
    if cap is not None:
        t = jnp.tanh(qk * (scale / cap))
    s = t
    if not form.folded:
        s = t * (cap * LOG2E) if cap is not None else qk * (scale * LOG2E)
        # Bias and ALiBi come after the soft cap, in natural units.
        if form.bias:
            bias = refs.bias[...].astype(jnp.float32)
            # A finite bias stays finite: only minus infinity hides.
            finite = jnp.clip(bias, -MOST_NATURAL, MOST_NATURAL)
            s = s + jnp.where(jnp.abs(bias) < jnp.inf, finite, bias) * LOG2E
        if form.alibi:
            s = s + (head.slope * LOG2E) * distance(form, refs, q_tile, k_tile)
    return s, t


def distance(form: Form, refs: Any, q_tile: Any, k_tile: Any) -> Array:
    """Key minus position of the query, float32."""
    i, j = positions(form, q_tile, k_tile)
    position = query_number(form, refs, "position") if form.rows else i + form.spec.offset
    return (j - position).astype(jnp.float32)


def visible(form: Form, refs: Any, q_tile: Any, k_tile: Any) -> Array:
    """Returns which entries of the tile are visible; keys past the end are not, queries past the end may be."""
    i, j = positions(form, q_tile, k_tile)
    conditions, spec = [], form.spec
    if form.rows:
        conditions += [j >= query_number(form, refs, "start"), j < query_number(form, refs, "end")]
    else:
        if form.keys % form.block_k:
            conditions.append(j < form.keys)
        if form.blind and form.queries % form.block_q:
            conditions.append(i < form.queries)
        if spec.right is not None:
            near, limit = compared(form, q_tile, k_tile, spec.offset + spec.right)
            conditions.append(near >= limit)
        if spec.left is not None:
            near, limit = compared(form, q_tile, k_tile, spec.offset - spec.left)
            conditions.append(near <= limit)
    if form.segments:
        # Hidden queries have a number that no key has.
        ours = query_number(form, refs, "segment")
        theirs = refs.key_segments[:, :1] if form.by_key else refs.key_segments[:1, :]
        conditions.append(ours == theirs)
    if form.mask:
        conditions.append(refs.mask[...].astype(jnp.int32) != 0)
    if form.bits:
        conditions.append(refs.bits[...].astype(jnp.int32) != 0)
    if form.blocks is not None:
        conditions.append(_of_map(form, refs, q_tile, k_tile))
    if not conditions:
        return jnp.ones(form.shape, bool)
    return jnp.broadcast_to(functools.reduce(jnp.logical_and, conditions), form.shape)


def _of_map(form: Form, refs: Any, q_tile: Any, k_tile: Any) -> Array:
    """The tile's part of a map of blocks, spread over its entries by two products with zeros and ones."""
    assert form.blocks is not None
    part = refs.map[...]  # blocks of this tile's rows by those of its columns
    sides = [(form.block_q, form.blocks[0], q_tile), (form.block_k, form.blocks[1], k_tile)]

    def spread(axis: int) -> Array:
        """Ones where a row or column of the tile is in a block of the part."""
        size, block, tile = sides[form.query_axis if axis == 0 else 1 - form.query_axis]
        shape = (size, part.shape[0]) if axis == 0 else (part.shape[1], size)
        first = jax.lax.div(tile * size, jnp.int32(block))
        own = jax.lax.broadcasted_iota(jnp.int32, shape, axis) + tile * size
        at = jax.lax.broadcasted_iota(jnp.int32, shape, 1 - axis) + first
        return ((own >= at * block) & (own < (at + 1) * block)).astype(part.dtype)

    up, along, exact = spread(0), spread(1), dict(preferred_element_type=jnp.float32)
    lines = jnp.dot(up, part, **exact).astype(part.dtype)
    return jnp.dot(lines, along, **exact) > 0.5


def keep(form: Form, refs: Any, head: Head, q_tile: Any, k_tile: Any) -> Array:
    """Returns which entries survive dropout, as `philox.philox_keep` says."""
    i, j = positions(form, q_tile, k_tile)
    position = query_number(form, refs, "position") if form.rows else i + form.spec.offset
    position, j = jnp.broadcast_to(position, form.shape), jnp.broadcast_to(j, form.shape)
    if form.seed_words == 3:
        position, j = position + head.seeds[2], j + head.seeds[2]
    unsigned = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint32)
    keys = tuple(unsigned(jnp.full(form.shape, seed, jnp.int32)) for seed in head.seeds[:2])
    zero = jnp.zeros(form.shape, jnp.uint32)
    word = philox((keys[0], keys[1]), (unsigned(position), unsigned(j), zero, zero))[0]
    # Signed numbers in the order of the unsigned ones: a TPU compares the former.
    ordered = jax.lax.bitcast_convert_type(word ^ jnp.uint32(1 << 31), jnp.int32)
    return ordered >= jnp.int32(threshold(form.spec.dropout_rate) - (1 << 31))


def some(seen: Array, axis: int) -> Array:
    """Of entries: whether any along an axis is visible, as float32 `[1, n]` (`axis` 0)."""
    return jnp.max(jnp.where(seen, 1.0, 0.0), axis=axis, keepdims=True)


def clean(seen: Array, *columns: Array) -> tuple[Array, ...]:
    """Matrices with one row for each column of the tile, zero where nothing in the column is visible: a hidden row may hold NaN, and 0 * NaN
    is NaN."""
    known = upright(some(seen, 0), LANES)
    return tuple(jnp.where(wide(known, x.shape[1]) > 0, x, jnp.zeros_like(x)) for x in columns)


def temporaries(kernel: str, block_q: int, block_k: int, size: int) -> int:
    """Bytes of the values of a step: scores, weights, and weights as operands; in the backward the gradients of them, too."""
    each = 8 + size if kernel == "forward" else 12 + 2 * size
    return block_q * (block_k * each + 2 * 4 * LANES)
