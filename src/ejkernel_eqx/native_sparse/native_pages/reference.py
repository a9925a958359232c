"""Native sparse attention over pages from that over dense keys, query by query: the oracle of every test."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...core import Named
from ...core.arguments import accumulator
from ...paged.tokens import alone
from .. import reference as dense
from ..spec import NativeArrays
from .spec import PagedNativeArrays, PagedNativeSpec, unmapped


def attend(arrays: PagedNativeArrays, spec: PagedNativeSpec) -> Named:
    """`out [*, T, H, V]`, in float64 if the queries are float64, otherwise in float32, and the chosen blocks `indices [*, T, K, n]`."""
    shared, call = unmapped(arrays), lambda given: _row(PagedNativeArrays(**given), spec)
    for _ in arrays.q.shape[:-3]:
        call = jax.vmap(call, in_axes=({name: None if name in shared else 0 for name in arrays.given},))
    return call(arrays.given)


def _row(arrays: PagedNativeArrays, spec: PagedNativeSpec) -> Named:
    dtype, (tokens, heads, _) = accumulator(arrays.q.dtype), arrays.q.shape
    each, first = alone(arrays.main, spec.max_query_len), spec.first_slot
    if 0 in (tokens, each.page_table.shape[-1]):
        nothing = jnp.full((tokens, arrays.k.shape[2], spec.sparse.count), -1, jnp.int32)
        return {"out": jnp.zeros((tokens, heads, arrays.v.shape[-1]), dtype), "indices": nothing}

    def one(token: Named) -> Named:
        table, place = token["table"], token["length"] - 1
        there = (table >= 0) & (table < arrays.k.shape[0])

        def gathered(x: Array, skipped: int = 0) -> tuple[Array, Array]:
            """The rows `[1, S, K, C]` of all pages, without the first slots, and which there are. One that does not exist is last."""
            rows = jnp.take(x, jnp.where(there, table, 0), 0).reshape(1, -1, *x.shape[2:])
            exist = jnp.repeat(there, x.shape[1])[None]
            padded = [(0, 0), (0, 1 + skipped)]
            rows, exist = jnp.pad(rows, [*padded, (0, 0), (0, 0)]), jnp.pad(exist, padded)
            return rows[:, skipped:], exist[:, skipped:]

        (k, is_key), (v, _) = gathered(arrays.k), gathered(arrays.v)
        small = arrays.compressed_k, arrays.compressed_v
        (small_k, is_small), (small_v, _) = (gathered(x, first) for x in small)
        own = {name: x[None, None] for name, x in token.items() if name in ("q", "gates", "indices")}
        own["q"] = own["q"].astype(dtype)
        call = NativeArrays(
            **own, k=k, v=v, compressed_k=small_k, compressed_v=small_v, position=place[None, None]
        )
        out, indices = dense.attend(call, spec.sparse, (is_key, is_small))
        return {"out": out[0, 0], "indices": indices[0, 0]}

    rows = {"q": arrays.q, "gates": arrays.gates, "table": each.page_table, "length": each.kv_len}
    return lax.map(one, rows | ({} if arrays.indices is None else {"indices": arrays.indices}))
