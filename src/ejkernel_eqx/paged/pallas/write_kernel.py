"""Writes new tokens into pages, in place if the pages are donated: every run of tokens whose slots follow one another is one copy.

XLA's scatter takes 16 rows at a time: it reads their tiles, waits, changes them, writes them and waits again, one such group after the other. Here the copies
of a whole block of tokens are under way together, and nothing is read but the tokens.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...launch.pallas import Execute, run, TpuLaunch
from ...launch.sizes import cdiv, tile_bytes
from ..cache.quantise import quantise
from ..cache.write import put
from ..cache.write import write as scatter
from ..spec import PAGES, WriteArrays
from .call import LANES

_RUN = 8
"""The most tokens of a copy, a power of two; runs begin at multiples of their size."""
_BLOCK = 2**20
"""Bytes of the tokens of a block, of all kinds of pages together."""
_MOST_TOKENS = 2**16
"""The slots and runs of so many fit in scalar memory."""


class Copies(NamedTuple):
    """int32 in scalar memory: what is copied where."""

    slot: Array  # [T]: of all pages, -1 for a token that is not written
    run: Array  # [T]: how many tokens are copied from this one on, 0 for one that another brings along
    count: Array  # [blocks]: the tokens that a block writes


def write(arrays: WriteArrays, *, execute: Execute = run) -> dict[str, Array]:
    """As `cache.write.write`: with leading axes on the pages, tokens and slots have these axes too. XLA's scatter writes what the kernel does not
    take, and scales for each token."""
    names = [name for name in PAGES if name in arrays.new and _takes(arrays, name)]
    others = {name: x for name, x in arrays.new.items() if name not in names}
    results = dict(arrays.pages)
    if others:
        kept = {name: x for name, x in results.items() if name.removesuffix("_scale") in others}
        results |= scatter(WriteArrays(kept, others, arrays.slots))
    if names:
        results |= _written(arrays, names, execute)
    return results


def _takes(arrays: WriteArrays, name: str) -> bool:
    """Whether a token fills rows of memory by itself, and XLA keeps the pages in this order."""
    *lead, count, page, heads, dim = (pages := arrays.pages[name]).shape
    alone = heads % 8 == 0 or (heads in (1, 2, 4) and heads * pages.dtype.itemsize >= 4)
    few = 0 < arrays.slots.size <= _MOST_TOKENS and math.prod((*lead, count, page)) < 2**31
    return alone and few and dim % LANES == 0


def _written(arrays: WriteArrays, names: list[str], execute: Execute) -> dict[str, Array]:
    *lead, count, page, _, _ = arrays.pages[names[0]].shape
    sets, room = math.prod(lead), count * page
    slots = arrays.slots.reshape(sets, -1)
    first = jnp.arange(sets, dtype=jnp.int32)[:, None] * room
    slots = jnp.where((slots >= 0) & (slots < room), slots + first, -1).reshape(-1)
    results, given = {}, {}
    for name in names:
        pages, scale = arrays.pages[name], arrays.pages.get(f"{name}_scale")
        new = arrays.new[name].reshape(sets, -1, *pages.shape[-2:])  # [sets, T, K, D]
        if scale is None:
            new = new.astype(pages.dtype)
        elif scale.ndim < pages.ndim - 1:
            new, _ = quantise(new, pages.dtype, scale if scale.ndim == 1 else scale.reshape(sets, 1, -1))
        else:
            new, own = quantise(new, pages.dtype)
            together = scale.reshape(sets * count, page, -1)
            results[f"{name}_scale"] = put(together, own.reshape(slots.size, -1), slots).reshape(scale.shape)
        given[name] = new.reshape(slots.size, *new.shape[2:])
    launch, operands = _launch(arrays, given, slots)
    found = execute(launch, operands)
    return results | {
        name: x.reshape(arrays.pages[name].shape) for name, x in zip(names, found, strict=True)
    }


def _launch(
    arrays: WriteArrays, new: dict[str, Array], slots: Array
) -> tuple[TpuLaunch, list[Array]]:
    """`new [T, K, D]` of every kind, as it is stored."""
    token = sum(tile_bytes((1, *x.shape[1:]), x.dtype) for x in new.values())
    block = min(max(_BLOCK // token // _RUN, 1), cdiv(slots.size, _RUN)) * _RUN
    more = -slots.size % block
    tokens = [jnp.pad(x, ((0, more), (0, 0), (0, 0))) for x in new.values()]
    pages = [arrays.pages[name].reshape(-1, *x.shape[1:]) for name, x in new.items()]
    copies = _copies(jnp.pad(slots, (0, more), constant_values=-1), block)
    of_block = lambda x: pl.BlockSpec((block, *x.shape[1:]), lambda step, *_: (step, 0, 0))
    anywhere = [pl.BlockSpec(memory_space=pl.ANY)] * len(pages)
    launch = TpuLaunch(
        kernel=functools.partial(_kernel, block=block),
        name="paged.write",
        grid=(copies.count.shape[0],),
        scalars=len(copies),
        in_specs=[*map(of_block, tokens), *anywhere],
        out_specs=anywhere,
        outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages],
        scratch=[pltpu.SemaphoreType.DMA((len(pages),))],
        parallel=(0,),
        aliases={len(copies) + len(pages) + n: n for n in range(len(pages))},
    )
    return launch, [*copies, *tokens, *pages]


def _copies(slots: Array, block: int) -> Copies:
    valid = slots >= 0
    run = valid.astype(jnp.int32)
    size = 2
    while size <= _RUN:
        parts = slots.reshape(-1, size)
        place = jnp.arange(size, dtype=jnp.int32)[None]
        joined = jnp.all(parts == parts[:, :1] + place, axis=1, keepdims=True) & (parts[:, :1] >= 0)
        run = jnp.where(joined, jnp.where(place == 0, size, 0), run.reshape(-1, size)).reshape(-1)
        size *= 2
    return Copies(slots, run, jnp.sum(valid.reshape(-1, block), axis=1, dtype=jnp.int32))


def _kernel(*refs: Any, block: int) -> None:
    """A block of tokens."""
    copies, (*others, done) = Copies(*refs[: len(Copies._fields)]), refs[len(Copies._fields) :]
    kinds = len(others) // 3
    new, pages = others[:kinds], others[2 * kinds :]
    step = pl.program_id(0)

    def copy(kind: int, place: Any, slot: Any, size: int) -> Any:
        source, target = new[kind].at[pl.ds(place, size)], pages[kind].at[pl.ds(slot, size)]
        return pltpu.make_async_copy(source, target, done.at[kind])

    def start(place: Any, size: int) -> None:
        for kind in range(kinds):
            copy(kind, place, copies.slot[step * block + place], size).start()

    def group(n: Any, _: None) -> None:
        first = n * _RUN
        size = copies.run[step * block + first]

        @pl.when(size == _RUN)
        def _() -> None:
            start(first, _RUN)

        @pl.when(size != _RUN)
        def _() -> None:
            for at in range(_RUN):
                size = copies.run[step * block + first + at]
                for part in (1, 2, 4):
                    if at % part == 0:
                        pl.when(size == part)(functools.partial(start, first + at, part))

    lax.fori_loop(0, block // _RUN, group, None)
    # Waits for the bytes of all tokens of the block, in powers of two.
    part = 1
    while part <= block:

        @pl.when((copies.count[step] & part) != 0)
        def _(part: int = part) -> None:
            for kind in range(kinds):
                copy(kind, 0, 0, part).wait()

        part *= 2
