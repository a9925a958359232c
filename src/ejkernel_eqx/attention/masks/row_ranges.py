"""Parts of a `Mask` as a range of keys for each query."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..._broadcast import aligned, like
from ..._take import take_along
from ..._values import FAR
from ..spec import RowRanges
from .dense import both


def row_ranges(
    mask: Any, left: int | None, right: int | None, num_queries: int, num_keys: int, q_offset: Any
) -> RowRanges:
    index = jnp.arange(num_queries, dtype=jnp.int32)
    first, last, position, real = placed(mask, num_queries, num_keys, q_offset)
    start, end = window_ends(position, left, right, num_keys)
    start, end = jnp.maximum(start, first), jnp.minimum(end, last)
    for window in mask.windows:
        sides = (jnp.int32(2 * FAR) if side is None else side[..., None] for side in window)
        start, end, at, left_of, right_of = aligned(start, end, position, *sides)
        low, high = window_ends(at, left_of, right_of, num_keys)
        start, end = jnp.maximum(start, low), jnp.minimum(end, high)
    static = (jnp.int32(min(size, 2 * FAR)) for size in mask.chunk_sizes)
    for size in (*static, *(size[..., None] for size in mask.chunks)):
        start, end, at, base, size = aligned(start, end, position, first, size)
        chunk = (at - base) // size
        start, end = jnp.maximum(start, base + chunk * size), jnp.minimum(end, base + (chunk + 1) * size)
    if mask.prefix_lengths is not None:
        prefix = jnp.clip(mask.prefix_lengths, 0, num_keys)[..., None]
        first, prefix, behind = aligned(first, prefix, position + 1)
        prefix = first + prefix
        end = _least(end, jnp.maximum(behind, prefix))
    for q_ids, kv_ids in mask.type_runs:
        end = _least(end, type_run_ends(q_ids, kv_ids, position))
    if mask.kv_lengths is not None:
        end = _least(end, mask.kv_lengths[..., None])
    if mask.q_lengths is not None:
        lengths = mask.q_lengths[..., None]
        real = both(real, like(index, lengths) < lengths)
    real, start, end, position = aligned(real, start, end, position)
    start, end, position = jnp.broadcast_arrays(jnp.where(real, start, 0), jnp.where(real, end, 0), position)
    return RowRanges(start.astype(jnp.int32), end.astype(jnp.int32), position.astype(jnp.int32))


def _least(a: Array, b: Array) -> Array:
    return jnp.minimum(*aligned(a, b))


def placed(mask: Any, num_queries: int, num_keys: int, q_offset: Any) -> tuple[Array, Array, Array, Array]:
    """Places every query: the first and one-past-last key of its sequence, its position among the keys, and whether it is real."""
    index = jnp.arange(num_queries, dtype=jnp.int32)
    if mask.cu_seqlens is not None:
        q_starts, kv_starts = mask.cu_seqlens
        return packed_rows(q_starts, kv_starts, index)
    position = jnp.clip(jnp.asarray(q_offset, jnp.int32), -FAR, FAR)[..., None]
    position = position + like(index, position)
    return jnp.int32(0), jnp.int32(num_keys), position, jnp.bool_(True)


def window_ends(position: Array, left: Any, right: Any, num_keys: int) -> tuple[Array, Array]:
    """First and one-past-last visible key of a query at `position`, clipped to the existing keys. A side is an int, an array
    broadcastable with `position`, or `None`."""
    start = jnp.zeros_like(position) if left is None else jnp.clip(position - left, 0, num_keys)
    end = jnp.full_like(position, num_keys) if right is None else jnp.clip(position + right + 1, 0, num_keys)
    return start, end


def type_run_ends(q_ids: Array, kv_ids: Array, position: Array) -> Array:
    """One past the last key that is visible causally or through the run of the query's own type."""
    num_keys = kv_ids.shape[-1]
    if num_keys == 0:
        return jnp.zeros_like(position)
    q_ids, kv_ids, position = aligned(q_ids, kv_ids, position)
    index = jnp.arange(num_keys, dtype=jnp.int32)
    index = like(index, kv_ids)
    changes = jnp.concatenate([kv_ids[..., 1:] != kv_ids[..., :-1], jnp.ones_like(kv_ids[..., :1], bool)], -1)
    ends = jax.lax.cummin(jnp.where(changes, index + 1, num_keys), axis=kv_ids.ndim - 1, reverse=True)
    lead = jnp.broadcast_shapes(q_ids.shape[:-1], kv_ids.shape[:-1], position.shape[:-1])
    # The run ahead of a query begins at the key after its own position.
    following = jnp.broadcast_to(jnp.clip(position + 1, 0, num_keys - 1), (*lead, position.shape[-1]))
    at = lambda keys: take_along(jnp.broadcast_to(keys, (*lead, num_keys)), following, axis=-1)
    ahead = (position + 1 < num_keys) & (q_ids != 0) & (at(kv_ids) == q_ids)
    return jnp.where(ahead, at(ends), position + 1)


def packed_rows(q_starts: Array, kv_starts: Array, index: Array) -> tuple[Array, Array, Array, Array]:
    """Places every packed query: its sequence's first and one-past-last key, its position in packed keys, and whether it is real."""
    # Counting the sequences that have ended takes one pass over [T, N] on any device; a search would loop.
    ended = jnp.sum(index[:, None] >= q_starts[None, 1:], axis=1)
    number = jnp.minimum(ended, q_starts.shape[0] - 2)
    first, last = kv_starts[number], kv_starts[number + 1]
    position = last - (q_starts[number + 1] - index)
    return first, last, position, (index >= q_starts[0]) & (index < q_starts[-1])
