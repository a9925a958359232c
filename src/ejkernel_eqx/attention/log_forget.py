"""Forget gates: their cumulative sums in two parts, for kernels that subtract sums of near tokens, and the gradient of the gates."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._shapes import as_value, is_symbolic
from .._take import take_along
from ..core.arguments import accumulator
from .cotangents import sum_batch
from .masks import tile_table
from .spec import AttentionArrays, AttentionSpec

CHUNK = 128
"""Tokens that have one coarse sum; tiles of kernels are no larger."""


def of_tokens(arrays: AttentionArrays, spec: AttentionSpec) -> AttentionArrays:
    """The arrays with 0 for the gates of keys that no query may see, which can be NaN."""
    lead, lengths = arrays.q.shape[:-3], (arrays.q.shape[-3], arrays.k.shape[-3])
    plain = arrays.rows is None and arrays.q_segments is None
    if arrays.log_forget is None or (plain and not any(map(is_symbolic, lengths)) and spec.covers(*lengths)):
        return arrays
    folded = lambda x: jnp.broadcast_to(x, (*lead, *x.shape[len(lead) :])).reshape(-1, *x.shape[len(lead) :])
    parts = jax.tree.map(
        folded, {name: getattr(arrays, name) for name in ("q", "k", "rows", "q_segments", "kv_segments")}
    )
    seen = tile_table.seen(arrays._replace(**parts), spec).keys  # [1 or all rows, S]
    seen = jnp.broadcast_to(seen, (parts["q"].shape[0], lengths[1])).reshape(*lead, lengths[1], 1)
    return arrays._replace(log_forget=jnp.where(seen > 0, arrays.log_forget, 0))


def sums(arrays: AttentionArrays) -> tuple[Array, Array]:
    """The sum of the gates up to each key, its own included, in two parts `[B or 1, H, S]`, float32 (float64 for float64): a coarse one for each
    chunk of tokens, and the rest.

    Differences of coarse parts are exact, those of the rest are small: `(a - b) + (c - d)` loses nothing that a difference of
    rounded sums would, however long the row.
    """
    assert arrays.log_forget is not None
    x = arrays.log_forget.astype(accumulator(arrays.q.dtype)).swapaxes(1, 2)  # [B or 1, H, S]
    if is_symbolic(length := x.shape[-1]):
        return jnp.cumsum(x, -1), jnp.zeros_like(x)
    inside = _cumulative(_in_chunks(x))
    totals = inside[..., -1]
    # Multiples of a power of two, of which float32 holds so many that their sums are exact.
    most = 1 + jnp.abs(totals).sum(-1, keepdims=True)
    step = jnp.ldexp(jnp.ones_like(most), jnp.frexp(most)[1] - 22)
    coarse = jnp.round(totals / step) * step
    both = jnp.stack([coarse, totals - coarse])
    coarse, rest = (_cumulative(both) - both)[..., None] + jnp.stack([jnp.zeros_like(inside), inside])
    return _whole(coarse, length), _whole(rest, length)


def for_tiles(arrays: AttentionArrays, spec: AttentionSpec, unit: float) -> Array:
    """`unit` times the sums, as kernels read them, `[B or 1, H, n]`: the rest of each key, the coarse part of each chunk of keys, and the same at the
    positions of queries, in chunks of queries; then zeros up to a multiple of 16."""
    coarse, rest = sums(arrays._replace(log_forget=unit * jnp.asarray(arrays.log_forget, jnp.float32)))
    ours, own = (at_positions(x, arrays, spec) for x in (coarse, rest))
    first = ours[..., ::CHUNK]
    own = own + (ours - jnp.repeat(first, CHUNK, axis=-1)[..., : own.shape[-1]])
    parts = [
        jnp.broadcast_to(x, (*own.shape[:2], x.shape[-1])) for x in (rest, coarse[..., ::CHUNK], own, first)
    ]
    every = jnp.concatenate(parts, -1)
    return jnp.pad(every, ((0, 0), (0, 0), (0, -every.shape[-1] % 16)))


def _in_chunks(x: Array) -> Array:
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[-1] % CHUNK)))
    return x.reshape(*x.shape[:2], -1, CHUNK)


def _whole(x: Array, length: int) -> Array:
    """Undoes `_in_chunks`."""
    return x.reshape(*x.shape[:2], -1)[..., :length]


def _cumulative(x: Array, reverse: bool = False) -> Array:
    """Cumulative sums along the last axis: as one product, where others take many launches on a GPU."""
    if (length := x.shape[-1]) > 1024:
        return jax.lax.cumsum(x, x.ndim - 1, reverse=reverse)
    ones = jnp.tri(length, dtype=x.dtype)
    return jnp.matmul(x, ones if reverse else ones.T, precision="highest")


def at_positions(x: Array, arrays: AttentionArrays, spec: AttentionSpec) -> Array:
    """`x [B or 1, H, S]` at the positions of queries, `[B or 1, H, T]`; of those outside of the keys at the nearest."""
    queries, keys = arrays.q.shape[1], x.shape[-1]
    if arrays.rows is None and spec.offset == 0 and queries == keys:
        return x
    position = jnp.clip(_positions(arrays, spec), 0, keys - 1)[:, None]
    batch = max(x.shape[0], position.shape[0])
    x, position = (jnp.broadcast_to(a, (batch, *a.shape[1:])) for a in (x, position))
    return take_along(x, position, axis=-1)


def _positions(arrays: AttentionArrays, spec: AttentionSpec) -> Array:
    if arrays.rows is not None:
        return arrays.rows.position
    return jnp.arange(arrays.q.shape[1], dtype=jnp.int32)[None] + as_value(spec.offset)


def _at_keys(x: Array, arrays: AttentionArrays, spec: AttentionSpec, keys: Any) -> Array:
    """The transpose of `at_positions`. Positions within the keys are distinct, so that nothing is added in an order of the device's."""
    if arrays.rows is None and spec.offset == 0 and x.shape[-1] == keys:
        return x
    position = jnp.broadcast_to(_positions(arrays, spec), (x.shape[0], x.shape[-1]))
    before, behind = (position < 0)[:, None], (position >= keys)[:, None]
    at = jnp.where((before | behind)[:, 0], keys + jnp.arange(x.shape[-1], dtype=jnp.int32), position)
    put = lambda x, at: (
        jnp.zeros((x.shape[0], keys), x.dtype).at[:, at].set(x, mode="drop", unique_indices=True)
    )
    outside = (jnp.where(where, x, 0).sum(-1) for where in (before, behind))
    return jax.vmap(put)(x, at).at[..., 0].add(next(outside)).at[..., -1].add(next(outside))


