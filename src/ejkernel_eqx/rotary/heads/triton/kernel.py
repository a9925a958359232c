"""The kernel of the rotation of heads: some heads of one token a program, of the queries or of the keys."""

import triton
import triton.language as tl


@triton.jit
def _weight(norm_ptr, features, D: tl.constexpr):
    return tl.load(norm_ptr + features, mask=features < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _heads(
    x_ptr, norm_ptr, out_ptr, cos, sin, token, group, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, WEIGHT: tl.constexpr, EPS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Rotates the heads `group` of a token. `cos`, `sin`: `[BLOCK_R]`."""
    h = group * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    row = (token * H + h)[:, None] * D  # [BLOCK_H, 1]
    r = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    # The places of both features of a pair, and of features that are not rotated.
    first = 2 * r if INTERLEAVED else r  # [BLOCK_R]
    second = first + 1 if INTERLEAVED else first + R
    rest = 2 * R + tl.arange(0, BLOCK_P)  # [BLOCK_P]
    pairs = (h < H)[:, None] & (r < R)[None, :]  # [BLOCK_H, BLOCK_R]
    others = (h < H)[:, None] & (rest < D)[None, :]  # [BLOCK_H, BLOCK_P]
    a = tl.load(x_ptr + row + first[None, :], mask=pairs, other=0.0).to(tl.float32)  # [BLOCK_H, BLOCK_R]
    b = tl.load(x_ptr + row + second[None, :], mask=pairs, other=0.0).to(tl.float32)  # [BLOCK_H, BLOCK_R]
    if 2 * R < D:
        c = tl.load(x_ptr + row + rest[None, :], mask=others, other=0.0).to(tl.float32)  # [BLOCK_H, BLOCK_P]
    if NORM:
        total = tl.sum(a * a + b * b, 1)  # [BLOCK_H]
        if 2 * R < D:
            total += tl.sum(c * c, 1)
        scale = tl.rsqrt(total / D + EPS)[:, None]  # [BLOCK_H, 1]
        a *= scale
        b *= scale
        if WEIGHT:
            a *= _weight(norm_ptr, first, D)
            b *= _weight(norm_ptr, second, D)
        if 2 * R < D:
            c *= scale
            if WEIGHT:
                c *= _weight(norm_ptr, rest, D)
            tl.store(out_ptr + row + rest[None, :], c.to(out_ptr.dtype.element_ty), mask=others)
    elif 2 * R < D:
        tl.store(out_ptr + row + rest[None, :], c.to(out_ptr.dtype.element_ty), mask=others)
    cos, sin = cos[None, :], sin[None, :]  # [1, BLOCK_R]
    tl.store(out_ptr + row + first[None, :], (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=pairs)
    tl.store(out_ptr + row + second[None, :], (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=pairs)


@triton.jit
def heads_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, T,  # [T, HQ, D], [T, HK, D], [T, R] twice, [D] twice
    out_ptr, k_out_ptr,  # as q, as k
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
    Q_WEIGHT: tl.constexpr, K_WEIGHT: tl.constexpr, EPS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """`T` counts tokens of all batch rows."""
    of_q: tl.constexpr = (HQ + BLOCK_H - 1) // BLOCK_H
    groups: tl.constexpr = of_q + (HK + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    token, group = (pid // groups).to(tl.int64), pid % groups
    r = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    cos = tl.load(cos_ptr + token * R + r, mask=r < R, other=0.0).to(tl.float32)  # [BLOCK_R]
    sin = tl.load(sin_ptr + token * R + r, mask=r < R, other=0.0).to(tl.float32)  # [BLOCK_R]
    if group < of_q:
        _heads(q_ptr, q_norm_ptr, out_ptr, cos, sin, token, group, HQ, D, R, INTERLEAVED, NORM, Q_WEIGHT, EPS, BLOCK_H,
               BLOCK_R, BLOCK_P)  # fmt: skip
    else:
        _heads(k_ptr, k_norm_ptr, k_out_ptr, cos, sin, token, group - of_q, HK, D, R, INTERLEAVED, NORM, K_WEIGHT, EPS,
               BLOCK_H, BLOCK_R, BLOCK_P)  # fmt: skip
