"""Defines which tiles of scores a kernel runs, as one list of steps for each row of batch and heads, in a table that is prefetched to scalar memory.

A step is a tile that is not hidden as a whole. The steps of one tile of the kernel's own side (queries, or keys for their gradient) are
consecutive, so that its sums stay in vector memory. A tile that nothing is visible from has one step that computes nothing, so its results are
written too. Entries are packed into 32 bits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..masks.call_lists import kinds_of
from ..masks.tile_lists import grids_of
from ..masks.tile_shape import FULL, NONE, PARTIAL, Shape
from ..masks.tile_table import overlap
from ..spec import AttentionArrays, AttentionSpec

FIRST, LAST, WHOLE, PARTLY = 1, 2, 4, 8
"""Bits of an entry: the first and last step of its own tile, and whether the tile is visible as a whole or in part; neither if it is hidden."""

# Where numbers begin in an entry: of the own tile, the other tile, and the head of its group.
_OWN, _OTHER, _HEAD = 4, 15, 26
MOST_TILES, MOST_HEADS = 1 << 11, 1 << 6


class Steps(NamedTuple):
    """- `table`, `contents`: int32 `[rows * stride]`: entries, and for each partly visible tile which pattern of bits it has.
    - `count`: how many steps run, the most of any row: an int if known while tracing.
    - `rows`: int32 `[B * heads]`: which row a program reads; `None` if there is one row.
    - `split_heads`: whether an entry names a head of the group, as heads differ; else every entry is for all of them.
    """

    table: Any
    contents: Any
    count: Any
    stride: int
    rows: Any
    split_heads: bool


class Entry(NamedTuple):
    flags: Any
    own: Any
    other: Any
    head: Any


def unpacked(entry: Any) -> Entry:
    """The parts of an entry."""
    shifted = lambda begin: jax.lax.shift_right_logical(entry, jnp.int32(begin))
    part = lambda begin, end: shifted(begin) & ((1 << (end - begin)) - 1)
    return Entry(entry & 15, part(_OWN, _OTHER), part(_OTHER, _HEAD), part(_HEAD, 32))


def steps_of(
    arrays: AttentionArrays, spec: AttentionSpec, block_q: int, block_k: int, by_key: bool
) -> tuple[Steps, Array | None]:
    """The steps of kernels that keep a tile of queries or, `by_key`, of keys; and the contents of partly visible tiles, `[patterns, rows, columns]`.
    A program of the latter kernels has all heads of a group, so entries of heads that differ name their head."""
    shape = Shape(arrays.q.shape[1], arrays.k.shape[1], block_q, block_k, by_key)
    kinds, numbers, bits = _grids(arrays, spec, shape)
    batch, kinds_heads = kinds.shape[:2]
    heads = arrays.k.shape[2] if by_key else arrays.q.shape[2]

    def turned(x: Any) -> Any:
        if not by_key:
            return x[:, :, :, None]
        return x.reshape(x.shape[0], min(heads, x.shape[1]), -1, *x.shape[2:]).transpose(0, 1, 4, 2, 3)

    steps = _listed(turned(kinds), None if bits is None else turned(numbers))
    rows = _row_of_programs((batch, min(heads, kinds_heads)), (arrays.q.shape[0], heads))
    columns = block_q if by_key else block_k
    return steps._replace(rows=rows, split_heads=kinds_heads > 1), _expanded(bits, columns)


def _grids(arrays: AttentionArrays, spec: AttentionSpec, shape: Shape) -> tuple[Any, Any, Any]:
    """Kinds and patterns of all tiles `[B or 1, H or 1, query tiles, key tiles]`, as numpy arrays if they are known while tracing."""
    data = arrays.rows is not None or arrays.q_segments is not None or arrays.blocks is not None
    if data or (spec.pattern is not None and arrays.heads is not None and spec.pattern.heads):
        kinds, numbers, bits = kinds_of(arrays, spec, shape)
    elif spec.pattern is not None:
        rows, kinds, numbers, bits = grids_of(spec.pattern, shape)
        kinds, numbers = kinds[rows][None], numbers[rows][None]
        bits = bits if len(bits) > 1 else None
    else:
        q, k, v = (jnp.zeros((1, x.shape[1], 1, 1)) for x in (arrays.q, arrays.k, arrays.v))
        bare = AttentionArrays(q, k, v)
        with jax.ensure_compile_time_eval():
            touched, whole = (np.asarray(x) for x in overlap(bare, spec, shape.block_q, shape.block_k))
        kinds = np.where(whole, FULL, np.where(touched, PARTIAL, NONE)).astype(np.int8)[:, None]
        numbers, bits = np.zeros_like(kinds, np.int32), None
    if arrays.mask is not None:
        kinds = (np if isinstance(kinds, np.ndarray) else jnp).minimum(kinds, kinds.dtype.type(PARTIAL))
    return kinds, numbers, bits


def _listed(kinds: Any, contents: Any) -> Steps:
    """The steps of grids `[B or 1, heads or 1, own tiles, heads of a group or 1, other tiles]`."""
    xp: Any = np if isinstance(kinds, np.ndarray) else jnp
    own, heads, others = kinds.shape[2:]
    rows, each = kinds.shape[0] * kinds.shape[1], heads * others
    flat = kinds.reshape(rows, own, each)
    alone = (~(flat != NONE).any(-1, keepdims=True)) & (xp.arange(each) == 0)[None, None]
    runs = ((flat != NONE) | alone).reshape(rows, own * each)
    count = runs.sum(-1)
    number = xp.arange(own * each, dtype=xp.int32)[None]
    order = xp.sort(xp.where(runs, number, own * each), axis=-1)  # the steps of each row first
    stride = own * each
    if xp is np:
        stride = int(count.max(initial=0))
        order = order[:, :stride]
    last = xp.take_along_axis(order, xp.maximum(count - 1, 0)[:, None], axis=-1)
    inside = order < own * each
    # Behind its steps a row stays at the last one, and computes nothing.
    place = xp.where(inside, order, last)
    tile, rest = place // each, place % each
    kind = xp.take_along_axis(flat.reshape(rows, -1), place, axis=-1)
    ahead, behind = (xp.pad(tile, ((0, 0), sides), constant_values=-1) for sides in ((1, 0), (0, 1)))
    end = xp.arange(stride)[None] == count[:, None] - 1
    flags = xp.where(tile != ahead[:, :-1], FIRST, 0) | xp.where((tile != behind[:, 1:]) | end, LAST, 0)
    flags = flags | xp.where(kind == FULL, WHOLE, xp.where(kind == PARTIAL, PARTLY, 0))
    flags = xp.where(inside, flags, 0).astype(xp.uint32)
    part = lambda x, begin: x.astype(xp.uint32) << xp.uint32(begin)
    table = flags | part(tile, _OWN) | part(rest % others, _OTHER) | part(rest // others, _HEAD)
    number = None
    if contents is not None:
        contents = xp.broadcast_to(contents, kinds.shape).reshape(rows, -1)
        number = xp.take_along_axis(contents, place, axis=-1).reshape(-1).astype(xp.int32)
    most = stride if xp is np else count.max(initial=0).astype(jnp.int32)
    return Steps(table.reshape(-1).view(xp.int32), number, most, stride, None, False)


def _row_of_programs(have: tuple[int, int], programs: tuple[int, int]) -> np.ndarray | None:
    """The row of each program, `[B * heads]`, among rows for all or for each batch row, and for all or for each head."""
    if have == (1, 1):
        return None
    batch, heads = np.meshgrid(np.arange(programs[0]), np.arange(programs[1]), indexing="ij")
    rows = np.where(have[0] > 1, batch, 0) * have[1] + np.where(have[1] > 1, heads, 0)
    return rows.reshape(-1).astype(np.int32)


def _expanded(bits: Any, columns: int) -> Array | None:
    """int8 `[patterns, rows, columns]` of packed bits."""
    if bits is None:
        return None
    each = (jnp.asarray(bits)[..., None] >> jnp.arange(32, dtype=jnp.int32).reshape(1, 1, 1, 32)) & 1
    return each.reshape(*bits.shape[:2], -1)[..., :columns].astype(jnp.int8)
