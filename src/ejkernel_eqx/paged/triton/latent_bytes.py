"""Tiles of 8-bit latents for many rows of 16-bit queries: the latents are converted once, to float16, as keys and as values.

With many rows, matrices are multiplied from shared memory, where the latents are converted to. Float16 represents every int8 and float8 number
and needs fewer instructions than bfloat16: one for two float8 numbers. For this, each row of the queries is divided by a power of two.
"""

import triton
import triton.language as tl

from . import tile
from .pairs import EXPONENT, half_weights, LARGEST_EXPONENT, MANTISSA

# Flipping the sign bit of a byte adds 128; as the low byte of a float16 number from 1024 on, it counts ones.
_INTEGERS = tl.constexpr("""{
.reg .b32 flipped, low, high, bias;
xor.b32 flipped, $2, 0x80808080;
prmt.b32 low, flipped, 0x64646464, 0x4140;
prmt.b32 high, flipped, 0x64646464, 0x4342;
mov.b32 bias, 0x64806480;
sub.f16x2 $0, low, bias;
sub.f16x2 $1, high, bias;
}""")
_FLOATS = tl.constexpr("""{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")
# A number in e5m2 is the upper half of one in float16.
_UPPER_HALVES = tl.constexpr("""{
prmt.b32 $0, $2, 0, 0x1404;
prmt.b32 $1, $2, 0, 0x3424;
}""")


@triton.jit
def _four(x, CODE: tl.constexpr):
    return tl.inline_asm_elementwise(
        CODE, "=&r,=&r,r", [x], dtype=tl.float16, is_pure=True, pack=4)  # pyright: ignore[reportArgumentType]  # fmt: skip


@triton.jit
def halves(x, FAST: tl.constexpr):
    """8-bit numbers in float16, four at once."""
    if FAST and x.dtype == tl.int8:
        return _four(x, _INTEGERS)
    elif FAST and x.dtype == tl.float8e4nv:
        return _four(x, _FLOATS)
    elif FAST and x.dtype == tl.float8e5:
        return _four(x, _UPPER_HALVES)
    else:
        return x.to(tl.float16)


@triton.jit
def half_queries(
    q, q_rope, own_ptr, D: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    """Queries `[BM, BLOCK_D]` and of rotary keys `[BM, BLOCK_R]` in float16, at most 2, and what each row has been divided by, `[BM]`: as
    `split_queries`, but they are stored in the program's own memory `[BM, D + R]` and read again, because the compiler would keep what is computed in
    registers, of which there are not enough."""
    q = q.to(tl.float32)  # [BM, BLOCK_D]
    largest = tl.max(tl.abs(q), axis=1)  # [BM]
    if R > 0:
        q_rope = q_rope.to(tl.float32)  # [BM, BLOCK_R]
        largest = tl.maximum(largest, tl.max(tl.abs(q_rope), axis=1))  # [BM]
    exponent = (largest.to(tl.int32, bitcast=True) >> MANTISSA) & EXPONENT  # [BM]
    exponent = tl.minimum(exponent, LARGEST_EXPONENT)  # [BM]
    down = ((254 - exponent) << MANTISSA).to(tl.float32, bitcast=True)[:, None]  # [BM, 1]
    row = own_ptr + (tl.arange(0, BM) * (D + R))[:, None]  # [BM, 1]
    c = tl.arange(0, BLOCK_D)[None, :]  # [1, BLOCK_D]
    tl.store(row + c, (q * down).to(tl.float16), mask=c < D)
    if R > 0:
        r = tl.arange(0, BLOCK_R)[None, :]  # [1, BLOCK_R]
        tl.store(row + D + r, (q_rope * down).to(tl.float16), mask=r < R)
    # Every thread reads what others have stored.
    tl.debug_barrier()
    half = tl.load(row + c, mask=c < D, other=0.0)  # [BM, BLOCK_D]
    half_rope = half
    if R > 0:
        half_rope = tl.load(row + D + r, mask=r < R, other=0.0)  # [BM, BLOCK_R]
    return half, half_rope, (exponent << MANTISSA).to(tl.float32, bitcast=True)  # [BM]


@triton.jit
def attend_bytes(
    acc, total, top, q, q_rope, q_factor, visible, keys: tile.Keys, queries: tile.Queries, pages: tile.Pages, factors: tile.Factors,
    sizes: tile.Sizes, form: tile.Format, scoring: tile.Scoring,
):  # fmt: skip
    """Adds one tile of latents, as `attend_tile`. `q [BM, BLOCK_D]` and, for 8-bit rotary keys, `q_rope [BM, BLOCK_R]` have been divided by `q_factor
    [BM]`. `visible`: whether any key of the tile is; always true, see below. Sums and denominators: as in `attend_pairs`."""
    slot, ok, head = keys.slot, keys.ok, pages.head
    fast: tl.constexpr = form.FAST_BYTES
    k = tile.load_keys(pages.k, slot, ok, head, form.K, sizes.D, sizes.BLOCK_D, True)
    k = halves(k, fast)  # [BK, BLOCK_D]
    k_scale = 0.0
    if form.K_SCALES == tile.TOKEN:
        k_scale = tile.load_scales(pages.k_scale, slot, ok, head, form.K, True)  # [BK]
    # Everything is converted before the first product.
    if sizes.R > 0:
        # [BK, BLOCK_R]
        rope = tile.load_keys(pages.rope, slot, ok, head, form.K, sizes.R, sizes.BLOCK_R, True)
        rope_factor = factors.rope
        if form.R_SCALES != 0:
            rope = halves(rope, fast)
        if form.R_SCALES == tile.TOKEN:
            rope_factor = tile.load_scales(pages.rope_scale, slot, ok, head, form.K, True)[None, :]  # [1, BK]
        more = tl.dot(q_rope, tl.trans(rope))  # [BM, BK]
        if form.R_SCALES != 0:
            more *= rope_factor
    qk = tl.dot(q, tl.trans(k))  # [BM, BK]
    # The branch hides from the compiler that the last product depends on the first. It would have each group of four warps compute all scores,
    # to share none, where now each computes half of them.
    if visible:
        if form.K_SCALES == tile.TOKEN:
            qk *= k_scale[None, :]
        else:
            qk *= factors.k
        if sizes.R == 0:
            qk *= q_factor[:, None]
        elif form.R_SCALES != 0:
            qk = (qk + more) * q_factor[:, None]
        else:
            # Not a sum, into which the compiler would move the product of rotary keys.
            qk = tl.fma(qk, q_factor[:, None], more)
        p, alpha, total, top = half_weights(qk, total, top, k_scale, keys, queries, scoring, form.K_SCALES)
    else:
        p = (qk * 0.0).to(tl.float16)  # [BM, BK]; a constant would have shared memory of its own
        alpha = tl.full([sizes.BM], 1.0, tl.float32)  # [BM]
    acc = tl.dot(p, k, acc * alpha[:, None])  # [BM, BLOCK_D]
    return acc, total, top
