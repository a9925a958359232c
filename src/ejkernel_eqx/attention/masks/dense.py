"""Parts of a mask as booleans of all pairs, `[..., H or 1, T, S]`: of those that kernels have no other form for, and for inspection."""

import jax
import jax.numpy as jnp
from jax import Array

from ..._broadcast import aligned, like
from .functions import depends_on_head, evaluate, PairFunction, traced

Pair = tuple[Array, Array]


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


def with_types(pairs: tuple[Pair, ...], dense: Array | None, position: Array, num_keys: int) -> Array | None:
    """`dense` intersected, for every pair of types, with causal-or-same-type, a union that key ranges cannot express. `[..., 1, T, S]`."""
    for q_ids, kv_ids in pairs:
        at, q_ids, kv_ids = aligned(position[..., None], q_ids[..., :, None], kv_ids[..., None, :])
        behind = like(jnp.arange(num_keys, dtype=jnp.int32), at) <= at
        seen = (behind | ((q_ids == kv_ids) & (q_ids != 0)))[..., None, :, :]
        dense = both(seen, dense)
    return dense


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
