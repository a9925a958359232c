"""The kernel for sequences with few queries: all heads of a block of keys at once.

A page is read as one matrix `[p * K, D]`, as it lies in memory: all heads of a key follow one another. All query heads are multiplied by all of its
rows, and products with the keys of other heads are masked. The matrix unit loads a tile of keys once in any case, for one head or for all, and
few queries do not fill it; nothing is moved or transposed in vector memory.

Each step of the grid is one sequence. While a block of pages is computed the next one is copied: of this sequence, or the first one of the next.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...launch.pallas import TpuLaunch
from ...launch.sizes import cdiv
from ..spec import PagedSpec
from .call import block_pages, Call, columns_of, LANES, Ranges, ranges_of, row_tile
from .tile import capped, LEAST, product, TRANSPOSED, with_keys

_HIDDEN = -2
"""The head of a key that no query sees; that of a row without a query is -1."""


class Sizes(NamedTuple):
    """What the kernel is compiled for."""

    queries: int
    heads: int
    kv_heads: int
    page: int  # keys
    pages: int  # of a block
    table: int  # pages of a row of the table
    cores: int
    tokens: int

    @property
    def rows(self) -> int:
        return self.queries * self.heads

    @property
    def page_rows(self) -> int:
        return self.page * self.kv_heads

    @property
    def columns(self) -> int:
        return self.pages * self.page_rows


def decode_kernel(*refs: Any, names: tuple[str, ...], size: Sizes, spec: PagedSpec, operand: Any) -> None:
    """One sequence; `names` are those of the references, `operand` is the dtype of the products."""
    r = dict(zip(names, refs, strict=True)) | {"operand": operand}
    ranges = Ranges(*(r[name] for name in Ranges._fields))
    core, step = pl.program_id(0), pl.program_id(1)
    item = step * size.cores + core
    count = ranges.count[0]
    mine = lax.rem(step, 2)

    def copies(n: Any, block: Any, slot: Any, begin: bool) -> None:
        """Starts to copy a block of pages, or waits for it."""
        first = ranges.page[n] + block * size.pages
        number = jnp.minimum(ranges.pages[n] - block * size.pages, size.pages)

        def one(i: Any, _: Any) -> None:
            page = jnp.maximum(ranges.table[n * size.table + first + i], 0)
            for name in ("k", "v", "rope"):
                if name in r:
                    copy = pltpu.make_async_copy(
                        r[name].at[page], r[f"{name}_buffer"].at[slot, i], r["page_done"].at[slot]
                    )
                    copy.start() if begin else copy.wait()

        lax.fori_loop(0, number, one, None)

    def queries_copy(n: Any, slot: Any) -> Any:
        token = jnp.clip(ranges.token[n], 0, size.tokens - size.queries)
        return pltpu.make_async_copy(
            r["q"].at[pl.ds(token, size.queries)], r["q_buffer"].at[slot], r["q_done"].at[slot]
        )

    def results_wait(slot: Any) -> None:
        """Waits for the results that were last written from this place."""

        def one(i: Any, _: Any) -> None:
            for name in ("out", "lse"):
                buffer = r[f"{name}_buffer"].at[slot, 0]
                pltpu.make_async_copy(buffer, r[name].at[0], r[f"{name}_done"].at[slot]).wait()

        lax.fori_loop(0, r["written"][slot], one, None)
        r["written"][slot] = 0

    @pl.when(step == 0)
    def _():
        r["slot"][0] = 0
        r["written"][0] = 0
        r["written"][1] = 0

        @pl.when(item < count)
        def _():
            n = ranges.order[item]
            queries_copy(n, 0).start()
            copies(n, 0, 0, True)

    @pl.when(item < count)
    def _():
        n = ranges.order[item]
        blocks = lax.div(ranges.pages[n] + size.pages - 1, size.pages)
        queries_copy(n, mine).wait()
        start(r)
        token, position = ranges.token[n], ranges.position[n]
        queries = ranges.queries[n]
        offset = token - jnp.clip(token, 0, size.tokens - size.queries)

        def block(b: Any, _: Any) -> None:
            slot = r["slot"][0]

            @pl.when(b + 1 < blocks)
            def _():
                copies(n, b + 1, 1 - slot, True)

            @pl.when((b + 1 == blocks) & (item + size.cores < count))
            def _():
                following = ranges.order[item + size.cores]
                queries_copy(following, 1 - mine).start()
                copies(following, 0, 1 - slot, True)

            copies(n, b, slot, False)
            base = (ranges.page[n] + b * size.pages) * size.page
            seen = Block(n, slot, base, position - offset, ranges.first[n], position + queries - 1, mine)
            attend(r, ranges, seen, ranges.pages[n] - b * size.pages, size, spec)
            r["slot"][0] = 1 - slot

        lax.fori_loop(0, blocks, block, None)
        results_wait(mine)
        finish(r, mine, queries, token, offset, size)

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        results_wait(0)
        results_wait(1)


def start(r: Any) -> None:
    """The state before any key: a sink counts as a first key whose value is 0."""
    r["acc"][...] = jnp.zeros_like(r["acc"])
    r["top"][...] = jnp.full_like(r["top"], LEAST)
    if "sinks" in r:
        r["top"][...] = jnp.maximum(r["top"][...], r["sinks"][0])
    r["total"][...] = jnp.where(r["top"][...] > LEAST, 1.0, 0.0)


class Block(NamedTuple):
    """A block of pages of one sequence, and what its queries see of it."""

    n: Any
    slot: Any
    base: Any  # its first key
    position: Any  # that of the query in the first row
    first: Any
    last: Any  # the first and the last key that any query sees
    queries_slot: Any


def attend(r: Any, ranges: Ranges, block: Block, pages: Any, size: Sizes, spec: PagedSpec) -> None:
    """Adds the keys of a block. Only a block with hidden keys is masked, and its hidden values, which may be NaN, are set to 0."""
    n, keys = block.n, size.pages * size.page
    lowest = block.first
    if spec.left is not None:
        lowest = jnp.maximum(lowest, block.last - spec.left)
    seen = (block.base >= lowest) & (block.base + keys - 1 <= ranges.position[n])
    seen &= (ranges.holes[n] == 0) & (pages >= size.pages)

    @pl.when(seen)
    def _():
        _attend(r, block, None, size, spec)

    @pl.when(jnp.logical_not(seen))
    def _():
        _attend(r, block, _cleared(r, ranges, block, pages, size), size, spec)


def _cleared(r: Any, ranges: Ranges, block: Block, pages: Any, size: Sizes) -> Any:
    """Sets the values of hidden keys to 0; returns which pages there are, one bit each."""
    name = "v_buffer" if "v" in r else "k_buffer"
    begin = block.n * size.table + lax.div(block.base, size.page)

    def one(i: Any, bits: Any) -> Any:
        place = jnp.minimum(begin + i, ranges.table.shape[0] - 1)
        there = (i < pages) & (ranges.table[place] >= 0)
        key = block.base + i * size.page
        low = jnp.clip(block.first - key, 0, size.page) * size.kv_heads
        high = jnp.clip(block.last + 1 - key, 0, size.page) * size.kv_heads
        high = jnp.where(there, high, 0)

        @pl.when((low > 0) | (high < size.page_rows))
        def _():
            page = r[name][block.slot, i]
            row = lax.broadcasted_iota(jnp.int32, page.shape, 0)
            page = jnp.where((row >= low) & (row < high), page.astype(jnp.float32), 0.0)
            r[name][block.slot, i] = page.astype(r[name].dtype)

        return bits | jnp.where(there, jnp.int32(1) << i, 0)

    return lax.fori_loop(0, size.pages, one, jnp.int32(0))


def _attend(r: Any, block: Block, bits: Any, size: Sizes, spec: PagedSpec) -> None:
    """Adds the keys of a block; with `bits`, only those that a query sees."""
    operand = r["operand"]
    q = r["q_buffer"][block.queries_slot].reshape(size.rows, -1).astype(operand)
    load = lambda name: r[f"{name}_buffer"][block.slot].reshape(size.columns, -1).astype(operand)
    k = load("k")
    scores = product(q[:, : k.shape[-1]], k, TRANSPOSED)  # [R, C]
    if "rope" in r:
        scores += product(q[:, k.shape[-1] :], load("rope"), TRANSPOSED)
    scores = capped(scores * spec.scale, spec.logits_soft_cap)

    head, key, page = (r["columns"][i : i + 1] for i in range(3))  # [1, C]
    query, row_head = r["rows"][:, :1], r["rows"][:, 1:2]  # [R, 1]
    j, i = block.base + key, block.position + query
    if "slopes" in r:
        scores += r["slopes"][0] * (j - i).astype(jnp.float32)
    if bits is not None:
        there = (bits >> page) & 1
        there = jnp.where((j >= block.first) & (j <= block.last), there, 0)
        head = jnp.where(there == 1, head, _HIDDEN)
    seen = head == row_head
    if bits is not None and size.queries > 1:
        seen &= j <= i
        if spec.left is not None:
            seen &= j >= i - spec.left
    scores = jnp.where(seen, scores, -jnp.inf)
    with_keys(r, scores, lambda weights: product(weights.astype(operand), k if "v" not in r else load("v")))


def finish(r: Any, mine: Any, count: Any, token: Any, offset: Any, size: Sizes) -> None:
    """Writes the results of one sequence."""
    total, top = r["total"][...], r["top"][...]
    some = total > 0
    share = jnp.where(some, total, 1.0)
    out = r["acc"][...] / share[:, :1]
    r["out_buffer"][mine] = out.astype(r["out"].dtype).reshape(size.queries, size.heads, -1)
    lse = jnp.where(some, top + jnp.log(share), -jnp.inf)[:, :1]  # [R, 1]
    shape = (size.heads, size.heads)
    diagonal = lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(jnp.int32, shape, 1)
    for t in range(size.queries):
        column = lse[t * size.heads : (t + 1) * size.heads]
        row = jnp.sum(jnp.where(diagonal, column, 0.0), axis=0, keepdims=True)  # [1, H]: the column turned
        r["lse_buffer"][mine, t] = row

    def one(t: Any, _: Any) -> None:
        for name in ("out", "lse"):
            pltpu.make_async_copy(
                r[f"{name}_buffer"].at[mine, t + offset],
                r[name].at[token + t],
                r[f"{name}_done"].at[mine],
            ).start()

    lax.fori_loop(0, count, one, None)
    r["written"][mine] = count


def decode(call: Call, queries: int, results: dict[str, Array]) -> dict[str, Array]:
    """`results`, `out [T, H, V]` and `lse [T, 1, H]`, with those of the sequences with 1 to `queries` queries written into them."""
    arrays, config = call.arrays, call.config
    tokens, heads = arrays.q.shape[:2]
    queries = min(queries, tokens)
    padded = row_tile(heads, arrays.q.dtype) if queries > 1 else heads
    pages = block_pages(call.page, call.kv_heads, config.decode_keys)
    size = Sizes(
        queries, padded, call.kv_heads, call.page, pages, arrays.page_table.shape[-1], config.cores, tokens
    )
    ranges = ranges_of(call, 1, queries)
    heads_of = np.where(np.arange(padded) < heads, np.arange(padded) // call.group, -1)
    rows = np.stack([np.repeat(np.arange(queries), padded), np.tile(heads_of, queries)], 1)
    more = ((0, 0), (0, padded - heads), (0, 0))
    q = jnp.pad(arrays.q, more) if padded > heads else arrays.q
    given = {
        **ranges._asdict(),
        "q": q,
        **call.pages,
        "columns": jnp.asarray(columns_of(call, pages)),
        "rows": jnp.asarray(rows, jnp.int32),
    }
    for name in ("sinks", "slopes"):
        x = getattr(arrays, name)
        if x is not None:
            x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, padded - heads)))
            given[name] = jnp.tile(x, (1, queries))[..., None]
    kept = {"out": jnp.pad(results["out"], more) if padded > heads else results["out"]}
    kept["lse"] = jnp.pad(results["lse"], ((0, 0), (0, 0), (0, padded - heads)))
    given |= {f"{name}_before": x for name, x in kept.items()}

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    whole = lambda x: pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)

    def row_of(core: Any, step: Any, count: Any, order: Any, *_: Any) -> Any:
        item = jnp.minimum(step * config.cores + core, call.sequences - 1)
        return lax.div(order[item], call.row_sequences), 0, 0

    specs = {"columns": whole(given["columns"]), "rows": whole(given["rows"])}
    for name in ("sinks", "slopes"):
        if name in given:
            specs[name] = pl.BlockSpec((1, size.rows, 1), row_of)
    pairs = lambda x: pltpu.VMEM((2, pages, *x.shape[1:]), x.dtype)
    scratch = {
        **{f"{name}_buffer": pairs(x) for name, x in call.pages.items()},
        "q_buffer": pltpu.VMEM((2, queries, *q.shape[1:]), q.dtype),
        "out_buffer": pltpu.VMEM((2, queries, padded, call.values), q.dtype),
        "lse_buffer": pltpu.VMEM((2, queries, 1, padded), jnp.float32),
        "acc": pltpu.VMEM((size.rows, call.values), jnp.float32),
        "top": pltpu.VMEM((size.rows, LANES), jnp.float32),
        "total": pltpu.VMEM((size.rows, LANES), jnp.float32),
        **{f"{name}_done": pltpu.SemaphoreType.DMA((2,)) for name in ("page", "q", "out", "lse")},
        "slot": pltpu.SMEM((1,), jnp.int32),
        "written": pltpu.SMEM((2,), jnp.int32),
    }
    inputs = list(given)[len(Ranges._fields) :]
    names = (*given, *kept, *scratch)
    launch = TpuLaunch(
        kernel=functools.partial(decode_kernel, names=names, size=size, spec=call.spec, operand=call.operand),
        name="paged.decode",
        grid=(config.cores, cdiv(call.sequences, config.cores)),
        scalars=len(Ranges._fields),
        in_specs=[specs.get(name, anywhere) for name in inputs],
        out_specs=[anywhere, anywhere],
        outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kept.values()],
        scratch=list(scratch.values()),
        parallel=(0,),
        aliases={len(given) - 2: 0, len(given) - 1: 1},
        temporaries=3 * 4 * size.rows * size.columns,
    )
    out, lse = call.execute(launch, list(given.values()))
    return {"out": out[:, :heads], "lse": lse[..., :heads]}
