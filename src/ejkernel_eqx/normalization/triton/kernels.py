"""The Triton kernels of both norms: rows `[BM, BF]` hold all features of one group in registers. In the norm
of a sum, `G` is 1."""

import triton
import triton.language as tl

from ...launch.activations import sigmoid

SILU = tl.constexpr(1)  # GATE: silu(z); 2: sigmoid(z); 0: none


@triton.jit
def _gate(z, GATE: tl.constexpr, FAST: tl.constexpr):
    """The gate and its derivative."""
    s = sigmoid(z, FAST)  # [BM, BF], as both results
    # silu(z) = z s or sigmoid(z) = s, with s = sigmoid(z).
    if GATE == SILU:
        return z * s, s * (1.0 + z * (1.0 - s))
    return s, s * (1.0 - s)


@triton.jit
def weight_of(weight_ptr, row, f, M, G: tl.constexpr, F: tl.constexpr, MAPPED: tl.constexpr):
    """The weights of these rows, `[1, BF]` if all rows share them."""
    if MAPPED:
        at = (row // (M * G) * G + row % G)[:, None] * F + f[None, :]  # [BM, BF]
    elif G > 1:
        at = (row % G)[:, None] * F + f[None, :]  # [BM, BF]
    else:
        at = f[None, :]  # [1, BF]
    return tl.load(weight_ptr + at, mask=(f < F)[None, :], other=0.0).to(tl.float32)  # of the shape of at


@triton.jit
def forward_kernel(
    x_ptr, branch_ptr, z_ptr, weight_ptr, rows, M,  # [B, M, G, F] thrice, [G, F] or, mapped, [B, G, F]
    out_ptr, sum_ptr,  # [B, M, G, F] twice; no sum without a branch
    G: tl.constexpr, F: tl.constexpr, EPS: tl.constexpr, BRANCH: tl.constexpr, GATE: tl.constexpr,
    NORM_FIRST: tl.constexpr, WEIGHT: tl.constexpr, MAPPED: tl.constexpr, FAST: tl.constexpr,
    BM: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    # out = norm(x) weight gate with `NORM_FIRST`, else norm(x gate) weight; norm(h) = h / sqrt(mean(h^2) + EPS).
    # With `BRANCH`, x is the sum.
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
    if GATE:
        gate, _ = _gate(tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32), GATE, FAST)  # [BM, BF]
        if not NORM_FIRST:
            x *= gate  # [BM, BF]
    out = x * tl.rsqrt(tl.sum(x * x, 1) / F + EPS)[:, None]  # [BM, BF]
    if WEIGHT:
        # A row past the end reads the weights of an existing one.
        out *= weight_of(weight_ptr, tl.minimum(row, rows - 1), f, M, G, F, MAPPED)  # [BM, BF]
    if GATE and NORM_FIRST:
        out *= gate  # [BM, BF]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    x_ptr, z_ptr, weight_ptr,  # as in the forward kernel; x may be the sum
    dout_ptr, dout_2_ptr, dout_3_ptr, dsum_ptr, M,  # as x; dout of each reader
    dx_ptr, dz_ptr, partial_ptr,  # as x, as z
    G: tl.constexpr, F: tl.constexpr, EPS: tl.constexpr, READERS: tl.constexpr, GATE: tl.constexpr,
    NORM_FIRST: tl.constexpr, WEIGHT: tl.constexpr, MAPPED: tl.constexpr, FAST: tl.constexpr,
    BM: tl.constexpr, BF: tl.constexpr, TURNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`dx`, also the gradient of a branch, `dz`, and these rows' share of the gradient of the weight,
    `partial [B, chunks, G, F]`. A program processes one group of `BM` rows, `TURNS` times. `READERS`: 0 for a
    gated norm."""
    pid = tl.program_id(0)
    chunks = tl.cdiv(M, BM * TURNS)
    g = pid % G
    chunk = pid // G % chunks
    b = (pid // (G * chunks)).to(tl.int64)
    f = tl.arange(0, BF)  # [BF]
    weight = tl.full([1, BF], 1.0, tl.float32)  # [1, BF]
    if WEIGHT:
        base = tl.where(MAPPED, b * G, 0) + g
        weight = tl.load(weight_ptr + base * F + f, mask=f < F, other=0.0).to(tl.float32)[None, :]  # [1, BF]
    share = tl.zeros([BM, BF], tl.float32)  # [BM, BF]
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        m = (chunk * TURNS + turn) * BM + tl.arange(0, BM)  # [BM]
        at = ((b * M + m) * G + g)[:, None] * F + f[None, :]  # [BM, BF]
        inside = (m < M)[:, None] & (f < F)[None, :]  # [BM, BF]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BM, BF]
        dout = tl.load(dout_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BM, BF]
        if READERS > 1:
            dout += tl.load(dout_2_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BM, BF]
        if READERS > 2:
            dout += tl.load(dout_3_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BM, BF]
        if READERS > 0:
            dsum = tl.load(dsum_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BM, BF]
        if GATE:
            gate, slope = _gate(tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32), GATE, FAST)  # [BM, BF]  # fmt: skip
        # The input of the norm, h, and the gradient of its output, dn.
        h = x
        dn = dout * weight  # [BM, BF]
        if GATE:
            if NORM_FIRST:
                dn *= gate  # [BM, BF]
            else:
                h = x * gate  # [BM, BF]
        # With n = scale h: dh = scale (dn - n mean(dn n)).
        # Both sums at once: that of `dn` and that of the unscaled norm.
        scale = tl.rsqrt(tl.sum(h * h, 1) / F + EPS)  # [BM]
        common = scale * scale * (tl.sum(dn * h, 1) / F)  # [BM]
        dx = scale[:, None] * (dn - h * common[:, None])  # [BM, BF], of h
        if READERS > 0:
            dx = dsum + dx  # [BM, BF]
        normed = h * scale[:, None]  # [BM, BF]
        # dweight = the sum over rows of the products that the weight multiplies.
        if WEIGHT:
            if GATE and NORM_FIRST:
                share += dout * gate * normed  # [BM, BF]
            elif READERS > 0:
                share += dout * h * scale[:, None]  # [BM, BF]
            else:
                share += dout * normed  # [BM, BF]
        # Through the gate, which comes after or before the norm.
        if GATE:
            if NORM_FIRST:
                dz = dout * weight * normed * slope  # [BM, BF]
            else:
                dz = dx * x * slope  # [BM, BF]
                dx *= gate  # [BM, BF]
            tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=inside)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if WEIGHT:
        tl.store(partial_ptr + ((b * chunks + chunk) * G + g) * F + f, tl.sum(share, 0), mask=f < F)  # [BF]
