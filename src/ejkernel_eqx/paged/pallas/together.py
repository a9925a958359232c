"""All heads of a block at once: all query heads are multiplied by the rows of all key heads, and products with other heads' keys are masked.

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
from .kernel import anywhere, Block, Method, of_row, scale_rows, Sizes, whole
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
    given = {"rows": jnp.asarray(rows, jnp.int32), "columns": jnp.asarray(columns, jnp.int32)}
    found = {name: (x, whole(x)) for name, x in given.items()}
    for name in ("sinks", "slopes"):
        x = getattr(call.arrays, name)
        if x is not None:
            x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, size.heads - call.heads)))
            x = jnp.tile(x, (1, size.queries))[..., None]
            found[name] = x, of_row(call, size, x)
    if call.arrays.qq_bias is not None:
        bias = call.arrays.qq_bias[:, : size.queries, : size.queries].astype(jnp.float32)
        bias = jnp.repeat(bias, size.heads, axis=1)
        found["qq_bias"] = bias, of_row(call, size, bias)
    for name in call.pages:
        scale = getattr(call.arrays, f"{name}_scale")
        if call.by_token(name):
            found[f"{name}_scales"] = scale_rows(call, size, name).reshape(call.sequences, 1, -1), anywhere()
        elif scale is not None:
            x = scale.astype(jnp.float32)[:, np.maximum(np.tile(heads_of, size.queries), 0), None]
            found[f"{name}_scale"] = x, of_row(call, size, x)
    return found


def _scratch(call: Call, size: Sizes) -> dict[str, Any]:
    rows = size.queries * size.heads
    state = pltpu.VMEM((rows, LANES), jnp.float32)
    scales = {
        f"{name}_scales_buffer": pltpu.VMEM((2, 1, size.columns), jnp.float32)
        for name in call.pages
        if call.by_token(name)
    }
    return {"top": state, "total": state, "acc": pltpu.VMEM((rows, call.values), jnp.float32), **scales}


def _temporaries(size: Sizes) -> int:
    return 3 * 4 * size.queries * size.heads * size.columns


TOGETHER = Method(_start, _attend, _finish, _given, _scratch, _temporaries)
