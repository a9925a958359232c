"""The selected branch in plain XLA: the blocks of a chunk of queries are gathered, so no array has the size of the scores."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._broadcast import like
from .._take import take_along
from ..core.arguments import accumulator
from .spec import begins, NativeArrays, NativeSpec, of_sequence, positions

R = TypeVar("R")


class _Gathered(NamedTuple):
    """Holds what a chunk of queries needs: of each query, its key heads and heads of a group, and of its chosen keys `J = n * block`."""

    q: Array  # [B, c, K, G, D]
    k: Array  # [B, c, K, J, D]
    v: Array  # [B, c, K, J, V]
    at: Array  # [B, c, K, J]: which keys
    seen: Array  # [B, c, K, J]


def forward(arrays: NativeArrays, spec: NativeSpec, chunk: int) -> tuple[Array, Array]:
    """`out [B, T, H, V]` in the dtype of `q`, `lse [B, H, T]`."""
    batch, _, heads, _ = arrays.q.shape

    def of_chunk(start: Array, size: int) -> tuple[Array, Array]:
        part = _gather(arrays, spec, start, size)
        scores = _scores(part, spec)  # [B, c, K, G, J]
        top = scores.max(-1, keepdims=True, initial=-jnp.inf)
        # A query that sees nothing has a maximum of -inf, and -inf minus -inf would be NaN.
        weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0, top))
        total = weights.sum(-1, keepdims=True)
        # Division by 1 where nothing is seen, so that the output is 0.
        share = jnp.where(total > 0, total, 1)
        out = jnp.einsum("bckgj,bckjv->bckgv", weights, part.v, precision="highest") / share
        lse = jnp.where(total > 0, jnp.log(share) + top, -jnp.inf)[..., 0]
        return out.reshape(batch, size, heads, -1).astype(arrays.q.dtype), lse.reshape(batch, size, heads)

    out, lse = over_queries(of_chunk, arrays.q.shape[1], chunk)
    return out, jnp.swapaxes(lse, 1, 2)


def query_gradient(
    arrays: NativeArrays, spec: NativeSpec, chunk: int, lse: Array, delta: Array, dout: Array
) -> Array:
    """`dq` in the accumulator's dtype, from `lse` and `delta`, `[B, H, T]`."""
    batch, length, heads, dim = arrays.q.shape
    kv_heads = arrays.k.shape[2]

    def of_chunk(start: Array, size: int) -> Array:
        part = _gather(arrays, spec, start, size)
        cut = lambda x, axis: lax.dynamic_slice_in_dim(x, start, size, axis)
        terms = (cut(x, 2).swapaxes(1, 2).reshape(batch, size, kv_heads, -1, 1) for x in (lse, delta))
        top, shift = terms
        do = cut(dout, 1).astype(part.q.dtype).reshape(*part.q.shape[:-1], -1)
        sees = top > -jnp.inf  # a query that sees nothing may hold NaN
        weights = jnp.where(sees, jnp.exp(_scores(part, spec) - jnp.where(sees, top, 0)), 0)
        dscores = jnp.einsum("bckgv,bckjv->bckgj", jnp.where(sees, do, 0), part.v, precision="highest")
        dscores = (dscores - jnp.where(sees, shift, 0)) * weights * spec.scale
        dq = jnp.einsum("bckgj,bckjd->bckgd", dscores, part.k, precision="highest")
        return dq.reshape(batch, size, heads, dim)

    return over_queries(of_chunk, length, chunk)


def _gather(arrays: NativeArrays, spec: NativeSpec, start: Array, size: int) -> _Gathered:
    assert arrays.indices is not None
    batch, length, heads, dim = arrays.q.shape
    keys, kv_heads = arrays.k.shape[1:3]
    wide = accumulator(arrays.q.dtype)

    # An axis that is not that of the queries is shared by all of them and stays whole.
    cut = lambda x: lax.dynamic_slice_in_dim(x, start, size, 1) if x.shape[1] == length else x
    last, first = (cut(x)[..., None, None] for x in (positions(arrays, spec), of_sequence(arrays.first)))
    index = cut(arrays.indices)  # [B, c, K, n]
    begin = begins(arrays, spec)
    begin = jnp.broadcast_to(begin, (batch, begin.shape[1]))[:, None, None]
    begin = take_along(begin, jnp.maximum(index, 0), -1)[..., None]
    at = begin + like(jnp.arange(spec.block, dtype=jnp.int32), begin)  # [B, c, K, n, block]
    at = at.reshape(*index.shape[:-1], -1)
    seen = jnp.repeat(index >= 0, spec.block, -1) & (first <= at) & (at <= last) & (at < keys)
    # Unseen keys may lie past the end, so key 0 is read in their place.
    at = jnp.where(seen, at, 0)
    # Zeros in place of unseen keys, which may hold NaN.
    take = lambda x: jnp.where(seen[..., None], _taken(x, at), 0).astype(wide)
    q = cut(arrays.q).astype(wide).reshape(batch, size, kv_heads, heads // kv_heads, dim)
    return _Gathered(q, take(arrays.k), take(arrays.v), at, seen)


# Mapped, so that rows and heads are axes of their own to the compiler: each device gathers from its own.
def _taken(x: Array, at: Array) -> Array:
    """Of `x [B, S, K, D]` the rows at `[B, c, K, J]`: `[B, c, K, J, D]`."""
    return jax.vmap(jax.vmap(lambda x, at: x[at], 1, 1))(x, at)


def _scores(part: _Gathered, spec: NativeSpec) -> Array:
    scores = jnp.einsum("bckgd,bckjd->bckgj", part.q, part.k, precision="highest") * spec.scale
    return jnp.where(part.seen[:, :, :, None], scores, -jnp.inf)


def over_queries(of_chunk: Callable[[Array, int], R], length: int, size: int) -> R:
    """`of_chunk(start, size)` over all queries; results have the queries along axis 1. The last chunk starts earlier, so that all have one size."""
    if size >= length:
        return of_chunk(jnp.int32(0), length)
    starts = [*range(0, length - size, size), length - size]
    results = lax.map(lambda start: of_chunk(start, size), jnp.asarray(starts, jnp.int32))

    def joined(x: Array) -> Array:
        """`[B, T, ...]` from the results of chunks `[chunks, B, size, ...]`."""
        flat = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
        again = len(starts) * size - length  # queries of the last chunk that the one before has, too
        return jnp.concatenate([flat(x[:-1]), x[-1][:, again:]], 1) if again else flat(x)

    return jax.tree.map(joined, results)
