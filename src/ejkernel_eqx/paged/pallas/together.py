"""The method of all heads of a block at once: query heads are multiplied by the rows of all key heads, and products with other heads' keys masked.

The matrix unit loads a tile of keys once in any case, for one head or for all, and few queries do not fill it. So this costs little for few queries,
nothing with one key head, and no key is moved or transposed in vector memory. Rows are queries by heads.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ..spec import PagedSpec
from .call import Call, LANES
from .kernel import Block, Method, of_row, scale_buffers, Sizes, Small, small_arrays
from .tile import begun, capped, finished, LEAST, product, TRANSPOSED, wide, with_keys

_HIDDEN = -2
"""The head of a key that no query sees; that of a row without a head is -1."""


def _start(r: Any, size: Sizes, spec: PagedSpec, slot: Any) -> None:
    top = jnp.full(r["top"].shape, LEAST, jnp.float32)
    begun(_state(r), jnp.maximum(top, r["sinks"][0]) if "sinks" in r else top)


def _state(r: Any) -> Any:
    return r["top"], r["total"], r["acc"]


def _attend(r: Any, size: Sizes, spec: PagedSpec, block: Block) -> None:
    q = r["q_buffer"][block.item_slot].reshape(size.queries * size.heads, -1).astype(size.operand)
    load = lambda name: r[f"{name}_buffer"][block.slot].astype(size.operand).reshape(size.columns, -1)
    k = load("k")
    scores = _scaled(r, "k", block, product(q[:, : k.shape[-1]], k, TRANSPOSED))  # [R, C]
    if "rope" in r:
        scores += _scaled(r, "rope", block, product(q[:, k.shape[-1] :], load("rope"), TRANSPOSED))
    scores = capped(scores * spec.scale, spec.logits_soft_cap)

    head, key, page = (r["columns"][i : i + 1] for i in range(3))  # [1, C]
    query, row_head = (wide(r["rows"][i], size.columns) for i in range(2))  # [R, C]
    j, i = block.base + key, block.position + query
    if "slopes" in r:
        scores += r["slopes"][0] * (j - i).astype(jnp.float32)
    if "qq_bias" in r and block.bits is not None:
        # `position` is that of the sequence's first query, and no key from there on is in a block that is not masked.
        for query in range(size.queries):
            scores += jnp.where(j == block.position + query, r["qq_bias"][0][:, query : query + 1], 0.0)
    if block.bits is not None:
        there = jnp.where((j >= block.first) & (j <= block.last), (block.bits >> page) & 1, 0)
        head = jnp.where(there == 1, head, _HIDDEN)
    seen = head == row_head
    if block.bits is not None and size.queries > 1:
        seen &= j <= i
        if spec.left is not None:
            seen &= j >= i - spec.left
    scores = jnp.where(seen, scores, -jnp.inf)

    def values(weights: Any) -> Any:
        name = "v" if "v" in r else "k"
        if f"{name}_scales" in r:
            scales = r[f"{name}_scales_buffer"][block.slot]  # [1, C]
            weights *= scales if block.bits is None else jnp.where(head == _HIDDEN, 0.0, scales)
        return product(weights.astype(size.operand), load("v") if "v" in r else k)

    with_keys(_state(r), scores, values)


def _scaled(r: Any, name: str, block: Block, scores: Any) -> Any:
    """Scores times the scales of the keys, by token or by head."""
    if f"{name}_scales" in r:
        return scores * r[f"{name}_scales_buffer"][block.slot]
    return scores * r[f"{name}_scale"][0] if f"{name}_scale" in r else scores


def _finish(r: Any, size: Sizes, slot: Any) -> None:
    share, lse = finished(r["top"][...], r["total"][...])
    out = r["acc"][...] / wide(share, r["acc"].shape[-1])
    scale = "v_scale" if "v" in r else "k_scale"
    out = out * r[scale][0] if scale in r else out
    r["out_buffer"][slot] = out.astype(r["out"].dtype).reshape(size.queries, size.heads, -1)
    shape = (size.heads, size.heads)
    diagonal = lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(jnp.int32, shape, 1)
    for t in range(size.queries):
        column = lse[t * size.heads : (t + 1) * size.heads, :1]
        # The column turned to a row: all but one number of every sum are 0.
        r["lse_buffer"][slot, t] = jnp.sum(jnp.where(diagonal, column, 0.0), axis=0, keepdims=True)


def _given(call: Call, size: Sizes) -> dict[str, tuple[Any, Any]]:
    """`rows`: query and key head of each row, along it; `columns`: head, key and page in the block of each column; and the small arrays."""
    heads, queries = np.arange(size.heads), np.arange(size.queries)
    heads_of = np.where(heads < call.heads, heads // call.group, -1)
    rows = np.stack([np.repeat(queries, size.heads), np.tile(heads_of, size.queries)])
    rows = np.repeat(rows[..., None], LANES, axis=2)
    column = np.arange(size.columns)
    columns = np.stack([column % size.kv_heads, column // size.kv_heads, column // size.page_rows])
    small = Small(
        of_heads=lambda x: jnp.tile(_with_heads(call, size, x), (1, size.queries))[..., None],
        token_scales=lambda x: x.reshape(call.sequences, 1, -1),
        head_scales=lambda x: x[:, np.maximum(np.tile(heads_of, size.queries), 0), None],
    )
    inputs = small_arrays(call, size, small, rows=rows, columns=columns)
    if call.arrays.qq_bias is not None:
        bias = call.arrays.qq_bias[:, : size.queries, : size.queries].astype(jnp.float32)
        bias = jnp.repeat(bias, size.heads, axis=1)
        inputs["qq_bias"] = bias, of_row(call, size, bias)
    return inputs


def _with_heads(call: Call, size: Sizes, x: Any) -> Any:
    return jnp.pad(x, ((0, 0), (0, size.heads - call.heads)))


def _scratch(call: Call, size: Sizes) -> dict[str, Any]:
    rows = size.queries * size.heads
    state, acc = (pltpu.VMEM((rows, width), jnp.float32) for width in (LANES, call.values))
    return {"top": state, "total": state, "acc": acc, **scale_buffers(call, 1, size.columns)}


def _temporaries(size: Sizes) -> int:
    return 3 * 4 * size.queries * size.heads * size.columns


TOGETHER = Method(_start, _attend, _finish, _given, _scratch, _temporaries)
