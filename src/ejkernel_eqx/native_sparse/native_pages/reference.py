"""Native sparse attention over pages from three dense ones, query by query: the oracle of every test."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...attention import reference as attention
from ...attention.spec import AttentionArrays, AttentionSpec
from ...core.arguments import accumulator
from ...paged.tokens import alone
from .. import branches
from ..selection import best_blocks
from .spec import most_blocks, PagedNativeArrays, PagedNativeSpec, unmapped


def attend(arrays: PagedNativeArrays, spec: PagedNativeSpec) -> dict[str, Array]:
    """`out [*, T, H, V]`, in float64 if the queries are float64, otherwise in float32, and the chosen blocks `indices [*, T, K, n]`."""
    shared, call = unmapped(arrays), lambda given: _row(PagedNativeArrays(**given), spec)
    for _ in arrays.q.shape[:-3]:
        call = jax.vmap(call, in_axes=({name: None if name in shared else 0 for name in arrays.given},))
    return call(arrays.given)


def _row(arrays: PagedNativeArrays, spec: PagedNativeSpec) -> dict[str, Array]:
    own, dtype = spec.sparse, accumulator(arrays.q.dtype)
    tokens, heads, _ = arrays.q.shape
    kv_heads = arrays.k.shape[2]
    each = alone(arrays.main, spec.max_query_len)
    nothing = jnp.full((tokens, kv_heads, own.count), -1, jnp.int32)
    chosen = nothing if arrays.indices is None else arrays.indices

    def one(token: tuple[Array, ...]) -> tuple[Array, Array]:
        q, gates, table, length, chosen = token
        place = (length - 1)[None, None]

        def dense(x: Array) -> Array:
            return jnp.take(x, jnp.clip(table, 0, x.shape[0] - 1), 0).reshape(1, -1, *x.shape[2:])

        def attended(k: Array, v: Array, seen: Array) -> tuple[Array, Array, Array]:
            """`seen` is `[K or 1, keys of a whole table]`."""
            there = jnp.repeat((table >= 0) & (table < k.shape[0]), k.shape[1])
            mask = jnp.broadcast_to(seen & there[None], (kv_heads, there.size))
            mask = jnp.repeat(mask, heads // kv_heads, 0)[None, :, None]
            return attention.attend_with_weights(
                AttentionArrays(q[None, None].astype(dtype), dense(k), dense(v), mask=mask),
                AttentionSpec(own.scale),
            )

        slot = jnp.arange(table.size * arrays.compressed_k.shape[1])[None]
        first, end = spec.first_slot, length // own.stride
        found = {}
        found["compressed_out"], found["compressed_lse"], weights = attended(
            arrays.compressed_k, arrays.compressed_v, (slot >= first) & (slot < end)
        )
        if arrays.indices is None:
            importance = weights.reshape(1, 1, kv_heads, heads // kv_heads, -1).sum(3)
            start, end = jnp.full_like(place, first), jnp.zeros_like(place) + end
            chosen = best_blocks(importance, place, start, end, most_blocks(arrays, spec), own)[0, 0]
        j = jnp.arange(table.size * arrays.k.shape[1])[None]
        picked = ((j[..., None] // own.block == chosen[:, None]) & (chosen[:, None] >= 0)).any(-1)
        found["selected_out"], found["selected_lse"], _ = attended(arrays.k, arrays.v, picked & (j < length))
        near = (j < length) & (j >= length - own.window)
        found["sliding_out"], found["sliding_lse"], _ = attended(arrays.k, arrays.v, near)
        return branches.combine(gates[None, None], found, dtype)[0, 0], chosen

    rows = arrays.q, arrays.gates, each.page_table, each.kv_len, chosen
    if 0 in (tokens, each.page_table.shape[-1]):
        return {"out": jnp.zeros((tokens, heads, arrays.v.shape[-1]), dtype), "indices": nothing}
    out, chosen = lax.map(one, rows)
    return {"out": out, "indices": chosen}
