"""Reference implementation of attention over pages: gathers each sequence's keys, then computes dense attention. Every test uses it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..core import Named
from ..core.arguments import accumulator
from .spec import PagedArrays, PagedSpec, unmapped


def attend(arrays: PagedArrays, spec: PagedSpec) -> Named:
    """`out [*, T, H, V]` and `lse [*, T, H]`, in float64 if the queries are float64, otherwise in float32."""
    alone, call = unmapped(arrays, spec), lambda given: _row(PagedArrays.of(given), spec)
    for _ in arrays.q.shape[:-3]:
        call = jax.vmap(call, in_axes=({name: None if name in alone else 0 for name in arrays.given},))
    return call(arrays.given)


def _row(arrays: PagedArrays, spec: PagedSpec) -> Named:
    """The computation without leading axes, by sequence and by key head."""
    dtype = accumulator(arrays.q.dtype)
    (tokens, heads, _), kv_heads = arrays.q.shape, arrays.k.shape[-2]
    width = arrays.k.shape[-1] if arrays.v is None else arrays.v.shape[-1]
    groups, longest = heads // kv_heads, spec.max_query_len
    out = jnp.zeros((tokens, heads, width), dtype)
    lse = jnp.full((tokens, heads), -jnp.inf, dtype)
    # Without sequences every token is padding and keeps the empty result.
    if arrays.page_table.shape[0] == 0:
        return {"out": out, "lse": lse}
    grouped = arrays.q.reshape(tokens, kv_heads, groups, -1).astype(dtype)

    def sequence(n: Array) -> tuple[Array, Array, Array]:
        t = jnp.arange(longest, dtype=jnp.int32)
        token = jnp.where(t < arrays.q_len[n], arrays.q_start[n] + t, tokens)  # past the end: no query
        q = grouped.at[token].get(mode="fill", fill_value=0)  # [Q, K, G, D]
        seen, chunk = _visible(arrays, spec, n)

        forgotten = jnp.zeros((longest, heads, seen.shape[1]), dtype)
        if arrays.gates is not None and arrays.own_gates is not None:
            ours = arrays.own_gates.at[token].get(mode="fill", fill_value=0).astype(dtype)  # [Q, H, 2]
            pages = jnp.clip(arrays.page_table[n], 0, arrays.k.shape[-4] - 1)
            gates = arrays.gates[pages].astype(dtype).reshape(-1, heads, 2)  # [S, H, 2]
            forgotten = jnp.moveaxis((ours[:, None] - gates[None]).sum(-1), 1, 2)

        def head(kv_head: Array) -> tuple[Array, Array]:
            # Slots that no query sees may hold NaN, which a weight of 0 would not remove.
            hidden = ~seen.any(0)[:, None]
            k, v = (jnp.where(hidden, 0, x) for x in _keys(arrays, n, kv_head, dtype))
            return _dense(arrays, spec, q[:, kv_head], (k, v), (seen, chunk), kv_head, forgotten)

        o, l = (jnp.moveaxis(x, 0, 1) for x in lax.map(head, jnp.arange(kv_heads, dtype=jnp.int32)))
        return token, o.reshape(longest, heads, width), l.reshape(longest, heads)

    token, o, l = lax.map(sequence, jnp.arange(arrays.page_table.shape[0], dtype=jnp.int32))
    return {"out": out.at[token].set(o, mode="drop"), "lse": lse.at[token].set(l, mode="drop")}


def _visible(arrays: PagedArrays, spec: PagedSpec, n: Array) -> tuple[Array, Array]:
    """The keys `j` that each query of sequence `n` sees, `[Q, S]`, and where the keys of its new tokens begin."""
    page_size, pages = arrays.k.shape[-3], arrays.page_table[n]
    j = jnp.arange(pages.shape[0] * page_size, dtype=jnp.int32)[None]
    chunk = arrays.kv_len[n] - arrays.q_len[n]
    i = chunk + jnp.arange(spec.max_query_len, dtype=jnp.int32)[:, None]
    there = jnp.repeat((pages >= 0) & (pages < arrays.k.shape[-4]), page_size)[None]
    seen = there & (j <= i) & (i < arrays.kv_len[n])
    if arrays.kv_start is not None:
        seen &= j >= arrays.kv_start[n]
    if spec.left is not None:
        seen &= j >= i - spec.left
    return seen, chunk


def _keys(arrays: PagedArrays, n: Array, kv_head: Array, dtype: Any) -> tuple[Array, Array]:
    """The dequantised keys `[S, D]` and values `[S, V]` of one head of sequence `n`."""
    # A missing page reads keys of another, which `_visible` hides.
    pages = jnp.clip(arrays.page_table[n], 0, arrays.k.shape[-4] - 1)

    def gather(stored: Array, scale: Array | None) -> Array:
        x = stored[pages, :, kv_head].astype(dtype)  # [M, p, D]
        if scale is not None:
            x *= (scale[kv_head] if scale.ndim == 1 else scale[pages, :, kv_head, None]).astype(dtype)
        return x.reshape(-1, x.shape[-1])

    k = gather(arrays.k, arrays.k_scale)
    v = k if arrays.v is None else gather(arrays.v, arrays.v_scale)
    if arrays.rope is not None:
        k = jnp.concatenate([k, gather(arrays.rope, arrays.rope_scale)], 1)
    return k, v


def _dense(
    arrays: PagedArrays, spec: PagedSpec, q: Array, kv: Any, visible: Any, kv_head: Array, forgotten: Array
) -> tuple[Array, Array]:
    """`[Q, G, V]` and `[Q, G]` for one key head and the G query heads that read it."""
    (longest, groups, _), dtype, (k, v), (seen, chunk) = q.shape, q.dtype, kv, visible
    of_head = lambda x: x.reshape(-1, groups)[kv_head].astype(dtype)[:, None]
    t, j = jnp.arange(longest, dtype=jnp.int32)[:, None], jnp.arange(k.shape[0], dtype=jnp.int32)[None]
    scores = spec.scale * jnp.einsum("qgd,sd->qgs", q, k, precision="highest")
    if spec.logits_soft_cap is not None:
        scores = spec.logits_soft_cap * jnp.tanh(scores / spec.logits_soft_cap)
    if arrays.slopes is not None:
        scores += of_head(arrays.slopes)[None] * (j - chunk - t).astype(dtype)[:, None, :]
    scores += forgotten.reshape(longest, -1, groups, k.shape[0])[:, kv_head]
    if arrays.qq_bias is not None:
        own = jnp.clip(j - chunk, 0, arrays.qq_bias.shape[1] - 1)
        scores += jnp.where(j >= chunk, arrays.qq_bias[t, own].astype(dtype), 0)[:, None, :]
    scores = jnp.where(seen[:, None, :], scores, -jnp.inf)
    sinks = jnp.full((groups, 1), -jnp.inf, dtype) if arrays.sinks is None else of_head(arrays.sinks)
    sinks = jnp.broadcast_to(sinks, (longest, groups, 1))  # a key whose value is 0
    scores = jnp.concatenate([scores, sinks], 2)
    top = scores.max(2, keepdims=True)
    weights = jnp.exp(scores - jnp.where(top > -jnp.inf, top, 0))
    total = weights.sum(2, keepdims=True)
    lse = jnp.where(total != 0, jnp.log(total) + top, -jnp.inf)[..., 0]
    weights = weights[..., :-1] / jnp.where(total != 0, total, 1)
    return jnp.einsum("qgs,sv->qgv", weights, v, precision="highest"), lse
