"""Tiles in memory, for the Triton kernels of all recurrences: loading and storing.

Shapes of tiles in all kernels here: `C` is `CHUNK`, `BK` is `BLOCK_K` key channels, `BV` is `BLOCK_V` value channels; rows come first.
"""

import triton
import triton.language as tl


# fmt: off
@triton.jit
def load_tile(ptr, stride, count, column, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """The `[ROWS, COLUMNS]` tile at `column` of the rows at `ptr`, zero past `count` rows and `WIDTH` columns. `EVEN`: all rows are inside."""
    r = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    c = column + tl.arange(0, COLUMNS)[None, :]  # [1, COLUMNS]
    pointers = ptr + (r * stride + c)  # [ROWS, COLUMNS]
    # The smallest mask that suffices; conditions that are always true (`r >= 0`, `c >= 0`) give it the shape of the tile.
    if EVEN:
        if WIDTH % COLUMNS == 0:
            return tl.load(pointers)
        return tl.load(pointers, mask=(c < WIDTH) & (r >= 0), other=0.0)
    if WIDTH % COLUMNS == 0:
        return tl.load(pointers, mask=(r < count) & (c >= 0), other=0.0)
    return tl.load(pointers, mask=(r < count) & (c < WIDTH), other=0.0)


@triton.jit
def store_tile(ptr, tile, stride, count, column, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The counterpart of `load_tile`; stores in the dtype of the memory."""
    r = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    c = column + tl.arange(0, COLUMNS)[None, :]  # [1, COLUMNS]
    # Rows and columns that do not exist are left alone.
    tl.store(ptr + (r * stride + c), tile.to(ptr.dtype.element_ty), mask=(r < count) & (c < WIDTH))


@triton.jit
def load_transposed(ptr, stride, count, CHUNK: tl.constexpr):
    """`[j, i]` of a matrix `[count, CHUNK]`, zero past its rows."""
    r = tl.arange(0, CHUNK)  # [C]
    # Transposed by its addresses, so that threads exchange nothing.
    return tl.load(ptr + (r[None, :] * stride + r[:, None]), mask=(r < count)[None, :] & (r >= 0)[:, None], other=0.0)  # [C, C]


@triton.jit
def load_state(ptr, d0, v0, D: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """A tile of a state `[D, V]`, zero past its channels."""
    return load_tile(ptr + d0 * V, V, D - d0, v0, V, BLOCK_K, BLOCK_V, D % BLOCK_K == 0)  # [BK, BV]


@triton.jit
def load_carry(ptr, d0, D: tl.constexpr, BLOCK_K: tl.constexpr):
    """The decay of each key channel over a whole chunk."""
    d = d0 + tl.arange(0, BLOCK_K)  # [BK]
    return tl.load(ptr + d, mask=d < D, other=0.0)  # [BK]


@triton.jit
def load_vector(ptr, stride, count, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """One number per row, in float32, zero past `count`."""
    r = tl.arange(0, ROWS)  # [ROWS]
    if EVEN:
        return tl.load(ptr + r * stride).to(tl.float32)
    return tl.load(ptr + r * stride, mask=r < count, other=0.0).to(tl.float32)
