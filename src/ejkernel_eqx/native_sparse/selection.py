"""Defines which blocks a query chooses: by the weights of compressed keys, summed over the heads that share them. No gradient flows through a
choice."""

import functools

import jax.numpy as jnp
from jax import Array, lax

from .._broadcast import like
from .._take import take_along
from ..core.arguments import wide
from .gathered import over_queries
from .spec import compressed_ranges, most_blocks, NativeArrays, NativeSpec, of_sequence, places, positions

_BYTES = 2**27  # of scores at a time


def overlaps(spec: NativeSpec) -> list[tuple[int, int]]:
    """For a block `m`, the compressed keys `m * (block // stride) + o` that share tokens with it, as `(o, strides that they share)`."""
    block, span = spec.block // spec.stride, spec.span // spec.stride
    return [(o, min(block, o + span) - max(0, o)) for o in range(1 - span, block)]


def choose(importance: Array, arrays: NativeArrays, spec: NativeSpec) -> Array:
    """The blocks of each query, `[B, T, K, n]`, from the weights of compressed keys `importance [B, T, K, C]`."""
    ranges = compressed_ranges(arrays, spec)
    chosen = best_blocks(importance, places(arrays, spec), *ranges, most_blocks(arrays, spec), spec)
    # Blocks are chosen within a sequence and numbered over the whole row.
    return jnp.where(chosen >= 0, chosen + of_sequence(arrays.base)[..., None, None], -1)


def best_blocks(
    importance: Array, place: Array, start: Array, end: Array, blocks: int, spec: NativeSpec
) -> Array:
    """The blocks that a query at each `place [B, T]` chooses among the `blocks` of a sequence: `[B, T, K, n]`. They are
    its own block, the first, then those with the largest weight, of equal ones the earlier. -1 follows the last block
    that it may see. Its compressed keys are those from `start` to `end`."""
    keys, per = importance.shape[-1], spec.block // spec.stride
    place, start, end = (x[..., None, None] for x in (place, start, end))  # [B, T, 1, 1]
    block = like(jnp.arange(blocks, dtype=jnp.int32), place)
    score = jnp.zeros((*importance.shape[:-1], block.shape[-1]), importance.dtype)
    for shift, share in overlaps(spec):
        at = start + block * per + shift
        inside = (at >= start) & (at < end)
        at = jnp.broadcast_to(jnp.clip(at, 0, keys - 1), score.shape)
        found = take_along(importance, at, -1) if keys else jnp.zeros_like(score)
        score += jnp.where(inside, share * found, 0)
    own = place // spec.block
    # The first block comes before all weights, but behind the query's own.
    score = jnp.where(block == 0, float(jnp.finfo(score.dtype).max), score)
    score = jnp.where(block == own, jnp.inf, score)
    # Weights are never negative, so a block after the query's own sorts behind all others.
    score = jnp.where(block > own, -1, score)
    # Sorted whole, because XLA's search for the largest ones gathers what devices share.
    numbers = jnp.broadcast_to(block, score.shape)
    best, chosen = lax.sort((-score, numbers), is_stable=True, num_keys=1)
    best, chosen = -best[..., : spec.count], chosen[..., : spec.count]
    chosen = jnp.where((best >= 0) & (place >= 0), chosen, -1)
    # A sequence may have fewer blocks than a query chooses.
    more = spec.count - chosen.shape[-1]
    return jnp.pad(chosen, [(0, 0)] * 3 + [(0, more)], constant_values=-1)


def select(arrays: NativeArrays, spec: NativeSpec, lse: Array) -> Array:
    """The blocks of each query, `[B, T, K, n]`, a chunk of queries at a time; `lse [B, H, T]` is that of the compressed branch."""
    batch, length, heads, _ = arrays.q.shape
    keys, kv_heads = arrays.compressed_k.shape[1], arrays.k.shape[2]
    size = max(1, min(length, _BYTES // max(1, 4 * batch * heads * max(keys, most_blocks(arrays, spec)))))
    tables = ("position", "first", "seen", "base")

    def of_chunk(start: Array, size: int) -> Array:
        cut = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        own = {name: cut(x, axis=1) for name in tables if (x := getattr(arrays, name)) is not None}
        if arrays.position is None:
            own["position"] = cut(positions(arrays, spec), axis=1)
        chunk = arrays._replace(q=cut(arrays.q, axis=1), **own)
        first, last = (x[:, None, None, :, None] for x in compressed_ranges(chunk, spec))
        q = chunk.q.reshape(batch, size, kv_heads, -1, chunk.q.shape[-1])
        scores = jnp.einsum("btkgd,bckd->bkgtc", wide(q), wide(arrays.compressed_k), precision="highest")
        top = cut(lse, axis=2).reshape(batch, kv_heads, -1, size, 1)
        place = like(jnp.arange(keys, dtype=jnp.int32), first)
        seen = (first <= place) & (place < last)
        # The inner choice keeps a score that is not seen, which may be NaN, from the exponential.
        weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores * spec.scale - top, 0)), 0)
        return choose(weights.sum(2).swapaxes(1, 2), chunk, spec)

    return over_queries(of_chunk, length, size)
