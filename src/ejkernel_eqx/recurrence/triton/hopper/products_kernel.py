"""Products of queries and keys for Hopper's single pass, computed once for many heads that share both."""

import triton
import triton.language as tl

from ..operands import products_of
from ..places import chunk_of
from ..tile import store_tile


# fmt: off
@triton.jit
def masked_products_kernel(
    q_ptr, k_ptr, chunks_ptr, T,
    products_ptr,
    HQ: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`products [B, T, HQ, C]`: queries times keys of a chunk, zero where a token would see a later one."""
    # A program: a chunk, a query head (fastest).
    index = tl.program_id(0)
    h = index % HQ
    first, count, _ = chunk_of(index // HQ, chunks_ptr, T, CHUNK, TABLE)  # pyright: ignore[reportGeneralTypeIssues]
    products = products_of(q_ptr + first * (HQ * D) + h * D, k_ptr + first * (HQ * D) + h * D, HQ * D, HQ * D, count, D, CHUNK, BLOCK_K, EVEN,
                           PRECISION)  # [C, C]
    # A token sees itself and those before it.
    r = tl.arange(0, CHUNK)  # [C]
    products = tl.where(r[:, None] >= r[None, :], products, 0.0)  # [C, C]
    store_tile(products_ptr + (first * HQ + h) * CHUNK, products, HQ * CHUNK, count, 0, CHUNK, CHUNK, CHUNK)
