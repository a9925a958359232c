"""Operands of the kernels: their heads in memory, their dtype in products, and products of whole chunks."""

from collections import namedtuple

import triton
import triton.language as tl

from .tile import load_tile, store_tile

TF32_HALF = tl.constexpr(0x1000)  # half of the last bit of a float32 that tf32 keeps
TF32_KEPT = tl.constexpr(-0x2000)  # the bits that it keeps


Operand = namedtuple("Operand", "HS HEADS WIDTH ROWS COLUMNS EVEN")
"""An operand `[.., HEADS, WIDTH]` over tokens, of which state head h of `HS` reads head `h // (HS // HEADS)`, and the tiles `[ROWS, COLUMNS]` that
are loaded of it, whose rows are all tokens if `EVEN`; all are constants."""


# fmt: off
@triton.jit
def load_head(ptr, chunk, h, column, of):
    """The tile at `column` of a chunk's rows of an `Operand`, as the state head h reads it."""
    start = ptr + chunk.first * (of.HEADS * of.WIDTH) + h // (of.HS // of.HEADS) * of.WIDTH
    return load_tile(start, of.HEADS * of.WIDTH, chunk.count, column, of.WIDTH, of.ROWS, of.COLUMNS, of.EVEN)  # [C, COLUMNS]


@triton.jit
def store_head(ptr, tile, chunk, h, column, of):
    """The counterpart of `load_head`."""
    start = ptr + chunk.first * (of.HEADS * of.WIDTH) + h // (of.HS // of.HEADS) * of.WIDTH
    store_tile(start, tile, of.HEADS * of.WIDTH, chunk.count, column, of.WIDTH, of.ROWS, of.COLUMNS)


@triton.jit
def load_skip(ptr, seq, h, v0, HS: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """The factors of a head's values in its outputs, of `[sequences, HS, V]`."""
    c = v0 + tl.arange(0, BLOCK_V)  # [BV]
    return tl.load(ptr + (seq.to(tl.int64) * HS + h) * V + c, mask=c < V, other=0.0).to(tl.float32)  # [BV]


@triton.jit
def operand_of(x, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """A float32 result as an operand of products. Numbers for a single pass of `"tf32"` are rounded to its 11 bits here, because the
    hardware truncates towards zero, which would be visible in sums over many tokens."""
    # Half of the last bit that is kept, added before the others are cut off.
    if DTYPE == tl.float32 and PRECISION == "tf32":
        x = x.to(tl.float32)
        rounded = (x.to(tl.int32, bitcast=True) + TF32_HALF) & TF32_KEPT  # of x's shape
        # The addition would turn NVIDIA's NaN, 0x7fffffff, into a zero.
        return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
def products_of(a_ptr, b_ptr, a_stride, b_stride, count, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
                PRECISION: tl.constexpr):
    """The products of a chunk's rows of two operands, summed over all key channels."""
    products = tl.zeros([CHUNK, CHUNK], tl.float32)  # [C, C]
    # A slice of the channels at a time.
    for d in tl.static_range(0, D, BLOCK_K):
        a = load_tile(a_ptr, a_stride, count, d, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
        b = load_tile(b_ptr, b_stride, count, d, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
        products = tl.dot(a, tl.trans(b), products, input_precision=PRECISION)  # [C, C]
    return products
