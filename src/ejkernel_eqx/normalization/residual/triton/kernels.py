"""The Triton kernels of the norm of a sum: rows `[BM, BF]` hold all features in registers."""

import triton
import triton.language as tl

from ...triton.kernels import weight_of


@triton.jit
def forward_kernel(
    x_ptr, branch_ptr, weight_ptr, rows, M,  # [B, M, F] twice, [F] or, mapped, [B, F]
    out_ptr, sum_ptr,  # [B, M, F] twice; no sum without a branch
    F: tl.constexpr, EPS: tl.constexpr, BRANCH: tl.constexpr, WEIGHT: tl.constexpr, MAPPED: tl.constexpr, BM: tl.constexpr,
    BF: tl.constexpr,
):  # fmt: skip
    # sum = x + branch; out = sum weight / sqrt(mean(sum^2) + EPS).
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)  # [BM]
    f = tl.arange(0, BF)  # [BF]
    at = row[:, None] * F + f[None, :]  # [BM, BF]
    inside = (row < rows)[:, None] & (f < F)[None, :]  # [BM, BF]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BM, BF]
    if BRANCH:
        total = x + tl.load(branch_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BM, BF]
        # The backward sees the rounded sum, and so does the norm.
        stored = total.to(sum_ptr.dtype.element_ty)  # [BM, BF]
        tl.store(sum_ptr + at, stored, mask=inside)
        x = stored.to(tl.float32)  # [BM, BF]
    out = x * tl.rsqrt(tl.sum(x * x, 1) / F + EPS)[:, None]  # [BM, BF]
    if WEIGHT:
        # A row past the end reads the weights of an existing one.
        out *= weight_of(weight_ptr, tl.minimum(row, rows - 1), f, M, 1, F, MAPPED)  # [BM, BF]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    sum_ptr, weight_ptr, dout_ptr, dout_2_ptr, dout_3_ptr, dsum_ptr, M,  # dout (of each reader) and dsum as sum; else as in the forward kernel
    dx_ptr, partial_ptr,  # as sum
    F: tl.constexpr, EPS: tl.constexpr, WEIGHT: tl.constexpr, MAPPED: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr,
    TURNS: tl.constexpr, STAGES: tl.constexpr, READERS: tl.constexpr,
):  # fmt: skip
    """`dx`, also the gradient of the branch, and these rows' share of the gradient of the weight, `partial [B, chunks, F]`. A program processes
    `BM` rows, `TURNS` times."""
    pid = tl.program_id(0)
    chunks = tl.cdiv(M, BM * TURNS)
    chunk = pid % chunks
    b = (pid // chunks).to(tl.int64)
    f = tl.arange(0, BF)  # [BF]
    weight = tl.full([1, BF], 1.0, tl.float32)  # [1, BF]
    if WEIGHT:
        base = tl.where(MAPPED, b, 0)
        weight = tl.load(weight_ptr + base * F + f, mask=f < F, other=0.0).to(tl.float32)[None, :]  # [1, BF]
    share = tl.zeros([BM, BF], tl.float32)  # [BM, BF]
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        m = (chunk * TURNS + turn) * BM + tl.arange(0, BM)  # [BM]
        at = (b * M + m)[:, None] * F + f[None, :]  # [BM, BF]
        inside = (m < M)[:, None] & (f < F)[None, :]  # [BM, BF]
        x = tl.load(sum_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BM, BF]
        dout = tl.load(dout_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BM, BF]
        if READERS > 1:
            dout += tl.load(dout_2_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BM, BF]
        if READERS > 2:
            dout += tl.load(dout_3_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BM, BF]
        dsum = tl.load(dsum_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BM, BF]
        # With n = scale x and dn = dout weight: dx = dsum + scale (dn - n mean(dn n)).
        dn = dout * weight  # [BM, BF]
        scale = tl.rsqrt(tl.sum(x * x, 1) / F + EPS)  # [BM]
        common = scale * scale * (tl.sum(dn * x, 1) / F)  # [BM]
        dx = dsum + scale[:, None] * (dn - x * common[:, None])  # [BM, BF]
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if WEIGHT:
            share += dout * x * scale[:, None]  # [BM, BF]
    if WEIGHT:
        tl.store(partial_ptr + (b * chunks + chunk) * F + f, tl.sum(share, 0), mask=f < F)  # [BF]
