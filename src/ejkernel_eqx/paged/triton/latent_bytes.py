"""prototype"""

import triton
import triton.language as tl

from .tile import load_keys, load_scales, scores, TOKEN, widened

RAISED = tl.constexpr(15)
_INTS = tl.constexpr("""{
.reg .b32 flipped, low, high, bias;
xor.b32 flipped, $2, 0x80808080;
prmt.b32 low, flipped, 0x64646464, 0x4140;
prmt.b32 high, flipped, 0x64646464, 0x4342;
mov.b32 bias, 0x64806480;
sub.f16x2 $0, low, bias;
sub.f16x2 $1, high, bias;
}""")
_E4M3 = tl.constexpr("""{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")
_E5M2 = tl.constexpr("""{
prmt.b32 $0, $2, 0, 0x1404;
prmt.b32 $1, $2, 0, 0x3424;
}""")


@triton.jit
def halves(x, FAST: tl.constexpr):
    if FAST and x.dtype == tl.int8:
        return tl.inline_asm_elementwise(_INTS, "=&r,=&r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    elif FAST and x.dtype == tl.float8e4nv:
        return tl.inline_asm_elementwise(_E4M3, "=&r,=&r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    elif FAST and x.dtype == tl.float8e5:
        return tl.inline_asm_elementwise(_E5M2, "=&r,=&r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    else:
        return x.to(tl.float16)


@triton.jit
def scaled(q):
    q = q.to(tl.float32)
    exponent = (tl.max(tl.abs(q), axis=1).to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(exponent, 253)
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (q * down[:, None]).to(tl.float16), (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def softmax(qk, more, total, top, peak, k_scale, rope_scale, k_factor, rope_factor, q_factor, i, j, t, ok, slope, chunk, qq_bias_ptr, Q, SCALES: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
            FAST_TANH: tl.constexpr, LEFT: tl.constexpr, ALIBI: tl.constexpr, QQ: tl.constexpr):
    if SCALES == TOKEN:
        qk *= k_scale[None, :]
        more *= rope_scale[None, :]
    qk = (qk * k_factor + more * rope_factor) * q_factor[:, None]
    folded: tl.constexpr = CAP == 0 and not ALIBI and not QQ and SCALE > 0
    multiplier: tl.constexpr = SCALE * 1.4426950408889634 if folded else 1.0
    s = qk
    if not folded:
        s = scores(qk, i, j, t, slope, chunk, qq_bias_ptr, Q, SCALE, CAP, FAST_TANH, ALIBI, QQ)
    seen = ok[None, :] & (j <= i)
    s = tl.where(seen, s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, axis=1) * multiplier)  # [BM]
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # [BM]
    p = tl.exp2(s * multiplier - (shift - RAISED)[:, None])
    alpha = tl.exp2(top - shift)  # [BM]
    total = total * alpha + tl.sum(p, axis=1)
    if SCALES == TOKEN:
        new_peak = tl.maximum(peak, tl.max(tl.abs(k_scale), axis=0))  # []
        part = 1.0 / new_peak  # []
        alpha *= peak * part
        p *= (k_scale * part)[None, :]  # [BM, BK]
        peak = new_peak
    return p.to(tl.float16), alpha, total, new_top, peak


@triton.jit
def attend_bytes(
    acc, total, top, peak, q, q_factor, q_rope, j, slot, ok, i, t, slope, chunk, kv_head, k_factor, rope_factor, qq_bias_ptr, Q,
    k_ptr, rope_ptr, k_scale_ptr, rope_scale_ptr, some,
    K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    SCALES: tl.constexpr, R_SCALES: tl.constexpr, SCALE: tl.constexpr,
    CAP: tl.constexpr, FAST_TANH: tl.constexpr, LEFT: tl.constexpr, ALIBI: tl.constexpr, QQ: tl.constexpr,
    FAST: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    k = halves(load_keys(k_ptr, slot, ok, kv_head, K, D, BLOCK_D, True), FAST)  # [BK, BLOCK_D]
    rope = halves(load_keys(rope_ptr, slot, ok, kv_head, K, R, BLOCK_R, True), FAST)
    k_scale = tl.zeros([BK], tl.float32)
    if SCALES == TOKEN:
        k_scale = load_scales(k_scale_ptr, slot, ok, kv_head, K, True)  # [BK]
    rope_scale = tl.zeros([BK], tl.float32)
    if R_SCALES == TOKEN:
        rope_scale = load_scales(rope_scale_ptr, slot, ok, kv_head, K, True)
    more = tl.dot(q_rope, tl.trans(rope))  # [BM, BK]
    qk = tl.dot(q, tl.trans(k))
    p = tl.zeros([BM, BK], tl.float16)
    alpha = tl.full([BM], 1.0, tl.float32)
    if some:
        p, alpha, total, top, peak = softmax(qk, more, total, top, peak, k_scale, rope_scale, k_factor, rope_factor, q_factor, i, j[None, :], t, ok, slope, chunk, qq_bias_ptr, Q, SCALES, SCALE, CAP, FAST_TANH, LEFT, ALIBI, QQ)
    acc = tl.dot(p, k, acc * alpha[:, None])
    return acc, total, top, peak
