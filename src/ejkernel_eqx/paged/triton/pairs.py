"""Tiles of 8-bit pages for 16-bit queries: two neighbouring channels of a key are loaded as one 16-bit number.

Matrices of 16-bit numbers can be loaded from shared memory in the order of the tensor cores, transposed or not; bytes would be loaded one by
one. So even and odd channels are multiplied as two matrices. They are multiplied in float16, which represents every int8 and float8 number
and needs fewer instructions to convert to than bfloat16. For this, each row of the queries is divided by a power of two.
"""

import triton
import triton.language as tl

from . import tile

BIASED = tl.constexpr(1152)  # what `integers` adds to an int8 number
PAIRS_OF = {"int8": 1, "float8_e4m3fn": 2, "float8_e5m2": 3}
"""`PAIRS` of pages."""
INT8, E5M2 = tl.constexpr(1), tl.constexpr(3)
# Weights up to 2^15, so that weights far below the largest are still representable in float16.
RAISED = tl.constexpr(15)
BYTE, LOW_BYTE = tl.constexpr(8), tl.constexpr(255)
# For float32: the bits of the mantissa, of the exponent above them, and the largest exponent that has an inverse.
MANTISSA, EXPONENT, LARGEST_EXPONENT = tl.constexpr(23), tl.constexpr(255), tl.constexpr(253)
# 0x6480 is `BIASED` in float16; `lop3` with 0x6a is `(a & b) ^ c`.
_INTEGERS = tl.constexpr("""{
.reg .b32 high;
lop3.b32 $0, $2, 0x00ff00ff, 0x64806480, 0x6a;
shr.u32 high, $2, 8;
lop3.b32 $1, high, 0x00ff00ff, 0x64806480, 0x6a;
}""")
_EXACT_INTEGERS = tl.constexpr("""{
.reg .b32 low, high, bias;
lop3.b32 low, $2, 0x00ff00ff, 0x64806480, 0x6a;
shr.u32 high, $2, 8;
lop3.b32 high, high, 0x00ff00ff, 0x64806480, 0x6a;
mov.b32 bias, 0x64806480;
sub.f16x2 $0, low, bias;
sub.f16x2 $1, high, bias;
}""")
# Both low bytes first, then both high ones, because the conversion takes two neighbours.
_FLOATS = tl.constexpr("""{
.reg .b32 sorted;
.reg .b16 low, high;
prmt.b32 sorted, $2, $2, 0x3120;
mov.b32 {low, high}, sorted;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")


# A number in e5m2 is the upper half of one in float16.
_UPPER_HALVES = tl.constexpr("""{
shl.b32 $0, $2, 8;
and.b32 $0, $0, 0xff00ff00;
and.b32 $1, $2, 0xff00ff00;
}""")


@triton.jit
def split_queries(q, BM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows `[BM, BLOCK_D]` as even and odd channels in float16, at most 2 each, and the factors for products with them, `[BM]`."""
    q = q.to(tl.float32)  # [BM, BLOCK_D]
    # The power of two that divides each row: bits 0 to 254 stand for 2^-127 to 2^127, so the inverse has 254 minus these bits.
    exponent = (tl.max(tl.abs(q), axis=1).to(tl.int32, bitcast=True) >> MANTISSA) & EXPONENT  # [BM]
    exponent = tl.minimum(exponent, LARGEST_EXPONENT)
    down = ((254 - exponent) << MANTISSA).to(tl.float32, bitcast=True)  # [BM]
    even, odd = tl.split(tl.reshape((q * down[:, None]).to(tl.float16), (BM, BLOCK_D // 2, 2)))  # [BM, BLOCK_D / 2] each  # fmt: skip
    return even, odd, (exponent << MANTISSA).to(tl.float32, bitcast=True)  # [BM]


@triton.jit
def _halves(pair, CODE: tl.constexpr):
    """Applies instructions to 16-bit numbers, two at once: float16 numbers of the low and of the high bytes."""
    return tl.inline_asm_elementwise(
        CODE, "=&r,=&r,r", [pair], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)  # pyright: ignore[reportArgumentType]  # fmt: skip


@triton.jit
def integers(pair, EXACT: tl.constexpr, FAST: tl.constexpr):
    """The low and the high int8 bytes of 16-bit numbers in float16; unless `EXACT`, they are too large by `BIASED`, which is cheaper."""
    if FAST:
        # Four bytes at once. Flipping the sign bit of a byte adds 128; as the low bits of a float16 number from 1024 on, it counts ones.
        return _halves(pair, _EXACT_INTEGERS if EXACT else _INTEGERS)
    else:
        rest: tl.constexpr = 0 if EXACT else BIASED  # pyright: ignore[reportAssignmentType]
        # Shifts of an int16 keep its sign.
        return (((pair << BYTE) >> BYTE) + rest).to(tl.float16), ((pair >> BYTE) + rest).to(tl.float16)  # both of the shape of pair  # fmt: skip


@triton.jit
def floats(pair, PAIRS: tl.constexpr, FAST: tl.constexpr):
    """The low and the high bytes of 16-bit numbers, float8 each, in float16."""
    if PAIRS == E5M2:
        if FAST:
            return _halves(pair, _UPPER_HALVES)
        else:
            high = (pair >> BYTE) << BYTE  # of the shape of pair
            return (pair << BYTE).to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)
    elif FAST:
        return _halves(pair, _FLOATS)
    else:
        low = (pair & LOW_BYTE).to(tl.uint8).to(tl.float8e4nv, bitcast=True)  # of the shape of pair
        high = ((pair >> BYTE) & LOW_BYTE).to(tl.uint8).to(tl.float8e4nv, bitcast=True)  # of the shape of pair  # fmt: skip
        return low.to(tl.float16), high.to(tl.float16)


@triton.jit
def half_weights(
    qk, total, top, v_scale, keys: tile.Keys, queries: tile.Queries, scoring: tile.Scoring, SCALES: tl.constexpr
):  # fmt: skip
    """Weights, as `weights`, times the scales of the values if each token has one, in float16. All are scaled by `2**RAISED`."""
    # Float16 cannot represent small scales times small weights: the products are relative to the largest one.
    scaled: tl.constexpr = SCALES == tile.TOKEN  # pyright: ignore[reportAssignmentType]
    p, alpha, total, top = tile.weights(  # pyright: ignore[reportGeneralTypeIssues]
        qk, total, top, v_scale, keys, queries, scoring, True, RAISED, scaled)  # p [BM, BK]  # fmt: skip
    if scaled:
        p *= v_scale[None, :]
    return p.to(tl.float16), alpha, total, top


@triton.jit
def _load_pairs(ptr, slot, ok, kv_head, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of pages as 16-bit numbers `[BK, BLOCK / 2]`, zero where not `ok`."""
    pairs = ptr.to(tl.pointer_type(tl.int16))
    return tile.load_keys(pairs, slot, ok, kv_head, K, WIDTH // 2, BLOCK // 2, True)


@triton.jit
def attend_pairs(
    even, odd, total, top,  # [BM, BLOCK_V / 2] twice, [BM], [BM]
    q_even, q_odd, q_factor, q_rope,  # [BM, BLOCK_D / 2] twice, [BM], [BM, BLOCK_R]
    keys: tile.Keys, queries: tile.Queries, pages: tile.Pages, factors: tile.Factors,
    sizes: tile.Sizes, form: tile.Format, scoring: tile.Scoring, PAIRS: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys, as `attend_tile`, with the sums of even and of odd channels apart, `[BM, BLOCK_V / 2]` each. `PAIRS`: of `PAIRS_OF`.

    Sums and denominators are `2**RAISED` times as large."""
    slot, ok, head = keys.slot, keys.ok, pages.head
    fast: tl.constexpr = form.FAST_BYTES
    k_pair = _load_pairs(pages.k, slot, ok, head, form.K, sizes.D, sizes.BLOCK_D)  # [BK, BLOCK_D / 2]
    v_pair = k_pair  # latent pages are both keys and values
    if not form.LATENT:
        v_pair = _load_pairs(pages.v, slot, ok, head, form.K, sizes.V, sizes.BLOCK_V)  # [BK, BLOCK_V / 2]
    # q k^T of even and of odd channels.
    if PAIRS == INT8:
        # The sum of products with the excess is the same for every key.
        rest = tl.sum(q_even.to(tl.float32), axis=1) + tl.sum(q_odd.to(tl.float32), axis=1)  # [BM]
        k_even, k_odd = integers(tl.trans(k_pair), False, fast)  # [BLOCK_D / 2, BK] each
        qk = tl.zeros([sizes.BM, sizes.BK], tl.float32) - (rest * BIASED)[:, None]  # [BM, BK]
    else:
        k_even, k_odd = floats(tl.trans(k_pair), PAIRS, fast)  # [BLOCK_D / 2, BK] each
        qk = tl.zeros([sizes.BM, sizes.BK], tl.float32)  # [BM, BK]
    if form.V_SCALES == tile.TOKEN:
        k_scale = tile.load_scales(pages.k_scale, slot, ok, head, form.K, True)  # [BK]
        v_scale = k_scale  # [BK]
        if not form.LATENT:
            v_scale = tile.load_scales(pages.v_scale, slot, ok, head, form.K, True)  # [BK]
        factor = k_scale[None, :]  # [1, BK]
    else:
        v_scale = 0.0
        factor = (q_factor * factors.k)[:, None]  # [BM, 1]
    if form.LATENT:
        # Sums of their own, since a warp has few of so many channels, and each product waits for the last one into the same sums. Of a plain
        # sum of both, the compiler would make one sum again.
        qk = tl.fma(tl.dot(q_odd, k_odd), factor, tl.dot(q_even, k_even, qk) * factor)  # [BM, BK]
    else:
        qk = tl.dot(q_odd, k_odd, tl.dot(q_even, k_even, qk)) * factor  # [BM, BK]
    if form.V_SCALES == tile.TOKEN:
        qk *= q_factor[:, None]
    # Rotary channels: a product of its own, as their scales differ from those of the latents.
    if sizes.R > 0:
        rope = tile.load_keys(pages.rope, slot, ok, head, form.K, sizes.R, sizes.BLOCK_R, True)
        rope = tile.widened(rope, q_rope, fast)  # [BK, BLOCK_R]
        more = tl.dot(q_rope, tl.trans(rope))  # [BM, BK]
        if form.R_SCALES == tile.TOKEN:
            more *= tile.load_scales(pages.rope_scale, slot, ok, head, form.K, True)[None, :]
        qk += more * factors.rope
    # p [BM, BK], alpha [BM]
    p, alpha, total, top = half_weights(qk, total, top, v_scale, keys, queries, scoring, form.V_SCALES)
    # acc += p v, of even and of odd channels.
    if PAIRS == INT8:
        v_even, v_odd = integers(v_pair, True, fast)  # [BK, BLOCK_V / 2] each
    else:
        v_even, v_odd = floats(v_pair, PAIRS, fast)  # [BK, BLOCK_V / 2] each
    even = tl.dot(p, v_even, even * alpha[:, None])  # [BM, BLOCK_V / 2]
    odd = tl.dot(p, v_odd, odd * alpha[:, None])  # [BM, BLOCK_V / 2]
    return even, odd, total, top
