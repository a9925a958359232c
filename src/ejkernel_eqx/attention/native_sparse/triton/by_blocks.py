"""The forward of the selected branch, by blocks of keys or by queries.

By queries, each program reads its blocks through the second cache, which bounds it: for a group of 16 heads, 32 KB for 16 rows of a product. By
blocks, a query's results of each block are written and read instead: in 16 bits twice 4 KB."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....launch import Launcher, result
from ....launch.sizes import cdiv, padded
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
    launch: Launcher,
    arrays: NativeArrays,
    spec: NativeSpec,
    tile: ForwardTile,
    indices: Array,
    gated: dict[str, Array] | None = None,
) -> dict[str, Array]:
    """`out [B, T, H, V]` and `lse [B, H, T]` of the selected branch, some queries at a time. With `gated`, the results of the other branches and the
    gates, `out` is the sum of all three."""
    batch, length, heads, _ = arrays.q.shape
    (kv_heads, values), dtype = arrays.v.shape[2:], arrays.q.dtype
    size = max(1, _BYTES // (batch * heads * spec.count * values * dtype.itemsize))
    chunks = cdiv(length, size)
    size = cdiv(length, chunks)
    # The lists of all chunks are sorted at once.
    apart = jnp.pad(indices, [(0, 0), (0, chunks * size - length), (0, 0), (0, 0)], constant_values=-1)
    apart = jnp.moveaxis(apart.reshape(batch, chunks, size, kv_heads, spec.count), 1, 0)
    lists = lists_of(
        apart.reshape(chunks * batch, size, kv_heads, spec.count),
        num_blocks(arrays, spec),
        tile.span,
        together=True,
    )
    launch, pieces, outs, lses = launch.knowing({"indices": indices}), lists.owner.shape[-1], [], []
    for number in range(chunks):
        own = jax.tree.map(lambda x, n=number: x[n * batch : (n + 1) * batch], lists)
        if outs:  # one after the other, in the same memory
            own, outs[-1] = lax.optimization_barrier((own, outs[-1]))
        # Of the last chunk, which may be shorter, too: queries past the end have no pairs.
        pairs = (batch, kv_heads, size * spec.count, heads // kv_heads)
        parts = launch(
            block_kernels.block_forward_kernel,
            tile,
            {"part": result(*pairs, values, dtype=dtype), "part_lse": result(*pairs)},
            batch * kv_heads * pieces,
            given(own),
            PIECES=pieces,
            chunk=number * size,
            length=size,
        )
        shape, more = (batch, size, heads, values), gated or {}
        found = merged(launch, parts | more, shape, spec.count, dtype, number * size)
        outs.append(found["out"])
        lses.append(found["lse"])
    if chunks == 1:
        return {"out": outs[0], "lse": lses[0]}
    # What reads the output would else read each of its numbers from one of many arrays.
    out = lax.optimization_barrier(jnp.concatenate(outs, 1)[:, :length])
    return {"out": out, "lse": jnp.concatenate(lses, 2)[..., :length]}


def merged(
    launch: Launcher,
    parts: dict[str, Array],
    shape: tuple[int, ...],
    slots: int,
    dtype: Any,
    chunk: int | None = None,
) -> dict[str, Array]:
    """`out` of this shape `[B, T, H, V]` and `lse [B, H, T]` from `part [B, K, T * slots, G, V]` and `part_lse`: of the blocks of queries from
    `chunk` on, where these have one, or else of splits. If `parts` has gates, `out` is the sum of the branches, of which it has the others."""
    batch, count, heads, values = shape
    kv_heads, group = parts["part"].shape[1], parts["part"].shape[3]
    outputs = {"out": result(*shape, dtype=dtype), "lse": result(batch, heads, count)}
    numbers = padded(slots, 1) * padded(group) * padded(values)  # of a program
    absent = dict.fromkeys(
        f"{branch}_{what}" for branch in ("compressed", "sliding") for what in ("out", "lse")
    )
    return launch(
        block_kernels.merge_blocks_kernel,
        Warped(min(8, max(1, numbers // 4096))),
        outputs,
        batch * kv_heads * count,
        {"gates": None} | absent | parts,
        N=slots,
        BLOCK_N=padded(slots, 1),
        CHOSEN=chunk is not None,
        GATED="gates" in parts,
        chunk=chunk or 0,
        length=count,
    )


def by_queries(
    launch: Launcher,
    kernel: Any,
    tile: Any,
    shape: tuple[int, ...],
    kv_heads: int,
    count: int,
    span: int,
) -> dict[str, Array]:
    """`out` of this shape `[B, T, H, V]` and `lse [B, H, T]` by `forward_kernel` or `page_forward_kernel`, each program with up to `span` of
    the `count` blocks of a query."""
    batch, length, heads, values = shape
    splits, dtype = cdiv(count, span), launch.absent.dtype
    programs = batch * length * kv_heads * splits
    numbers: Any = {"SPLITS": splits, "SPAN": span}
    if splits == 1:
        outputs = {"out": result(*shape, dtype=dtype), "lse": result(batch, heads, length)}
        return launch(
            kernel,
            tile,
            outputs,
            programs,
            name=f"native_{kernel.fn.__name__.removesuffix('_kernel')}",
            **numbers,
        )
    pairs = (batch, kv_heads, length * splits, heads // kv_heads)
    outputs = {"out": result(*pairs, values), "lse": result(*pairs)}
    found = launch(kernel, tile, outputs, programs, **numbers)
    return merged(launch, {"part": found["out"], "part_lse": found["lse"]}, shape, splits, dtype)
