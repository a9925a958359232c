"""Kernels that store what parts of the package's kernels give. They have their own file because Triton reads its source."""

import triton
import triton.language as tl

from ejkernel_eqx.paged.triton.latent_bytes import half_queries, halves
from ejkernel_eqx.paged.triton.pairs import floats, integers
from ejkernel_eqx.paged.triton.tile import load_pages, locate


@triton.jit
def bytes_kernel(
    x_ptr, one_ptr, even_ptr, odd_ptr, PAIRS: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr
):
    """Of bytes `x [BLOCK]`: each, and the even and odd ones of `[BLOCK / 2]` pairs, in float16."""
    c = tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(one_ptr + c, halves(tl.load(x_ptr + c), FAST))
    d = tl.arange(0, BLOCK // 2)  # [BLOCK / 2]
    pair = tl.load(x_ptr.to(tl.pointer_type(tl.int16)) + d)  # [BLOCK / 2]
    if PAIRS == 1:
        even, odd = integers(pair, True, FAST)  # [BLOCK / 2] each
    else:
        even, odd = floats(pair, PAIRS, FAST)  # [BLOCK / 2] each
    tl.store(even_ptr + d, even)
    tl.store(odd_ptr + d, odd)


@triton.jit
def queries_kernel(q_ptr, own_ptr, half_ptr, factor_ptr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Queries `[ROWS, WIDTH]` in float16, and their factors."""
    at = (tl.arange(0, ROWS) * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]  # [ROWS, WIDTH]
    q = tl.load(q_ptr + at)
    half, _, factor = half_queries(  # pyright: ignore[reportGeneralTypeIssues]
        q, q, own_ptr, WIDTH, 0, ROWS, WIDTH, WIDTH
    )
    tl.store(half_ptr + at, half)
    tl.store(factor_ptr + tl.arange(0, ROWS), factor)


@triton.jit
def slots_kernel(table, END, P, high, low, PAGE: tl.constexpr, BK: tl.constexpr, FAR: tl.constexpr):
    """Of every key the slot in two halves of 32 bits, -1 where there is none."""
    tile = tl.program_id(0)
    pages = load_pages(table, tile, END, PAGE, BK)
    j, (start, within), ok = locate(pages, tile, 0, END, P, PAGE, BK, FAR)
    slot = tl.where(ok, start + within, -1)
    tl.store(high + j, (slot >> 32).to(tl.int32))
    tl.store(low + j, slot.to(tl.int32))
