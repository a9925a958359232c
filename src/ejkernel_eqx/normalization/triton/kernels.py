"""The Triton kernels of the gated RMS norm: rows `[BM, BF]` of one group's features, whole, in registers."""

import triton
import triton.language as tl

from ...launch.activations import sigmoid


@triton.jit
def _gate(z, GATE: tl.constexpr, FAST: tl.constexpr):
    """The gate and its derivative."""
    s = sigmoid(z, FAST)
    if GATE == 1:
        return z * s, s * (1.0 + z * (1.0 - s))
    return s, s * (1.0 - s)


@triton.jit
def _weight(weight_ptr, row, f, M, G: tl.constexpr, F: tl.constexpr, MAPPED: tl.constexpr):
    """The weights of these rows, `[1, BF]` where all have the same."""
    if MAPPED:
        at = (row // (M * G) * G + row % G)[:, None] * F + f[None, :]
    elif G > 1:
        at = (row % G)[:, None] * F + f[None, :]
    else:
        at = f[None, :]
    return tl.load(weight_ptr + at, mask=(f < F)[None, :], other=0.0).to(tl.float32)


@triton.jit
def forward_kernel(
    x_ptr,
    z_ptr,
    weight_ptr,
    rows,
    M,
    out_ptr,
    G: tl.constexpr,
    F: tl.constexpr,
    EPS: tl.constexpr,
    GATE: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    WEIGHT: tl.constexpr,
    MAPPED: tl.constexpr,
    FAST: tl.constexpr,
    BM: tl.constexpr,
    BF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    f = tl.arange(0, BF)
    at = row[:, None] * F + f[None, :]
    inside = (row < rows)[:, None] & (f < F)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if GATE:
        gate, _ = _gate(tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32), GATE, FAST)
        if not NORM_FIRST:
            x *= gate
    out = x * tl.rsqrt(tl.sum(x * x, 1) / F + EPS)[:, None]
    if WEIGHT:
        # A row behind the end reads the weights of one that is there.
        out *= _weight(weight_ptr, tl.minimum(row, rows - 1), f, M, G, F, MAPPED)
    if GATE and NORM_FIRST:
        out *= gate
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    x_ptr,
    z_ptr,
    weight_ptr,
    dout_ptr,
    M,
    dx_ptr,
    dz_ptr,
    partial_ptr,
    G: tl.constexpr,
    F: tl.constexpr,
    EPS: tl.constexpr,
    GATE: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    WEIGHT: tl.constexpr,
    MAPPED: tl.constexpr,
    FAST: tl.constexpr,
    BM: tl.constexpr,
    BF: tl.constexpr,
    TURNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`dx`, `dz`, and these rows' share of the gradient of the weight, `partial [B, chunks, G, F]`. A program has one group of `BM`
    rows, `TURNS` times."""
    pid = tl.program_id(0)
    chunks = tl.cdiv(M, BM * TURNS)
    g = pid % G
    chunk = pid // G % chunks
    b = (pid // (G * chunks)).to(tl.int64)
    f = tl.arange(0, BF)
    weight = tl.full([1, BF], 1.0, tl.float32)
    if WEIGHT:
        base = tl.where(MAPPED, b * G, 0) + g
        weight = tl.load(weight_ptr + base * F + f, mask=f < F, other=0.0).to(tl.float32)[None, :]
    share = tl.zeros([BM, BF], tl.float32)
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        m = (chunk * TURNS + turn) * BM + tl.arange(0, BM)
        at = ((b * M + m) * G + g)[:, None] * F + f[None, :]
        inside = (m < M)[:, None] & (f < F)[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if GATE:
            gate, slope = _gate(tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32), GATE, FAST)
        h = x
        dn = dout * weight
        if GATE:
            if NORM_FIRST:
                dn *= gate
            else:
                h = x * gate
        # Both sums at once, that of `dn` and the norm without its scale.
        scale = tl.rsqrt(tl.sum(h * h, 1) / F + EPS)
        common = scale * scale * (tl.sum(dn * h, 1) / F)
        dx = scale[:, None] * (dn - h * common[:, None])
        normed = h * scale[:, None]
        if WEIGHT:
            if GATE and NORM_FIRST:
                share += dout * gate * normed
            else:
                share += dout * normed
        if GATE:
            if NORM_FIRST:
                dz = dout * weight * normed * slope
            else:
                dz = dx * x * slope
                dx *= gate
            tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=inside)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if WEIGHT:
        tl.store(partial_ptr + ((b * chunks + chunk) * G + g) * F + f, tl.sum(share, 0), mask=f < F)
