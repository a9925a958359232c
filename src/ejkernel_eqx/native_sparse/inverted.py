"""The gradient of keys and values of the selected branch in plain XLA: a sum over the queries that chose a block, in a fixed order."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._broadcast import like
from ..core.arguments import accumulator
from .lists import by_key, Lists, lists_of
from .spec import begins, NativeArrays, NativeSpec, num_blocks, of_sequence, positions


def key_gradient(
    arrays: NativeArrays, spec: NativeSpec, most: int, lse: Array, delta: Array, dout: Array
) -> tuple[Array, Array]:
    """`dk`, `dv` in the accumulator's dtype; `lse` and `delta` are `[B, H, T]`. Queries and scores of about `most` bytes are in memory at a
    time."""
    assert arrays.indices is not None
    batch, length, kv_heads, count = arrays.indices.shape
    group = arrays.q.shape[2] // kv_heads
    # At most two pieces a block on average, so that parts take twice the memory of the sums.
    span = min(spec.block * count, length)
    lists = lists_of(arrays.indices, num_blocks(arrays, spec), span)
    pieces = lists.owner.shape[-1]
    row = arrays.q.shape[-1] + arrays.v.shape[-1] + 2 * spec.block
    size = max(1, min(pieces, most // max(1, 4 * batch * kv_heads * span * group * row)))
    # The last chunk starts earlier, so that all have one size.
    starts = [min(start, pieces - size) for start in range(0, pieces, size)]
    heads = lambda x: jnp.moveaxis(x.reshape(batch, length, kv_heads, group, -1), 2, 1)  # [B, K, T, G, C]
    terms = (jnp.moveaxis(x, 1, 2)[..., None] for x in (lse, delta))
    rows = tuple(map(heads, (arrays.q, dout, *terms)))

    def whole(parts: Array) -> Array:
        """`[B, S, K, C]` from `[chunks, B, K, size, block, C]`, of which the last chunk overlaps the one before."""
        last = parts[-1][:, :, size * len(starts) - pieces :]
        rest = jnp.moveaxis(parts[:-1], 0, 2).reshape(batch, kv_heads, -1, *parts.shape[4:])
        return by_key(_sums(jnp.concatenate([rest, last], 2), lists), arrays)

    of_chunk = lambda start: _of_pieces(arrays, spec, lists, rows, start, size, span)
    dk, dv = lax.map(of_chunk, jnp.asarray(starts, jnp.int32))
    return whole(dk), whole(dv)


def _of_pieces(
    arrays: NativeArrays, spec: NativeSpec, lists: Lists, rows: Any, start: Array, size: int, span: int
) -> tuple[Array, Array]:
    """The parts `[B, K, size, block, D or V]` of pieces from `start` on."""
    wide, keys, batch = accumulator(arrays.q.dtype), arrays.k.shape[1], arrays.q.shape[0]
    cut = lambda x: lax.dynamic_slice_in_dim(x, start, size, 2)
    owner, begin, end = cut(lists.owner), cut(lists.begin)[..., None], cut(lists.end)[..., None]
    at = begin + like(jnp.arange(span, dtype=jnp.int32), begin)  # [B, K, size, span]
    real = at < end
    token = _taken(lists.pairs, jnp.minimum(at, lists.pairs.shape[-1] - 1)) // spec.count
    q, do, lse, delta = (_taken(x, token) for x in rows)  # [B, K, size, span, G, C]
    every = lambda x: jnp.broadcast_to(x, (batch, arrays.q.shape[1]))[:, None]
    first, last = every(of_sequence(arrays.first)), every(positions(arrays, spec))
    heads = lambda x: jnp.broadcast_to(x, (batch, owner.shape[1], x.shape[-1]))
    first, last = (_taken(heads(x), token)[..., None] for x in (first, last))
    begin = _taken(heads(begins(arrays, spec)[:, None]), owner)[..., None]
    j = begin + like(jnp.arange(spec.block, dtype=jnp.int32), begin)  # [B, K, size, block]
    key = j[..., None, :]
    seen = real[..., None] & (first <= key) & (key <= last) & (key < keys)  # [B, K, size, span, block]
    known = seen.any(-2)[..., None]
    of_key = lambda x: _taken(jnp.moveaxis(x, 2, 1), jnp.clip(j, 0, keys - 1))
    # A key that no query sees may hold NaN, which a weight of 0 would not remove.
    k, v = (jnp.where(known, of_key(x), 0).astype(wide) for x in (arrays.k, arrays.v))
    # Places behind the end of a piece read queries of another one, so they are set to 0.
    zeroed = lambda x: jnp.where(real[..., None, None], x, 0).astype(wide)
    q, do = zeroed(q), zeroed(do)
    dot: Any = lambda pattern, x, y: jnp.einsum(pattern, x, y, precision="highest")
    seen = seen[..., None, :]  # [B, K, size, span, 1, block]
    scores = dot("bkcsgd,bkcjd->bkcsgj", q, k) * spec.scale - lse
    weights = jnp.exp(jnp.where(seen, scores, -jnp.inf))
    dscores = dot("bkcsgv,bkcjv->bkcsgj", do, v) - delta
    dscores = jnp.where(seen, dscores, 0) * weights * spec.scale
    return dot("bkcsgj,bkcsgd->bkcjd", dscores, q), dot("bkcsgj,bkcsgv->bkcjv", weights, do)


def _sums(parts: Array, lists: Lists) -> Array:
    """The sum of each block's parts `[B, K, PIECES, ...]`, in their order: `[B, K, M, ...]`."""
    begin, end = lists.piece[..., :-1], lists.piece[..., 1:]

    def add(n: Array, total: Array) -> Array:
        at = begin + n
        part = _taken(parts, jnp.minimum(at, parts.shape[2] - 1))
        return total + jnp.where((at < end)[..., None, None], part, 0)

    zeros = jnp.zeros_like(_taken(parts, jnp.zeros_like(begin)))
    return lax.fori_loop(jnp.zeros((), jnp.int32), (end - begin).max(), add, zeros)


# Mapped, so that rows and heads are axes of their own to the compiler: each device gathers from its own.
def _taken(x: Array, at: Array) -> Array:
    """Of `x [B, K, L, ...]` the rows at `[B, K, ...]`."""
    return jax.vmap(jax.vmap(lambda x, at: x[at]))(x, at)
