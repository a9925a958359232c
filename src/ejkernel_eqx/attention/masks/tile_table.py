"""Tables of the tiles that a ragged mask touches, which let an opaque kernel skip everything invisible.

Plain JAX on small integer arrays, computed before the kernel. A row of a table is `(lo, a, b, hi)`: tiles outside `lo .. hi` are
invisible, tiles `a .. b` are fully visible, and the others need their mask.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..spec import AttentionArrays, AttentionSpec
from .row_ranges import window_ends

_FAR = jnp.iinfo(jnp.int32).max


class Seen(NamedTuple):
    """int8 flags: which queries `[B or 1, T]` see any key and which keys `[B or 1, S]` are seen by any query."""

    queries: Array
    keys: Array


def row_ranges(arrays: AttentionArrays, spec: AttentionSpec) -> tuple[Array, Array]:
    """First and one-past-last visible key of every query, `[B or 1, T]`, by ranges alone."""
    if arrays.rows is not None:
        return arrays.rows.start, arrays.rows.end
    position = jnp.arange(arrays.q.shape[1], dtype=jnp.int32) + spec.offset
    start, end = window_ends(position, spec.left, spec.right, arrays.k.shape[1])
    return start[None], end[None]


def seen(arrays: AttentionArrays, spec: AttentionSpec) -> Seen:
    """Marks queries and keys by ranges and segments. A marked query may see nothing if its segment has no key in its range; keys are exact."""
    start, end = row_ranges(arrays, spec)
    queries, ids, key_ids = start < end, arrays.q_segments, arrays.kv_segments
    if ids is None or key_ids is None:
        keys = _covered(start, end, arrays.k.shape[1])
    else:
        queries = queries & (ids >= 0)
        itself = spec.sees_itself and arrays.rows is None
        keys = key_ids >= 0 if itself else _covered_in_segment(queries, start, end, ids, key_ids)
    return Seen(queries.astype(jnp.int8), keys.astype(jnp.int8))


def _covered_in_segment(queries: Array, start: Array, end: Array, ids: Array, key_ids: Array) -> Array:
    """Keys within the range of any of the `queries` with the key's id. As `_covered`, but the sum runs over the keys and the ends of ranges
    in the order of ids, then positions; at one position a key comes last."""
    batch, keys = max(len(queries), len(key_ids)), key_ids.shape[1]
    j = jnp.arange(keys, dtype=jnp.int32)
    ends = [2 * jnp.clip(x, 0, keys) for x in (start, end)]
    real = queries.astype(jnp.int32)
    parts = (
        (ids, ids, key_ids),
        (*ends, (2 * j + 1)[None]),
        (real, -real, jnp.zeros_like(key_ids)),
        (jnp.full_like(ids, keys), jnp.full_like(ids, keys), j[None]),
    )
    rows = lambda x: jnp.broadcast_to(x, (batch, x.shape[1]))
    events = tuple(jnp.concatenate([rows(x) for x in part], axis=1) for part in parts)
    _, _, steps, index = jax.lax.sort(events, num_keys=2)
    covered = jnp.cumsum(steps, axis=1) > 0
    return jnp.zeros((batch, keys), bool).at[jnp.arange(batch)[:, None], index].set(covered, mode="drop")


def _covered(start: Array, end: Array, keys: int) -> Array:
    """Keys within any query's range: the cumulative sum of +1 where a range starts and -1 where it ends."""
    rows, real = jnp.arange(start.shape[0])[:, None], (start < end).astype(jnp.int32)
    steps = jnp.zeros((start.shape[0], keys + 1), jnp.int32)
    steps = steps.at[rows, jnp.clip(start, 0, keys)].add(real).at[rows, jnp.clip(end, 0, keys)].add(-real)
    return jnp.cumsum(steps, axis=1)[:, :keys] > 0


def key_tile_table(arrays: AttentionArrays, spec: AttentionSpec, block_q: int, block_k: int) -> Array:
    """The key tiles of every query tile: int32 `[B, query tiles, 4]`."""
    touched, whole = overlap(arrays, spec, block_q, block_k)
    return _runs(touched, whole, arrays.q.shape[0])


def query_tile_table(arrays: AttentionArrays, spec: AttentionSpec, block_q: int, block_k: int) -> Array:
    """The query tiles of every key tile: int32 `[B, key tiles, 4]`."""
    touched, whole = overlap(arrays, spec, block_q, block_k)
    return _runs(touched.mT, whole.mT, arrays.q.shape[0])


def overlap(arrays: AttentionArrays, spec: AttentionSpec, block_q: int, block_k: int) -> tuple[Array, Array]:
    """`[B or 1, query tiles, key tiles]`: whether any entry of a tile may be visible, and whether all are."""
    start, end = row_ranges(arrays, spec)
    some = start < end
    first = _tiles(jnp.where(some, start, _FAR), block_q, _FAR).min(-1)[..., None]
    last = _tiles(jnp.where(some, end, 0), block_q, 0).max(-1)[..., None]
    latest = _tiles(start, block_q, 0).max(-1)[..., None]
    earliest = _tiles(jnp.where(some, end, 0), block_q, _FAR).min(-1)[..., None]
    key = jnp.arange(-(-arrays.k.shape[1] // block_k), dtype=jnp.int32)[None, None] * block_k
    touched = (first < key + block_k) & (last > key)
    whole = (latest <= key) & (earliest >= key + block_k)
    if arrays.q_segments is not None and arrays.kv_segments is not None:
        q_low, q_high = (x[..., :, None] for x in _extent(arrays.q_segments, block_q))
        k_low, k_high = (x[..., None, :] for x in _extent(arrays.kv_segments, block_k))
        touched = touched & (q_low <= k_high) & (k_low <= q_high)
        uniform = (
            _whole(arrays.q_segments, block_q)[..., :, None]
            & _whole(arrays.kv_segments, block_k)[..., None, :]
        )
        whole = whole & uniform & (q_low == k_low)
    return touched, whole & touched


def _tiles(x: Array, block: int, fill: int) -> Array:
    """`[.., length] -> [.., tiles, block]`."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)), constant_values=fill)
    return padded.reshape(x.shape[0], -1, block)


def _extent(ids: Array, block: int) -> tuple[Array, Array]:
    """Smallest and largest non-padding id of each tile; an empty interval if all are padding."""
    low = _tiles(jnp.where(ids >= 0, ids, _FAR), block, _FAR).min(-1)
    return low, _tiles(ids, block, -1).max(-1)


def _whole(ids: Array, block: int) -> Array:
    """Tells whether all entries of a tile have the same non-padding id; entries past the end are ignored."""
    low, high = _tiles(ids, block, _FAR).min(-1), _tiles(ids, block, -1).max(-1)
    return (low == high) & (low >= 0)


def _runs(touched: Array, whole: Array, batch: int) -> Array:
    """The hull of the touched tiles and the first run of whole ones, along the last axis."""
    count = touched.shape[-1]
    index = jnp.arange(count, dtype=jnp.int32)[None, None]
    lo = jnp.where(touched, index, count).min(-1, initial=count)
    hi = jnp.where(touched, index + 1, 0).max(-1, initial=0)
    lo = jnp.minimum(lo, hi)
    begin = jnp.where(whole, index, count).min(-1, initial=count)
    stop = jnp.where(~whole & (index > begin[..., None]), index, count).min(-1, initial=count)
    begin = jnp.minimum(begin, hi)
    table = jnp.stack([lo, begin, jnp.clip(stop, begin, hi), hi], axis=-1).astype(jnp.int32)
    return jnp.broadcast_to(table, (batch, *table.shape[1:]))