def of_queries(
    arrays: AttentionArrays, tiles: Array, size: int, lse: Array, delta: Array, dlse: Array, empty: Array
) -> Array:
    """Sums of the scores' gradients over each query's keys `[B, H, T]`, from those of tiles of `size` queries `[B, H, tiles]`.

    Of a softmax they are known: the cotangent of the lse, and what a sink takes. A kernel's are so up to rounding, of which each query of a tile is
    given the same part. Without it the rounding of a whole row would add up in the gradient of its first gates."""
    exact = dlse.astype(lse.dtype)
    if arrays.sinks is not None:
        exact = exact + delta * jnp.exp(
            arrays.sinks.astype(lse.dtype)[..., None] - jnp.where(empty, jnp.inf, lse)
        )
    exact = jnp.where(empty, 0, exact)
    length, count = lse.shape[-1], tiles.shape[-1]
    in_tiles = jnp.pad(exact, ((0, 0), (0, 0), (0, count * size - length))).reshape(*tiles.shape, size)
    queries = jnp.minimum(size, length - size * jnp.arange(count)).astype(tiles.dtype)
    return _whole(in_tiles + ((tiles - in_tiles.sum(-1)) / queries[None, None])[..., None], length)


def gradient(arrays: AttentionArrays, spec: AttentionSpec, by_query: Array, by_key: Array) -> Array:
    """The gradient of the gates from sums of the scores' gradients over each query's keys `[B, H, T]` and each key's queries `[B, H, S]`: of a sum of
    gates, which queries at its token add and its key subtracts, and so of every gate up to it."""
    log_forget = arrays.log_forget
    assert log_forget is not None
    added = _at_keys(by_query, arrays, spec, by_key.shape[-1])
    if is_symbolic(length := by_key.shape[-1]):
        behind = jax.lax.cumsum(added - by_key, 2, reverse=True)
    else:
        inside = _cumulative(_in_chunks(added - by_key), reverse=True)
        totals = inside[..., 0]
        behind = _whole(inside + (_cumulative(totals, reverse=True) - totals)[..., None], length)
    return sum_batch(behind, log_forget).swapaxes(1, 2).astype(log_forget.dtype)
