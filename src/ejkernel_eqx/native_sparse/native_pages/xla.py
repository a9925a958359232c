"""Platform `xla`: the sliding and the compressed branch are attention over pages; the blocks of the third are gathered one after the other."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..._broadcast import like
from ...core import Named
from ...paged import xla as pages
from ...paged.xla import Call, Queries, Span, XlaConfig
from ...parallel import Leading, match_varying
from .. import branches
from ..selection import best_blocks
from ..spec import BRANCHES, NativeSpec
from .spec import LETTERS, most_blocks, PagedNativeArrays, PagedNativeSpec, SHARED, unmapped

config_type = XlaConfig
unsupported = pages.unsupported


def default_config(problem: Any, device: Any) -> XlaConfig:
    return candidates(problem, device)[0]


def candidates(problem: Any, device: Any) -> list[XlaConfig]:
    """Configurations worth timing, the heuristic first, without those that split the problem in the same way. Tiles of queries are small, as
    each of them gathers keys of its own."""
    wanted = [(64, 256), (32, 256), (64, 512), (128, 256), (64, 128), (128, 512)]
    return pages.distinct(problem, [XlaConfig(*sizes, 1) for sizes in wanted])


def forward(arrays: PagedNativeArrays, spec: PagedNativeSpec, config: XlaConfig) -> Named:
    """`out [*, T, H, V]`, and the chosen blocks. `jax.vmap` adds leading axes, which become additional sequences."""
    attend = lambda flat: _attend(PagedNativeArrays(**flat), spec, config)
    leading = Leading(axes=LETTERS.axes_of(arrays), shared=SHARED)
    return pages.over_rows(attend, arrays.given, leading, lambda given: unmapped(PagedNativeArrays(**given)))


def _attend(arrays: PagedNativeArrays, spec: PagedNativeSpec, config: XlaConfig) -> Named:
    main, compressed = Call(arrays.main, spec.sliding, config), Call(arrays.compressed, spec.whole, config)
    # Made from the queries, so that their type carries the sharding over heads and devices.
    lse = match_varying(jnp.zeros_like(main.q[..., 0], main.lse_dtype) - jnp.inf, arrays)
    out = jnp.broadcast_to(jnp.zeros_like(lse, main.q.dtype)[..., None], (*lse.shape, main.value_dim))
    none = jnp.zeros_like(lse[..., 0], jnp.int32)[..., None] - 1
    empty = {f"{name}_{what}": x for name in BRANCHES for what, x in (("out", out), ("lse", lse))}
    empty["indices"] = jnp.broadcast_to(none, (*none.shape[:-1], spec.sparse.count))
    found = pages.in_passes(main, lambda queries: _of_queries(arrays, spec, main, compressed, queries), empty)
    indices = found.pop("indices")
    flat = {name: x.reshape(main.tokens, main.heads, *x.shape[3:])[None] for name, x in found.items()}
    flat = {name: x.swapaxes(1, 2) if name.endswith("lse") else x for name, x in flat.items()}
    return {"out": branches.combine(arrays.gates[None], flat, main.q.dtype)[0], "indices": indices}


def _of_queries(
    arrays: PagedNativeArrays, spec: PagedNativeSpec, main: Call, small: Call, queries: Queries
) -> Named:
    """The results of all branches, `[n, Q, K, G, V]` and `[n, Q, K, G]`, and the blocks `[n, Q, K, blocks]`."""
    own, span = spec.sparse, pages.span_of(main, queries)
    last = (span.i + 1) // own.stride - 1  # the slot of the last compressed key that a query sees
    start = jnp.full_like(last, spec.first_slot)
    # The weights of all blocks of slots are computed, those of the unused first slots too.
    seen = pages.span_between(small, queries, span.own, jnp.zeros_like(last), last)
    seen = seen._replace(lowest=start)
    found = {}
    found["sliding_out"], found["sliding_lse"] = pages.softmax(main, queries, span)
    found["compressed_out"], found["compressed_lse"] = pages.softmax(small, queries, seen)
    if arrays.indices is None:
        importance = _importance(small, queries, seen, found["compressed_lse"])
        # A query that is not real has position -1, as padding has over dense keys.
        place = jnp.where(queries.real, span.i, -1)
        indices = best_blocks(importance, place, start, last + 1, most_blocks(arrays, spec), own)
    else:
        token = arrays.q_start[queries.sequence][:, None] + queries.index
        # Queries that are not real may point past the end; their results are dropped.
        indices = arrays.indices.at[token].get(mode="clip")
    found["selected_out"], found["selected_lse"] = _selected(arrays, own, main, queries, span.i, indices)
    return found | {"indices": indices}


def _importance(call: Call, queries: Queries, span: Span, lse: Array) -> Array:
    """The weights of compressed keys by slot, summed over the heads of a group, `[n, Q, K, C]`."""
    table = call.arrays.page_table[queries.sequence]
    keys = table.shape[-1] * call.page_size
    # Whole blocks, as an update past the end would be moved back onto earlier slots.
    room = -(-keys // call.block_k) * call.block_k
    shift = jnp.moveaxis(jnp.where(lse > -jnp.inf, lse, 0), 1, 3)[..., None]  # [n, K, G, Q, 1]
    empty = jnp.zeros_like(lse[..., 0])[..., None]

    def block(number: Array, total: Array) -> Array:
        at = number * call.block_k
        _, _, scores = pages.scores_at(call, queries, span, table, jnp.zeros_like(span.begin) + at)
        weights = jnp.moveaxis(jnp.exp(scores - shift).sum(2), 1, 2).astype(total.dtype)
        return lax.dynamic_update_slice_in_dim(total, weights, at, 3)

    whole = jnp.broadcast_to(empty, (*empty.shape[:-1], room))
    return lax.fori_loop(jnp.zeros_like(span.blocks), span.blocks, block, whole)


def _selected(
    arrays: PagedNativeArrays, own: NativeSpec, call: Call, queries: Queries, i: Array, indices: Array
) -> tuple[Array, Array]:
    """The branch of chosen blocks, one of each query at a time."""
    table, (count, size) = arrays.page_table[queries.sequence], arrays.k.shape[:2]

    def block(number: Array, carry: Any) -> Any:
        index = lax.dynamic_index_in_dim(indices, number, 3)  # [n, Q, K, 1]
        j = index * own.block + like(jnp.arange(own.block, dtype=jnp.int32), index)  # [n, Q, K, S]
        # A key past the end of the table has no page, as if its entry were -1.
        numbers = lambda row, at: row.at[at].get(mode="fill", fill_value=-1)
        page = jax.vmap(numbers)(table, jnp.maximum(j, 0) // size)
        seen = (index >= 0) & (j <= i[..., None, None]) & queries.real[..., None, None]
        seen &= (page >= 0) & (page < count)
        # The reads promise indices in bounds, so a hidden key reads the first slot.
        page, place = jnp.where(seen, page, 0), jnp.where(seen, j % size, 0)
        k, v = (jnp.where(seen[..., None], _taken(x, page, place), 0) for x in (arrays.k, arrays.v))
        scores = call.dot("nqkgd,nqksd->nkgqs", queries.q, k) * own.scale
        mask = jnp.moveaxis(seen, 1, 2)[:, :, None]
        values = lambda weights: call.dot("nkgqs,nqksv->nkgqv", weights, v)
        return pages.with_keys(carry, jnp.where(mask, scores, -jnp.inf), values)

    return pages.finished(call, lax.fori_loop(0, indices.shape[-1], block, pages.start_of(call, queries)))


# Mapped, so that heads are an axis of their own to the compiler: each device gathers from its own.
def _taken(x: Array, page: Array, place: Array) -> Array:
    """Of pages `[P, p, K, D]` the rows at `[n, Q, K, S]`: `[n, Q, K, S, D]`."""
    take = lambda x, page, place: x.at[page, place].get(mode="promise_in_bounds")
    return jax.vmap(take, 2, 2)(x, page, place)
