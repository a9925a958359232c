"""A Triton kernel that writes where the keys of a sequence lie. Triton reads its source, so it lives in a file."""

import triton
import triton.language as tl

from ejkernel_eqx.paged.triton.tile import load_pages, locate


@triton.jit
def slots_kernel(table, END, P, high, low, PAGE: tl.constexpr, BK: tl.constexpr, FAR: tl.constexpr):
    """Of every key the slot in two halves of 32 bits, -1 where there is none."""
    tile = tl.program_id(0)
    pages = load_pages(table, tile, END, PAGE, BK)
    j, (start, within), ok = locate(pages, tile, 0, END, P, PAGE, BK, FAR)
    slot = tl.where(ok, start + within, -1)
    tl.store(high + j, (slot >> 32).to(tl.int32))
    tl.store(low + j, slot.to(tl.int32))
