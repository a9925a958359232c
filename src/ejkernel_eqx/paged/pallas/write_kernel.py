"""Writes new tokens into pages, in place if the pages are donated: every run of tokens whose slots follow one another is one copy.

XLA's scatter takes 16 rows at a time: it reads their tiles, waits, changes them, writes them and waits again, one such group after the other. Here
the copies of a whole block of tokens are under way together, and nothing is read but the tokens.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...core import Named
from ...launch.pallas import run, TpuLaunch
from ...launch.sizes import cdiv, tile_bytes
from ..cache.quantise import quantise
from ..cache.write import put
from ..cache.write import write as scatter
from ..spec import PAGES, WriteArrays
from .block_sizes import heads_fill_words
from .call import LANES

_RUN = 8
"""The most tokens of a copy, a power of two. A copy of fewer, of a power of two as well, begins at a multiple of their number."""
_BLOCK = 2**20
"""Bytes of the tokens of a block, of all kinds of pages together."""
_MOST_TOKENS = 2**16
"""The slots of so many fit in scalar memory."""


def write(arrays: WriteArrays) -> Named:
    """Writes new tokens, as `cache.write.write`: with leading axes on the pages, tokens and slots have these axes too. XLA's scatter writes what
    the kernel does not take, and scales for each token."""
    names = [name for name in PAGES if name in arrays.new and _takes(arrays, name)]
    others = {name: x for name, x in arrays.new.items() if name not in names}
    results = dict(arrays.pages)
    if others:
        kept = {name: x for name, x in results.items() if name.removesuffix("_scale") in others}
        results |= scatter(WriteArrays(kept, others, arrays.slots))
    if names:
        results |= _written(arrays, names)
    return results


def _takes(arrays: WriteArrays, name: str) -> bool:
    """Reports whether a token fills rows of memory by itself, and XLA keeps the pages in this order."""
    *lead, count, page, heads, dim = (pages := arrays.pages[name]).shape
    alone = heads % 8 == 0 or heads_fill_words(heads, pages.dtype)
    few = 0 < arrays.slots.size <= _MOST_TOKENS and _RUN <= math.prod((*lead, count, page)) < 2**31
    return alone and few and dim % LANES == 0


def _written(arrays: WriteArrays, names: list[str]) -> Named:
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
    found = run(launch, operands)
    return results | {name: x.reshape(arrays.pages[name].shape) for name, x in zip(names, found, strict=True)}


def _launch(arrays: WriteArrays, new: Named, slots: Array) -> tuple[TpuLaunch, list[Array]]:
    """`new [T, K, D]` of every kind, as it is stored, and `slots [T]` of all pages, -1 for a token that is not written."""
    token = sum(tile_bytes((1, *x.shape[1:]), x.dtype) for x in new.values())
    block = min(max(_BLOCK // token // _RUN, 1), cdiv(slots.size, _RUN)) * _RUN
    blocks = cdiv(slots.size, block)
    slots = jnp.pad(slots, (0, blocks * block - slots.size), constant_values=-1)
    pages = [arrays.pages[name].reshape(-1, *x.shape[1:]) for name, x in new.items()]
    of_block = lambda x: pl.BlockSpec((block, *x.shape[1:]), lambda step, *_: (step, 0, 0))
    kinds, anywhere = len(pages), [pl.BlockSpec(memory_space=pl.ANY)] * len(pages)
    launch = TpuLaunch(
        kernel=functools.partial(_kernel, block=block),
        name="paged.write",
        grid=(blocks,),
        scalars=1,
        in_specs=[*map(of_block, new.values()), *anywhere],
        out_specs=anywhere,
        outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages],
        scratch=[pltpu.SemaphoreType.DMA((kinds,))],
        parallel=(0,),
        aliases={1 + kinds + n: n for n in range(kinds)},
    )
    return launch, [slots, *new.values(), *pages]


def _kernel(slots: Any, *refs: Any, block: int) -> None:
    """A block of tokens."""
    *others, done = refs
    kinds = len(others) // 3
    new, pages = others[:kinds], others[2 * kinds :]
    first = pl.program_id(0) * block

    def copies(place: Any, slot: Any, size: int) -> list[Any]:
        at = lambda kind: (new[kind].at[pl.ds(place, size)], pages[kind].at[pl.ds(slot, size)])
        return [pltpu.make_async_copy(*at(kind), done.at[kind]) for kind in range(kinds)]

    def start(place: Any, own: list[Any], size: int) -> None:
        """Copies tokens with the slots `own` from `place` on together if they follow one another, or else one half and the other."""
        joined = own[0] >= 0
        for n in range(1, size):
            joined &= own[n] == own[0] + n

        @pl.when(joined)
        def _() -> None:
            for copy in copies(place, own[0], size):
                copy.start()

        if size > 1:

            @pl.when(jnp.logical_not(joined))
            def _() -> None:
                for half in range(2):
                    at = half * size // 2
                    start(place + at, own[at : at + size // 2], size // 2)

    def group(n: Any, count: Any) -> Any:
        own = [slots[first + n * _RUN + at] for at in range(_RUN)]
        start(n * _RUN, own, _RUN)
        return count + sum((slot >= 0).astype(jnp.int32) for slot in own)

    count = lax.fori_loop(0, block // _RUN, group, jnp.int32(0))
    # The bytes of all these tokens, in powers of two.
    for power in range(block.bit_length()):

        @pl.when((count & (1 << power)) != 0)
        def _(part: int = 1 << power) -> None:
            for kind in range(kinds):
                tokens = new[kind].at[pl.ds(0, part)]
                pltpu.make_async_copy(tokens, tokens, done.at[kind]).wait()
