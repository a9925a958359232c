"""The exact lowering of a `Mask` to a static window, key ranges, segments and a dense remainder, and the helpers for its parts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..._broadcast import aligned, like
from ..spec import RowRanges
from .functions import depends_on_head, evaluate, PairFunction, traced
from .pattern import Pattern

Pair = tuple[Array, Array]


class Lowered(NamedTuple):
    """A mask in terms of `AttentionSpec` and `AttentionArrays`; arrays keep their own leading axes."""

    left: int | None
    right: int | None
    offset: int
    rows: RowRanges | None
    segments: tuple[Array, Array] | None
    dense: Array | None
    pattern: Pattern | None = None
    blocks: Array | None = None
    """A map `[..., H or 1, query blocks, key blocks]`."""
    block_size: tuple[int, int] | None = None

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
            seen = both(seen, same_segment(*self.segments))
        if self.pattern is not None:
            heads = jnp.arange(self.pattern.heads, dtype=jnp.int32) if self.pattern.heads else None
            index = jnp.arange(num_queries, dtype=jnp.int32)
            seen = both(seen, self.pattern.seen(heads, index, jnp.arange(num_keys, dtype=jnp.int32)))
        if self.blocks is not None:
            assert self.block_size is not None
            seen = both(seen, by_pair(self.blocks, self.block_size, num_queries, num_keys))
        return both(seen, self.dense)


def window_ends(position: Array, left: Any, right: Any, num_keys: int) -> tuple[Array, Array]:
    """First and one-past-last visible key of a query at `position`, clipped to the existing keys. A side is an int, an array
    broadcastable with `position`, or `None`."""
    start = jnp.zeros_like(position) if left is None else jnp.clip(position - left, 0, num_keys)
    end = jnp.full_like(position, num_keys) if right is None else jnp.clip(position + right + 1, 0, num_keys)
    return start, end


def with_types(pairs: tuple[Pair, ...], dense: Array | None, position: Array, num_keys: int) -> Array | None:
    """`dense` intersected, for every pair of types, with causal-or-same-type, a union that key ranges cannot express. `[..., 1, T, S]`."""
    for q_ids, kv_ids in pairs:
        at, q_ids, kv_ids = aligned(position[..., None], q_ids[..., :, None], kv_ids[..., None, :])
        behind = like(jnp.arange(num_keys, dtype=jnp.int32), at) <= at
        seen = (behind | ((q_ids == kv_ids) & (q_ids != 0)))[..., None, :, :]
        dense = both(seen, dense)
    return dense


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
    at = lambda keys: jnp.take_along_axis(jnp.broadcast_to(keys, (*lead, num_keys)), following, axis=-1)
    ahead = (position + 1 < num_keys) & (q_ids != 0) & (at(kv_ids) == q_ids)
    return jnp.where(ahead, at(ends), position + 1)


def by_pair(blocks: Array, size: tuple[int, int], num_queries: int, num_keys: int) -> Array:
    """A map of blocks `[..., M, N]` as `[..., T, S]`."""
    rows = jnp.repeat(blocks, size[0], axis=-2)[..., :num_queries, :]
    return jnp.repeat(rows, size[1], axis=-1)[..., :num_keys]


def of_positions(function: PairFunction, positions: Array, num_keys: int, num_heads: int | None) -> Array:
    """A function of head, position and key as `[..., H or 1, T, S]`, for positions `[..., T]` that are not known while tracing."""
    heads = 1
    if depends_on_head(traced(function)):
        heads = heads_needed(num_heads)
    keys, numbers = jnp.arange(num_keys, dtype=jnp.int32), jnp.arange(heads, dtype=jnp.int32)
    rows = positions.reshape(-1, positions.shape[-1])
    seen = jax.vmap(lambda row: evaluate(function, numbers, row, keys))(rows)
    return seen.reshape(*positions.shape[:-1], *seen.shape[1:])


def heads_needed(num_heads: int | None) -> int:
    if num_heads is None:
        raise ValueError(
            "num_heads: expected the number of heads, as the mask depends on the head, received None; pass num_heads=."
        )
    return num_heads


def both(seen: Array, other: Array | None) -> Array:
    """The intersection; `None` hides nothing."""
    if other is None:
        return seen
    seen, other = aligned(seen, other)
    return seen & other


def either(seen: Array, other: Array) -> Array:
    """The union."""
    seen, other = aligned(seen, other)
    return seen | other


def same_segment(q_ids: Array, kv_ids: Array) -> Array:
    """`[..., 1, T, S]`."""
    q_ids, kv_ids = aligned(q_ids[..., :, None], kv_ids[..., None, :])
    return ((q_ids == kv_ids) & (q_ids >= 0))[..., None, :, :]


def ranked(*arrays: Any) -> list[Any]:
    """All arrays expanded to the highest rank among them; numbers and `None` unchanged."""
    rank = max(jnp.ndim(x) for x in arrays if x is not None)
    return [
        x if x is None or isinstance(x, int) or x.ndim == 0 else x.reshape((1,) * (rank - x.ndim) + x.shape)
        for x in arrays
    ]


def packed_rows(q_starts: Array, kv_starts: Array, index: Array) -> tuple[Array, Array, Array, Array]:
    """For every packed query: its sequence's first and one-past-last key, its position in packed keys, and whether it is real."""
    # Counting the sequences that have ended takes one pass over [T, N] on any device; a search would loop.
    ended = jnp.sum(index[:, None] >= q_starts[None, 1:], axis=1)
    number = jnp.minimum(ended, q_starts.shape[0] - 2)
    first, last = kv_starts[number], kv_starts[number + 1]
    position = last - (q_starts[number + 1] - index)
    return first, last, position, (index >= q_starts[0]) & (index < q_starts[-1])
