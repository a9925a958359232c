"""Lowers a `Mask` to what kernels can use, exactly: static window, key ranges, segments, dense remainder."""

from typing import Any, NamedTuple, TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from ..._broadcast import aligned, like
from ..._values import FAR
from ..spec import RowRanges

if TYPE_CHECKING:
    from .mask import Mask


class Lowered(NamedTuple):
    """A mask in the terms of `AttentionSpec` and `AttentionArrays`; arrays keep their own leading axes."""

    left: int | None
    right: int | None
    offset: int
    rows: RowRanges | None
    segments: tuple[Array, Array] | None
    dense: Array | None

    def as_array(self, num_queries: int, num_keys: int) -> Array:
        """Booleans `[..., H or 1, T, S]`."""
        keys = jnp.arange(num_keys)
        if self.rows is None:
            position = jnp.arange(num_queries) + self.offset
            start, end = window_ends(position, self.left, self.right, num_keys)
        else:
            start, end = self.rows.start, self.rows.end
        keys = like(keys, start[..., None])
        seen = ((keys >= start[..., None]) & (keys < end[..., None]))[..., None, :, :]
        if self.segments is not None:
            seen = _both(seen, _same_segment(*self.segments))
        return _both(seen, self.dense)


def lower_mask(mask: "Mask", num_queries: int, num_keys: int, q_offset: Any | None) -> Lowered:
    # Longer than any sequence is as good as unbounded, and sums with positions fit 32 bits.
    left, right = (None if side is None else min(side, 2 * FAR) for side in mask.window)
    right = 0 if mask.is_causal and (right is None or right > 0) else right
    if q_offset is None:
        q_offset = num_keys - num_queries
    pairs = mask.segments
    segments, dense = (pairs[0] if pairs else None), mask.dense
    for pair in pairs[1:]:
        dense = _both(_same_segment(*pair), dense)
    by_window = isinstance(q_offset, int) and not (mask.chunk_sizes or mask.windows or mask.chunks)
    ranges = (mask.prefix_lengths, mask.q_lengths, mask.kv_lengths, mask.cu_seqlens)
    _check_types(mask, num_queries, num_keys)
    if by_window and all(r is None for r in ranges) and not mask.type_runs:
        if mask.types:
            dense = _with_types(mask, dense, jnp.arange(num_queries, dtype=jnp.int32) + q_offset, num_keys)
        return Lowered(left, right, int(q_offset), None, segments, dense)
    rows = _row_ranges(mask, left, right, num_queries, num_keys, q_offset)
    dense = _with_types(mask, dense, rows.position, num_keys)
    return Lowered(None, None, 0, rows, segments, dense)


def window_ends(position: Array, left: Any, right: Any, num_keys: int) -> tuple[Array, Array]:
    """First and one-past-last visible key of a query at `position`, within the keys there are. A side is an int, an array that
    broadcasts with `position`, or `None`."""
    start = jnp.zeros_like(position) if left is None else jnp.clip(position - left, 0, num_keys)
    end = jnp.full_like(position, num_keys) if right is None else jnp.clip(position + right + 1, 0, num_keys)
    return start, end


def _check_types(mask: "Mask", num_queries: int, num_keys: int) -> None:
    for q_ids, kv_ids in (*mask.types, *mask.type_runs):
        if q_ids.shape[-1] != num_queries or kv_ids.shape[-1] != num_keys:
            raise ValueError(
                f"mask: expected token types for {num_queries} queries and {num_keys} keys, received {q_ids.shape} and "
                f"{kv_ids.shape}; give Mask.token_types both."
            )


def _with_types(mask: "Mask", dense: Array | None, position: Array, num_keys: int) -> Array | None:
    """`dense` and, for every pair of types, causal or of the same one: a union, which key ranges cannot say. `[..., 1, T, S]`."""
    for q_ids, kv_ids in mask.types:
        at, q_ids, kv_ids = aligned(position[..., None], q_ids[..., :, None], kv_ids[..., None, :])
        behind = like(jnp.arange(num_keys, dtype=jnp.int32), at) <= at
        seen = (behind | ((q_ids == kv_ids) & (q_ids != 0)))[..., None, :, :]
        dense = _both(seen, dense)
    return dense


