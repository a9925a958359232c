"""The kernel: items, each some queries of one sequence, one after the other over blocks of pages.

A page is read as one matrix `[p * K, D]`, as it lies in memory: all heads of a key follow one another. While a block of pages is computed the next
one is copied: of this item, or the first one of the next. What is done with a block is up to a `Method`: `together.py` and `by_head.py`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...core import Named
from ...launch.pallas import run, TpuLaunch
from ...launch.sizes import cdiv
from ..spec import PagedSpec, PAGES
from .call import Call, LANES, Ranges


class Sizes(NamedTuple):
    """Constants of the kernel."""

    queries: int  # of an item, at most
    heads: int
    kv_heads: int
    page: int  # keys
    pages: int  # of a block
    table: int  # pages of a row of the table
    cores: int
    tokens: int
    operand: Any  # the dtype of products

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return self.pages * self.page

    @property
    def page_rows(self) -> int:
        return self.page * self.kv_heads

    @property
    def columns(self) -> int:
        """Rows of the matrices of a block, and columns of its scores."""
        return self.pages * self.page_rows


class Block(NamedTuple):
    """A block of pages of an item, as a method sees it."""

    slot: Any  # of its pages in the buffers
    item_slot: Any  # of the queries
    base: Any  # its first key
    position: Any  # that of the query in the first row
    first: Any
    last: Any  # the first and the last key that any query sees
    bits: Any  # which of the pages there are, one bit each; `None` if every query sees every key


class Method(NamedTuple):
    """The computation on the blocks of an item. The references of the kernel come by name."""

    start: Callable[[Any, Sizes, PagedSpec, Any], None]  # with the slot of the queries
    attend: Callable[[Any, Sizes, PagedSpec, Block], None]
    finish: Callable[[Any, Sizes, Any], None]  # writes `out_buffer` and `lse_buffer` of a slot
    given: Callable[[Call, Sizes], dict[str, tuple[Any, Any]]]  # further inputs, with their specs
    scratch: Callable[[Call, Sizes], dict[str, Any]]
    temporaries: Callable[[Sizes], int]


def _kernel(*refs: Any, names: Any, size: Sizes, spec: PagedSpec, method: Method) -> None:
    """One item. `names` are those of the references."""
    r = dict(zip(names, refs, strict=True))
    ranges = Ranges(*(r[name] for name in Ranges._fields))
    core, step = pl.program_id(0), pl.program_id(1)
    place = step * size.cores + core
    # Items alternate between two buffers of queries and results.
    mine = lax.rem(step, 2)

    def pages_copy(n: Any, block: Any, slot: Any, begin: bool) -> None:
        """Starts to copy a block of pages, or waits for it."""
        first = ranges.row[n] * size.table + ranges.page[n] + block * size.pages
        number = jnp.minimum(ranges.pages[n] - block * size.pages, size.pages)
        kinds = [name for name in PAGES if name in r]

        def one(i: Any, _: Any) -> None:
            # Page 0 stands in for a missing one and is hidden later; a wait needs only the size.
            page = jnp.maximum(ranges.table[first + i], 0) if begin else 0
            for name in kinds:
                buffer = r[f"{name}_buffer"].at[slot, i]
                copy = pltpu.make_async_copy(r[name].at[page], buffer, r["page_done"].at[slot])
                copy.start() if begin else copy.wait()

        @pl.when(number == size.pages)
        def _():
            if begin:
                for i in range(size.pages):
                    one(i, None)
            else:
                for name in kinds:  # the bytes of all its pages at once
                    buffer = r[f"{name}_buffer"].at[slot]
                    pltpu.make_async_copy(buffer, buffer, r["page_done"].at[slot]).wait()

        @pl.when(number < size.pages)
        def _():
            lax.fori_loop(0, number, one, None)

        for name in PAGES:
            if f"{name}_scales" in r:
                scales, buffer = r[f"{name}_scales"], r[f"{name}_scales_buffer"]
                width = buffer.shape[-1]
                start = (ranges.page[n] + block * size.pages) * (width // size.pages)
                part = pl.ds(pl.multiple_of(start, LANES), width)
                source = scales.at[(ranges.row[n], *(slice(None),) * (len(scales.shape) - 2), part)]
                copy = pltpu.make_async_copy(source, buffer.at[slot], r["page_done"].at[slot])
                copy.start() if begin else copy.wait()

    def queries_copy(n: Any, slot: Any) -> Any:
        # A copy has a fixed size, so the last queries come with some before them.
        token = jnp.clip(ranges.token[n], 0, size.tokens - size.queries)
        source = r["q"].at[pl.ds(token, size.queries)]
        return pltpu.make_async_copy(source, r["q_buffer"].at[slot], r["q_done"].at[slot])

    @pl.when(step == 0)
    def _():
        r["slot"][0] = 0
        r["written"][0] = 0
        r["written"][1] = 0

        @pl.when(place < ranges.count[0])
        def _():
            n = ranges.order[place]
            queries_copy(n, 0).start()
            pages_copy(n, 0, 0, True)

    @pl.when(place < ranges.count[0])
    def _():
        n = ranges.order[place]
        token, position, queries = ranges.token[n], ranges.position[n], ranges.queries[n]
        # The place of the item's first query in that copy.
        offset = token - jnp.clip(token, 0, size.tokens - size.queries)
        blocks = lax.div(ranges.pages[n] + size.pages - 1, size.pages)
        queries_copy(n, mine).wait()
        method.start(r, size, spec, mine)

        def block(b: Any, _: Any) -> None:
            slot = r["slot"][0]

            is_last = b + 1 == blocks
            # Clamped for this read only: nothing is copied if no item follows.
            following = ranges.order[jnp.minimum(place + size.cores, ranges.order.shape[0] - 1)]

            @pl.when(jnp.logical_not(is_last) | (place + size.cores < ranges.count[0]))
            def _():
                pages_copy(jnp.where(is_last, following, n), jnp.where(is_last, 0, b + 1), 1 - slot, True)

            @pl.when(is_last & (place + size.cores < ranges.count[0]))
            def _():
                queries_copy(following, 1 - mine).start()

            pages_copy(n, b, slot, False)
            base = (ranges.page[n] + b * size.pages) * size.page
            view = Block(slot, mine, base, position - offset, ranges.first[n], position + queries - 1, None)
            lowest = view.first if spec.left is None else jnp.maximum(view.first, view.last - spec.left)
            whole = base + size.keys - 1 <= (position - 1 if "qq_bias" in r else position)
            seen = (base >= lowest) & whole
            seen &= (ranges.holes[n] == 0) & (ranges.pages[n] - b * size.pages >= size.pages)

            # Only a block with hidden keys is masked.
            @pl.when(seen)
            def _():
                method.attend(r, size, spec, view)

            @pl.when(jnp.logical_not(seen))
            def _():
                method.attend(r, size, spec, view._replace(bits=_cleared(r, ranges, n, b, view, size)))

            r["slot"][0] = 1 - slot

        lax.fori_loop(0, blocks, block, None)
        # Results of two items ago may still be on their way from this buffer.
        _results_wait(r, mine, size)
        method.finish(r, size, mine)
        _results_copy(r, mine, queries, size, token, offset)
        r["written"][mine] = queries

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        # The kernel must not end before its last results have arrived.
        _results_wait(r, 0, size)
        _results_wait(r, 1, size)


def _cleared(r: Any, ranges: Ranges, n: Any, b: Any, block: Block, size: Sizes) -> Any:
    """Sets the values of hidden keys, which may be NaN, to 0; returns which pages there are, one bit each."""
    name = "v_buffer" if "v" in r else "k_buffer"
    at = ranges.page[n] + b * size.pages
    begin, number = ranges.row[n] * size.table + at, ranges.pages[n] - b * size.pages

    def one(i: Any, bits: Any) -> Any:
        place = jnp.minimum(begin + i, ranges.table.shape[0] - 1)
        there = (i < number) & (ranges.table[place] >= 0)
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


def _results_copy(
    r: Any, slot: Any, count: Any, size: Sizes, token: Any, offset: Any, begin: bool = True
) -> None:
    """Starts to copy `count` results to their tokens, or waits for that, in powers of two at once."""
    part = 1 << (size.queries.bit_length() - 1)
    while part:

        @pl.when((count & part) != 0)
        def _(part: int = part):
            done = count & ~(2 * part - 1)
            for name in ("out", "lse"):
                source = r[f"{name}_buffer"].at[slot, pl.ds(offset + done, part)]
                target = r[name].at[pl.ds(token + done, part)]
                copy = pltpu.make_async_copy(source, target, r[f"{name}_done"].at[slot])
                copy.start() if begin else copy.wait()

        part //= 2


def _results_wait(r: Any, slot: Any, size: Sizes) -> None:
    """Waits for the results that were last copied from this place."""
    _results_copy(r, slot, r["written"][slot], size, 0, 0, begin=False)
    r["written"][slot] = 0


def over_items(call: Call, name: str, method: Method, size: Sizes, ranges: Ranges, results: Named) -> Named:
    """`results`, `out [T, H, V]` and `lse [T, 1, H]`, with those of the items written into them."""
    with_heads = lambda x, axis: _padded(x, axis, size.heads)
    q = _padded(with_heads(call.arrays.q, 1), 0, size.tokens)
    before = {"out": with_heads(results["out"], 1), "lse": with_heads(results["lse"], 2)}
    more = method.given(call, size)
    given = {**ranges._asdict(), "q": q, **call.pages, **{name: x for name, (x, _) in more.items()}}
    given |= {f"{name}_before": x for name, x in before.items()}
    # Two of each: one is computed with while the other is copied.
    buffer = lambda dtype, *shape: pltpu.VMEM((2, *shape), dtype)
    scratch = {
        **{f"{name}_buffer": buffer(x.dtype, size.pages, *x.shape[1:]) for name, x in call.pages.items()},
        "q_buffer": buffer(q.dtype, size.queries, *q.shape[1:]),
        "out_buffer": buffer(q.dtype, size.queries, size.heads, call.values),
        "lse_buffer": buffer(jnp.float32, size.queries, 1, size.heads),
        **method.scratch(call, size),
        **{f"{name}_done": pltpu.SemaphoreType.DMA((2,)) for name in ("page", "q", "out", "lse")},
        "slot": pltpu.SMEM((1,), jnp.int32),
        "written": pltpu.SMEM((2,), jnp.int32),
    }
    specs, scalars = {name: spec for name, (_, spec) in more.items()}, len(Ranges._fields)
    names = (*given, *before, *scratch)
    launch = TpuLaunch(
        kernel=functools.partial(_kernel, names=names, size=size, spec=call.spec, method=method),
        name=f"paged.{name}",
        grid=(size.cores, cdiv(ranges.order.shape[0], size.cores)),
        scalars=scalars,
        in_specs=[specs.get(name, anywhere()) for name in list(given)[scalars:]],
        out_specs=[anywhere(), anywhere()],
        outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in before.values()],
        scratch=list(scratch.values()),
        parallel=(0,),
        aliases={len(given) - 2: 0, len(given) - 1: 1},
        temporaries=method.temporaries(size),
    )
    out, lse = run(launch, list(given.values()))
    return {"out": out[:, : call.heads], "lse": lse[..., : call.heads]}


class Small(NamedTuple):
    """Shapes in which a method takes the small arrays: numbers for each head, and scales for each token and for each head."""

    of_heads: Callable[[Array], Array]  # [rows, H]
    token_scales: Callable[[Array], Array]  # [N, M', p, K]
    head_scales: Callable[[Array], Array]  # [rows, K]


def small_arrays(call: Call, size: Sizes, small: Small, **constants: Any) -> dict[str, tuple[Any, Any]]:
    """The further inputs of a method with their specs: its constants, sinks, slopes and scales."""
    arrays, wide = call.arrays, lambda x: x.astype(jnp.float32)
    rows = {name: x for name in ("sinks", "slopes") if (x := getattr(arrays, name)) is not None}
    rows = {name: small.of_heads(wide(x)) for name, x in rows.items()}
    inputs = {name: jnp.asarray(x, jnp.int32) for name, x in constants.items()}
    inputs = {name: (x, whole(x)) for name, x in inputs.items()}
    for name in call.pages:
        scale = getattr(arrays, f"{name}_scale")
        if call.by_token(name):
            inputs[f"{name}_scales"] = small.token_scales(_scale_rows(call, size, name)), anywhere()
        elif scale is not None:
            rows[f"{name}_scale"] = small.head_scales(wide(scale))
    return inputs | {name: (x, of_row(call, size, x)) for name, x in rows.items()}


def scale_buffers(call: Call, *shape: int) -> dict[str, Any]:
    """Buffers for the scales for each token of two blocks."""
    names = [name for name in call.pages if call.by_token(name)]
    return {f"{name}_scales_buffer": pltpu.VMEM((2, *shape), jnp.float32) for name in names}


def whole(x: Any) -> Any:
    """The spec of a whole small array, which is the same for every item."""
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def of_row(call: Call, size: Sizes, x: Any) -> Any:
    """The spec of the row of an array `[rows, ..]` that belongs to an item's sequence."""

    def index(core: Any, step: Any, count: Any, order: Any, row: Any, *_: Any) -> Any:
        place = jnp.minimum(step * size.cores + core, order.shape[0] - 1)
        return lax.div(row[order[place]], call.row_sequences), *(0,) * (x.ndim - 1)

    return pl.BlockSpec((1, *x.shape[1:]), index)


def _scale_rows(call: Call, size: Sizes, name: str) -> Array:
    """The scales of one kind of pages, `[N, M', p, K]`, by sequence: they are few, and XLA gathers what a kernel could only copy with much padding.
    The table is as much longer as a block is, so that blocks end within it."""
    scale, table = getattr(call.arrays, f"{name}_scale"), call.arrays.page_table
    table = jnp.pad(jnp.clip(table, 0, scale.shape[0] - 1), ((0, 0), (0, size.pages)))
    return scale[table]


def anywhere() -> Any:
    """An array that the kernel copies from."""
    return pl.BlockSpec(memory_space=pl.ANY)


def _padded(x: Array, axis: int, size: int) -> Array:
    more = size - x.shape[axis]
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)]) if more > 0 else x
