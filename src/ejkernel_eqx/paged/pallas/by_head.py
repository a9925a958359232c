"""One key head of a block after the other, for many queries: the heads are sorted apart when a block has come, and queries when an item begins.

Rows are the heads of a group by queries.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...launch.sizes import cdiv
from ..spec import PagedSpec
from .call import Call, LANES
from .kernel import Block, Method, scale_buffers, Sizes, Small, small_arrays
from .tile import begun, capped, finished, LEAST, product, TRANSPOSED, wide, with_keys

_UNROLLED = 8
"""The most key heads that are one piece of code, in which the products of one overlap the exponentials of another."""


def _sorted(x: Any) -> Any:
    """`[n, heads, D]` to `[heads, n, D]`, or back."""
    return jnp.swapaxes(x, 0, 1)


def _start(r: Any, size: Sizes, spec: PagedSpec, slot: Any) -> None:
    heads, rows, _ = r["q_heads"].shape
    q = _sorted(r["q_buffer"][slot].astype(size.operand))
    r["q_heads"][...] = q[: heads * rows // size.queries].reshape(r["q_heads"].shape)
    for h in range(heads):
        top = jnp.full((rows, LANES), LEAST, jnp.float32)
        if "sinks" in r:
            top = jnp.maximum(top, _along(r["sinks"], h, size.queries, LANES))
        begun(_state(r, h), top)


def _along(numbers: Any, h: Any, queries: int, width: int) -> Any:
    """Numbers of the heads of a group, `[1, K, G, 1]`, repeated along their rows, `[R, width]`."""
    group = (numbers[0, h, g : g + 1] for g in range(numbers.shape[2]))
    return jnp.concatenate([jnp.broadcast_to(x, (queries, width)) for x in group], 0)


def _state(r: Any, h: Any) -> Any:
    return tuple(r[name].at[h] for name in ("top", "total", "acc"))


def _attend(r: Any, size: Sizes, spec: PagedSpec, block: Block) -> None:
    for name in ("k", "v"):
        x = r[f"{name}_buffer"][block.slot].astype(size.operand).reshape(size.columns, -1)
        if "words" in r:
            _sort_pairs(x, r["words"], r[f"{name}_heads"], size)
        else:
            r[f"{name}_heads"][...] = _sorted(x.reshape(size.keys, size.kv_heads, -1))
    j = block.base + lax.broadcasted_iota(jnp.int32, (1, size.keys), 1)  # [1, C]
    i = wide(block.position + r["rows"][...], size.keys)  # [R, C]
    seen = there = None
    if block.bits is not None:
        there = jnp.where((j >= block.first) & (j <= block.last), (block.bits >> r["columns"][...]) & 1, 0)
        # A key that is not there gets the last position of all, which no query sees.
        j = jnp.where(there == 1, j, jnp.iinfo(jnp.int32).max)
        seen = j <= i
        if spec.left is not None:
            seen &= j >= i - spec.left

    def head(h: Any, _: Any) -> None:
        scores = product(r["q_heads"][h], r["k_heads"][h], TRANSPOSED)  # [R, C]
        if "k_scales" in r:
            scores *= r["k_scales_buffer"][block.slot, h]
        elif "k_scale" in r:
            scores *= r["k_scale"][0, h]
        scores = capped(scores * spec.scale, spec.logits_soft_cap)
        if "slopes" in r:
            scores += _along(r["slopes"], h, size.queries, 1) * (j - i).astype(jnp.float32)
        if seen is not None:
            scores = jnp.where(seen, scores, -jnp.inf)

        def values(weights: Any) -> Any:
            if "v_scales" in r:
                # The weights take the scales, which may be NaN where no key is seen.
                scales = r["v_scales_buffer"][block.slot, h]  # [1, C]
                weights *= scales if there is None else jnp.where(there == 1, scales, 0.0)
            return product(weights.astype(size.operand), r["v_heads"][h])

        with_keys(_state(r, h), scores, values)

    lax.fori_loop(0, size.kv_heads, head, None, unroll=size.kv_heads if size.kv_heads <= _UNROLLED else 2)


def _sort_pairs(x: Any, words: Any, heads: Any, size: Sizes) -> None:
    """Rows `[keys * heads, D]` by head, for an even number of heads in bfloat16: rows of two heads are one of 32-bit words, which are loaded with a
    stride. The upper half of a float32 number is one in bfloat16."""
    pairs = size.kv_heads // 2
    for at in range(0, x.shape[1], LANES):
        part = x[:, at : at + LANES]
        lanes = pl.ds(0, part.shape[1])
        words[:, lanes] = pltpu.bitcast(part, jnp.uint32)
        for pair in range(pairs):
            word = words[pl.ds(pair, size.keys, stride=pairs), lanes]
            for half, bits in enumerate((word << 16, word & jnp.uint32(0xFFFF0000))):
                # Exact, as the lower half of each number is zero.
                of_head = pltpu.bitcast(bits, jnp.float32).astype(jnp.bfloat16)
                heads[2 * pair + half, :, pl.ds(at, part.shape[1])] = of_head


def _finish(r: Any, size: Sizes, slot: Any) -> None:
    heads, rows, _ = r["q_heads"].shape
    queries = size.queries
    lane = lax.broadcasted_iota(jnp.int32, (queries, LANES), 1)
    group, none = rows // queries, jnp.full((queries, LANES), -jnp.inf, jnp.float32)
    found = [none] * cdiv(size.heads, LANES)
    for h in range(heads):
        share, lse = finished(r["top"][h], r["total"][h])
        # A scale per head is the same for all values, so it is applied once, to their sum.
        out = r["acc"][h] / wide(share, r["acc"].shape[-1])
        r["acc"][h] = out * r["v_scale"][0, h] if "v_scale" in r else out
        for g in range(group):
            at, place = divmod(h * group + g, LANES)
            found[at] = jnp.where(lane == place, lse[g * queries : (g + 1) * queries], found[at])
    lse = jnp.concatenate(found, 1)[:, : size.heads]
    r["lse_buffer"][slot] = lse.reshape(queries, 1, size.heads)
    out = r["acc"][...].astype(r["out"].dtype).reshape(heads * group, queries, -1)
    # Heads are padded to whole tiles of memory, and the rows behind are written as zeros.
    more = size.heads - heads * group
    if more:
        out = jnp.concatenate([out, jnp.zeros((more, *out.shape[1:]), out.dtype)], 0)
    r["out_buffer"][slot] = _sorted(out)


def _given(call: Call, size: Sizes) -> dict[str, tuple[Any, Any]]:
    """`rows`: the query of each row, along it; `columns`: the page within the block of each column; and the small arrays by head."""
    rows = np.repeat(np.tile(np.arange(size.queries), call.group)[:, None], LANES, axis=1)
    columns = (np.arange(size.keys) // size.page)[None]
    small = Small(
        of_heads=lambda x: x.reshape(-1, call.kv_heads, call.group, 1),
        token_scales=lambda x: jnp.moveaxis(x, 3, 1).reshape(call.sequences, call.kv_heads, 1, -1),
        head_scales=lambda x: x[..., None, None],
    )
    return small_arrays(call, size, small, rows=rows, columns=columns)


def _scratch(call: Call, size: Sizes) -> dict[str, Any]:
    heads, rows, dim = call.kv_heads, call.group * size.queries, call.arrays.q.shape[-1]
    state = pltpu.VMEM((heads, rows, LANES), jnp.float32)
    pairs = size.operand == jnp.bfloat16 and heads % 2 == 0
    of_heads = {"q": (rows, dim), "k": (size.keys, dim), "v": (size.keys, call.values)}
    return {
        **({"words": pltpu.VMEM((size.columns // 2, LANES), jnp.uint32)} if pairs else {}),
        **{f"{name}_heads": pltpu.VMEM((heads, *shape), size.operand) for name, shape in of_heads.items()},
        **{"top": state, "total": state, "acc": pltpu.VMEM((heads, rows, call.values), jnp.float32)},
        **scale_buffers(call, heads, 1, size.keys),
    }


def _temporaries(size: Sizes) -> int:
    return 3 * 4 * size.queries * size.heads // size.kv_heads * size.keys


BY_HEAD = Method(_start, _attend, _finish, _given, _scratch, _temporaries)
