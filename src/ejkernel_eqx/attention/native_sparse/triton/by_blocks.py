"""The forward of the selected branch by blocks of keys.

By queries, each program reads its blocks through the second cache, which bounds it: with a group of 16 heads 32 KB for 16 rows of a product. By blocks,
a query's results of each block are written and read instead, twice 4 KB in 16 bits."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ....launch import Launcher, result
from ....launch.sizes import padded
from ..lists import Lists, lists_of
from ..spec import NativeArrays, NativeSpec, num_blocks
from . import block_kernels
from .tiles import ForwardTile, Warped

_BYTES = 2**31  # of results of single blocks at a time


def given(lists: Lists) -> dict[str, Array]:
    """What kernels know of the lists."""
    batch, heads, each = lists.pairs.shape
    row = jnp.arange(batch * heads, dtype=jnp.int32).reshape(batch, heads, 1) * each
    return {"pairs": lists.pairs, "owner": lists.owner, "from": lists.begin + row, "to": lists.end + row}


def attended(
    launch: Launcher, arrays: NativeArrays, spec: NativeSpec, tile: ForwardTile, indices: Array
) -> dict[str, Array]:
    """`out [B, T, H, V]` and `lse [B, H, T]` of the selected branch, some queries at a time."""
    batch, length, heads, _ = arrays.q.shape
    values, size = arrays.v.shape[-1], arrays.q.dtype.itemsize
    most = max(1, _BYTES // (batch * heads * spec.count * values * size))
    outs, lses = [], []
    for chunk in range(0, length, most):
        count = min(most, length - chunk)
        chosen = indices[:, chunk : chunk + count]
        if outs:  # one after the other, in the same memory
            chosen, outs[-1] = lax.optimization_barrier((chosen, outs[-1]))
        found = _of_chunk(launch, arrays, spec, tile, indices, chosen, chunk)
        outs.append(found["out"])
        lses.append(found["lse"])
    return {"out": jnp.concatenate(outs, 1), "lse": jnp.concatenate(lses, 2)}


def _of_chunk(
    launch: Launcher,
    arrays: NativeArrays,
    spec: NativeSpec,
    tile: ForwardTile,
    indices: Array,
    chosen: Array,
    chunk: int,
) -> dict[str, Array]:
    (batch, _, heads, _), (kv_heads, values) = arrays.q.shape, arrays.v.shape[2:]
    count, group = chosen.shape[1], heads // kv_heads
    lists = lists_of(chosen, num_blocks(arrays, spec), tile.span, together=True)
    pieces = lists.owner.shape[-1]
    pairs = (batch, kv_heads, count * spec.count, group)
    place: Any = {"chunk": chunk, "length": count}
    parts = launch(
        block_kernels.block_forward_kernel,
        tile,
        {"part": result(*pairs, values, dtype=arrays.q.dtype), "part_lse": result(*pairs)},
        batch * kv_heads * pieces,
        given(lists),
        PIECES=pieces,
        **place,
    )
    outputs = {
        "out": result(batch, count, heads, values, dtype=arrays.q.dtype),
        "lse": result(batch, heads, count),
    }
    slots = padded(spec.count, 1)
    numbers = slots * padded(group) * padded(values)  # of a program
    warps = min(8, max(1, numbers // 4096))
    return launch(
        block_kernels.merge_blocks_kernel,
        Warped(warps),
        outputs,
        batch * kv_heads * count,
        {"indices": indices, **parts},
        BLOCK_N=slots,
        **place,
    )
