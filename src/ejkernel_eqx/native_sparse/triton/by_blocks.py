"""The forward of the selected branch, by blocks of keys or by queries.

By queries, each program reads its blocks through the second cache, which bounds it: for a group of 16 heads, 32 KB for 16 rows of a product. By
blocks, a query's results of each block are written and read instead: in 16 bits twice 4 KB."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...core import Named
from ...launch import Launcher, NOTHING, Options, result
from ...launch.sizes import cdiv, padded
from ..branches import SOFTMAX
from ..lists import Lists, lists_of
from ..spec import NativeArrays, NativeSpec, num_blocks
from . import block_kernels
from .tiles import ForwardTile

_BYTES = 2**31  # of results of single blocks at a time


def given(lists: Lists) -> Named:
    """Returns what kernels know of the lists."""
    batch, heads, each = lists.pairs.shape
    row = jnp.arange(batch * heads, dtype=jnp.int32).reshape(batch, heads, 1) * each
    return {"pairs": lists.pairs, "owner": lists.owner, "from": lists.begin + row, "to": lists.end + row}


def attended(
    launch: Launcher, arrays: NativeArrays, spec: NativeSpec, tile: ForwardTile, indices: Array, gated: Any
) -> Named:
    """`out [B, T, H, V]` and `lse [B, H, T]` of the selected branch, some queries at a time. With `gated`, the results of the other branches and the
    gates, `out` is the sum of all three, and there is no `lse`."""
    batch, length, heads, _ = arrays.q.shape
    (kv_heads, values), dtype = arrays.v.shape[2:], arrays.q.dtype
    size = max(1, _BYTES // (batch * heads * spec.count * values * dtype.itemsize))
    chunks = cdiv(length, size)
    # Chunks of about one size, so that the last one is not much smaller.
    size = cdiv(length, chunks)
    # The lists of all chunks are sorted at once.
    apart = jnp.pad(indices, [(0, 0), (0, chunks * size - length), (0, 0), (0, 0)], constant_values=-1)
    apart = jnp.moveaxis(apart.reshape(batch, chunks, size, kv_heads, spec.count), 1, 0)
    apart = apart.reshape(chunks * batch, size, kv_heads, spec.count)
    lists = lists_of(apart, num_blocks(arrays, spec), tile.span, together=True)
    pieces, found = lists.owner.shape[-1], {}
    launch = launch.knowing({"indices": indices}, length=size)
    # Of the last chunk, which may be shorter, too: queries past the end have no pairs.
    pairs = (batch, kv_heads, size * spec.count, heads // kv_heads)
    outputs = {"part": result(*pairs, values, dtype=dtype), "part_lse": result(*pairs)}
    for number in range(chunks):
        own = jax.tree.map(lambda x, n=number: x[n * batch : (n + 1) * batch], lists)
        if found:  # one after the other, in the same memory
            own, found = lax.optimization_barrier((own, found))
        numbers, programs = {"PIECES": pieces, "chunk": number * size}, batch * kv_heads * pieces
        parts = launch(block_kernels.block_forward_kernel, tile, outputs, programs, given(own), **numbers)
        part = Part(spec.count, size, number * size, found, tile.merge_registers)
        found = merged(launch, parts | (gated or {}), (batch, length, heads, values), part, dtype)
    return found


class Part(NamedTuple):
    """Holds which queries are merged: `count` of them, with so many `slots` of parts each; of the blocks that queries have, if there is a `chunk`
    that they begin at. Results of other chunks, `before`, are completed in place. `registers` are the most of a thread, if not 0."""

    slots: int
    count: int
    chunk: int | None = None
    before: Named | None = None
    registers: int = 0


def merged(launch: Launcher, parts: Named, shape: tuple[int, ...], which: Part, dtype: Any) -> Named:
    """`out` of this shape `[B, T, H, V]` and `lse [B, H, T]` from `part [B, K, count * slots, G, V]` and `part_lse`: of the blocks of queries, where
    these have one, or else of splits. If `parts` has gates, `out` is the sum of the branches, of which it has the others, without `lse`."""
    batch, length, heads, values = shape
    kv_heads, group = parts["part"].shape[1], parts["part"].shape[3]
    outputs = {"out": result(*shape, dtype=dtype), "lse": result(batch, heads, length)}
    if gated := "gates" in parts:
        outputs["lse"] = NOTHING
    numbers = padded(which.slots, 1) * padded(group) * padded(values)  # of a program
    tile = Options(min(8, max(1, numbers // 4096)), 1, which.registers)
    absent = dict.fromkeys(("gates", *(f"{name}_{what}" for name in SOFTMAX for what in ("out", "lse"))))
    known = which.before or {}
    before = {"before": known.get("out"), "before_lse": known.get("lse")}
    aliases = {"before": "out"} if gated else {"before": "out", "before_lse": "lse"}
    chunk = {"chunk": which.chunk or 0, "length": which.count, "CHOSEN": which.chunk is not None}
    launch = launch.knowing(absent | before | parts, N=which.slots, BLOCK_N=padded(which.slots, 1), **chunk)
    kernel, programs = block_kernels.merge_blocks_kernel, batch * kv_heads * which.count
    found = launch(kernel, tile, outputs, programs, aliases=aliases if known else {}, GATED=gated)
    return {"out": found["out"]} if gated else found


def by_queries(launch: Launcher, kernel: Any, tile: Any, shape: tuple[int, ...]) -> Named:
    """`out` of this shape `[B, T, H, V]` and `lse [B, H, T]` by `forward_kernel` or `page_forward_kernel`, each program with up to `tile.span` of
    the blocks of a query."""
    (batch, length, heads, values), dtype = shape, launch.absent.dtype
    kv_heads, splits = launch.numbers["K"], cdiv(launch.numbers["N"], tile.span)
    programs = batch * length * kv_heads * splits
    numbers: Any = {"SPLITS": splits, "SPAN": tile.span}
    # A program with all blocks of a query writes its result, and nothing is merged.
    if splits == 1:
        outputs = {"out": result(*shape, dtype=dtype), "lse": result(batch, heads, length)}
        name = f"native_{kernel.fn.__name__.removesuffix('_kernel')}"
        return launch(kernel, tile, outputs, programs, name=name, **numbers)
    pairs = (batch, kv_heads, length * splits, heads // kv_heads)
    # Parts stay in float32 until they are merged.
    outputs = {"out": result(*pairs, values), "lse": result(*pairs)}
    found = launch(kernel, tile, outputs, programs, **numbers)
    parts = {"part": found["out"], "part_lse": found["lse"]}
    return merged(launch, parts, shape, Part(splits, length), dtype)