def _type_run_ends(q_ids: Array, kv_ids: Array, position: Array) -> Array:
    """One past the last key that causality or the run of the query's own type lets it see."""
    num_keys = kv_ids.shape[-1]
    if num_keys == 0:
        return jnp.zeros_like(position)
    q_ids, kv_ids, position = aligned(q_ids, kv_ids, position)
    index = jnp.arange(num_keys, dtype=jnp.int32)
    index = like(index, kv_ids)
    changes = jnp.concatenate([kv_ids[..., 1:] != kv_ids[..., :-1], jnp.ones_like(kv_ids[..., :1], bool)], -1)
    ends = jax.lax.cummin(jnp.where(changes, index + 1, num_keys), axis=kv_ids.ndim - 1, reverse=True)
    lead = jnp.broadcast_shapes(q_ids.shape[:-1], kv_ids.shape[:-1], position.shape[:-1])
    # The run ahead of a query begins at the key behind its own place.
    following = jnp.broadcast_to(jnp.clip(position + 1, 0, num_keys - 1), (*lead, position.shape[-1]))
    at = lambda keys: jnp.take_along_axis(jnp.broadcast_to(keys, (*lead, num_keys)), following, axis=-1)
    ahead = (position + 1 < num_keys) & (q_ids != 0) & (at(kv_ids) == q_ids)
    return jnp.where(ahead, at(ends), position + 1)


def _both(seen: Array, other: Array | None) -> Array:
    """What both show; `None` shows everything."""
    if other is None:
        return seen
    seen, other = aligned(seen, other)
    return seen & other


def _same_segment(q_ids: Array, kv_ids: Array) -> Array:
    """`[..., 1, T, S]`."""
    q_ids, kv_ids = aligned(q_ids[..., :, None], kv_ids[..., None, :])
    return ((q_ids == kv_ids) & (q_ids >= 0))[..., None, :, :]


def _row_ranges(
    mask: "Mask", left: int | None, right: int | None, num_queries: int, num_keys: int, q_offset: Any
) -> RowRanges:
    index = jnp.arange(num_queries, dtype=jnp.int32)
    if mask.cu_seqlens is not None:
        first, last, position, real = _packed(*mask.cu_seqlens, index)
    else:
        position = jnp.clip(jnp.asarray(q_offset, jnp.int32), -FAR, FAR)[..., None]
        position = position + like(index, position)
        first, last, real = jnp.int32(0), jnp.int32(num_keys), jnp.bool_(True)
    start, end = window_ends(position, left, right, num_keys)
    start, end = jnp.maximum(start, first), jnp.minimum(end, last)
    for window in mask.windows:
        start, end, at, *sides = _ranked(
            start, end, position, *(None if w is None else w[..., None] for w in window)
        )
        low, high = window_ends(at, *sides, num_keys)
        start, end = jnp.maximum(start, low), jnp.minimum(end, high)
    for size in (
        *(min(size, 2 * FAR) for size in mask.chunk_sizes),
        *(size[..., None] for size in mask.chunks),
    ):
        start, end, at, base, size = _ranked(start, end, position, first, size)
        chunk = (at - base) // size
        start, end = jnp.maximum(start, base + chunk * size), jnp.minimum(end, base + (chunk + 1) * size)
    if mask.prefix_lengths is not None:
        prefix = jnp.clip(mask.prefix_lengths, 0, num_keys)[..., None]
        first, prefix, behind = _ranked(first, prefix, position + 1)
        prefix = first + prefix
        end = jnp.minimum(*aligned(end, jnp.maximum(behind, prefix)))
    for pair in mask.type_runs:
        end = jnp.minimum(*aligned(end, _type_run_ends(*pair, position)))
    if mask.kv_lengths is not None:
        end = jnp.minimum(*aligned(end, mask.kv_lengths[..., None]))
    if mask.q_lengths is not None:
        lengths = mask.q_lengths[..., None]
        real = _both(real, like(index, lengths) < lengths)
    real, start, end, position = aligned(real, start, end, position)
    start, end, position = jnp.broadcast_arrays(jnp.where(real, start, 0), jnp.where(real, end, 0), position)
    return RowRanges(start.astype(jnp.int32), end.astype(jnp.int32), position.astype(jnp.int32))


def _ranked(*arrays: Any) -> list[Any]:
    """All arrays with as many axes as the one that has most; numbers and what is absent as they are."""
    rank = max(jnp.ndim(x) for x in arrays if x is not None)
    return [
        x if x is None or isinstance(x, int) or x.ndim == 0 else x.reshape((1,) * (rank - x.ndim) + x.shape)
        for x in arrays
    ]


def _packed(q_starts: Array, kv_starts: Array, index: Array) -> tuple[Array, Array, Array, Array]:
    """For every packed query: its sequence's first and one-past-last key, its position in packed keys, and whether it is real."""
    # Counting the sequences that have ended needs one pass over [T, N] on any device; a search would loop there.
    ended = jnp.sum(index[:, None] >= q_starts[None, 1:], axis=1)
    number = jnp.minimum(ended, q_starts.shape[0] - 2)
    first, last = kv_starts[number], kv_starts[number + 1]
    position = last - (q_starts[number + 1] - index)
    return first, last, position, (index >= q_starts[0]) & (index < q_starts[-1])
