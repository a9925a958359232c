"""The kernel of few rows: a tile of them by some rows of the weights a program. With one tile its time is that of reading the weights, each once."""

import triton
import triton.language as tl

from ...triton.coded import few_times_codes, rows_times_codes
from ...triton.codes import Form
from ...triton.forward_kernel import activated
from ...triton.tile import operand


@triton.jit
def columns_of(pid, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, BLOCK_N: tl.constexpr):
    """The right side of a program, and its tile of it."""
    first: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    second: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    which = 0
    tile = pid
    if N1 > 0:
        if pid >= first:
            which = 1
            tile = pid - first
    if N2 > 0:
        if pid >= first + second:
            which = 2
            tile = pid - first - second
    return which, tile


@triton.jit
def one_of(which, a, b, c, N1: tl.constexpr, N2: tl.constexpr):
    """The pointer of one of three arrays."""
    pointer = a
    if N1 > 0:
        if which == 1:
            pointer = b
    if N2 > 0:
        if which == 2:
            pointer = c
    return pointer


@triton.jit
def times(x, w, acc, FEW: tl.constexpr, PRECISION: tl.constexpr):
    """`acc + x w^T`, of `x [BLOCK_M, BLOCK_K]` and `w [BLOCK_N, BLOCK_K]`."""
    if FEW:
        acc += x[:, None, :].to(tl.float32) * w[None, :, :].to(tl.float32)  # [BLOCK_M, BLOCK_N, BLOCK_K]
    else:
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    return acc


@triton.jit
def times_codes(
    x_ptr, norm_ptr, codes_ptr, scales_ptr, zeros_ptr, row, n, K: tl.constexpr, form: Form, UNIT: tl.constexpr,
    NORM: tl.constexpr, NORM_WEIGHT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Rows times rows `n` of quantised weights `[BLOCK_M, BLOCK_N]`, and of one row the sum of its squares `[BLOCK_M]`."""
    if BLOCK_M < 16:
        acc, total = few_times_codes(  # pyright: ignore[reportGeneralTypeIssues]
            x_ptr, norm_ptr, codes_ptr, scales_ptr, zeros_ptr, row, n, K, form, UNIT, NORM, NORM_WEIGHT, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, FAST
        )  # fmt: skip
    else:
        acc = rows_times_codes(
            x_ptr, codes_ptr, scales_ptr, zeros_ptr, row, n, K, form, UNIT, OPERAND, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT_K, STAGES
        )  # fmt: skip
        total = tl.zeros([BLOCK_M], tl.float32)
    return acc, total


@triton.jit
def rows_kernel(
    x_ptr, right_ptr, right_1_ptr, right_2_ptr,  # [M, K], [N0, K], [N1, K], [N2, K]
    scales_ptr, scales_1_ptr, scales_2_ptr, zeros_ptr, zeros_1_ptr, zeros_2_ptr, factor_ptr, factor_1_ptr, factor_2_ptr,
    bias_ptr, bias_1_ptr, bias_2_ptr, norm_ptr, residual_ptr, M,  # [N0], [N1], [N2], [K], [M, N0]
    out_ptr, out_1_ptr, out_2_ptr,  # [M, N0], [M, N1], [M, N2]
    K: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    BIAS_1: tl.constexpr, BIAS_2: tl.constexpr, NORM: tl.constexpr, NORM_WEIGHT: tl.constexpr, EPS: tl.constexpr,
    RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_SHIFT: tl.constexpr,
    FAST: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    ELEMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SCALE: tl.constexpr, ZEROS: tl.constexpr,
    FACTOR: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # out_i = act(norm(x) right_i^T + bias_i), or one out = act(gate) (up + UP_SHIFT); plus the residual. N1 and N2 are 0 where no program computes
    # another result. With an `ELEMENT` right sides are codes, uint8 `[N0, K]` or `[N0, K / 2]`, with scales, zeros and a factor of the matrix.
    few: tl.constexpr = BLOCK_M < 16
    pid = tl.program_id(0)
    tiles = tl.cdiv(M, BLOCK_M)
    which, tile = columns_of(pid // tiles, N0, N1, N2, BLOCK_N)  # pyright: ignore[reportGeneralTypeIssues]
    N = N0
    if N1 > 0:
        N = tl.where(which == 1, N1, N)
    if N2 > 0:
        N = tl.where(which == 2, N2, N)
    right = one_of(which, right_ptr, right_1_ptr, right_2_ptr, N1, N2)
    m = pid % tiles * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    k = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    # Rows past the last are read as the last, and not stored.
    row = tl.minimum(m, M - 1)  # [BLOCK_M]
    if ELEMENT:
        form: tl.constexpr = Form(ELEMENT, ROWS, COLUMNS, SCALE, ZEROS)
        scales = one_of(which, scales_ptr, scales_1_ptr, scales_2_ptr, N1, N2)
        zeros = one_of(which, zeros_ptr, zeros_1_ptr, zeros_2_ptr, N1, N2)
        mine = tl.minimum(n, N - 1)  # [BLOCK_N]
        acc, total = times_codes(
            x_ptr, norm_ptr, right, scales, zeros, row, mine, K, form, UNIT, NORM, NORM_WEIGHT, OPERAND, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            SPLIT_K, STAGES, FAST,
        )  # fmt: skip
        if FACTOR:
            acc *= tl.load(one_of(which, factor_ptr, factor_1_ptr, factor_2_ptr, N1, N2)).to(
                tl.float32, bitcast=True
            )
        if GATED:
            up, _ = times_codes(
                x_ptr, norm_ptr, right_1_ptr, scales_1_ptr, zeros_1_ptr, row, mine, K, form, UNIT, NORM, NORM_WEIGHT, OPERAND, PRECISION, BLOCK_M,
                BLOCK_N, BLOCK_K, SPLIT_K, STAGES, FAST,
            )  # fmt: skip
            if FACTOR:
                up *= tl.load(factor_1_ptr).to(tl.float32, bitcast=True)
    else:
        x_at = x_ptr + row.to(tl.int64)[:, None] * K + k[None, :]  # [BLOCK_M, BLOCK_K]
        w_at = tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]  # [BLOCK_N, BLOCK_K]
        whole: tl.constexpr = K % BLOCK_K == 0
        if few:
            acc = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], tl.float32)
            squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            squares = tl.zeros([BLOCK_M], tl.float32)
        up = acc
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            if whole:
                w = tl.load(right + w_at + start)  # [BLOCK_N, BLOCK_K]
                if GATED:
                    u = tl.load(right_1_ptr + w_at + start)  # [BLOCK_N, BLOCK_K]
                x = tl.load(x_at + start)  # [BLOCK_M, BLOCK_K]
            else:
                inside = start + k < K  # [BLOCK_K]
                w = tl.load(right + w_at + start, mask=inside[None, :], other=0.0)
                if GATED:
                    u = tl.load(right_1_ptr + w_at + start, mask=inside[None, :], other=0.0)
                x = tl.load(x_at + start, mask=inside[None, :], other=0.0)
            # The norm's factor is one number a row: it scales the sums, after the loop.
            if NORM:
                wide = x.to(tl.float32)  # [BLOCK_M, BLOCK_K]
                if few:
                    squares += wide * wide
                else:
                    squares += tl.sum(wide * wide, 1)
                if NORM_WEIGHT:
                    weight = tl.load(norm_ptr + start + k, mask=start + k < K, other=0.0).to(
                        tl.float32
                    )  # [BLOCK_K]
                    x = wide * weight[None, :]
                    if not few:
                        x = operand(x, OPERAND)  # [BLOCK_M, BLOCK_K]
            acc = times(x, w, acc, few, PRECISION)
            if GATED:
                up = times(x, u, up, few, PRECISION)
        if few:
            acc = tl.sum(acc, 2)  # [BLOCK_M, BLOCK_N]
            if GATED:
                up = tl.sum(up, 2)  # [BLOCK_M, BLOCK_N]
        if NORM:
            if few:
                total = tl.sum(squares, 1)  # [BLOCK_M]
            else:
                total = squares
    if NORM:
        scale = tl.rsqrt(total / K + EPS)[:, None]  # [BLOCK_M, 1]
        acc *= scale
        if GATED:
            up *= scale
    # The epilogue: bias, activation, gate, residual.
    if BIAS or BIAS_1 or BIAS_2:
        if GATED:
            if BIAS:
                acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            if BIAS_1:
                up += tl.load(bias_1_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        else:
            bias = tl.zeros([BLOCK_N], tl.float32)  # [BLOCK_N]
            if BIAS:
                bias += tl.load(bias_ptr + n, mask=(n < N) & (which == 0), other=0.0).to(tl.float32)
            if BIAS_1:
                bias += tl.load(bias_1_ptr + n, mask=(n < N) & (which == 1), other=0.0).to(tl.float32)
            if BIAS_2:
                bias += tl.load(bias_2_ptr + n, mask=(n < N) & (which == 2), other=0.0).to(tl.float32)
            acc += bias[None, :]
    if GATED:
        if LIMIT > 0:
            # Comparisons keep NaN.
            acc = tl.where(acc > LIMIT, LIMIT, acc)
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        result = activated(acc, ACTIVATION, ALPHA, FAST) * (up + UP_SHIFT)  # [BLOCK_M, BLOCK_N]
    else:
        result = activated(acc, ACTIVATION, ALPHA, FAST)
    at = m.to(tl.int64)[:, None] * N + n[None, :]  # [BLOCK_M, BLOCK_N]
    mine = (m < M)[:, None] & (n < N)[None, :]  # [BLOCK_M, BLOCK_N]
    if RESIDUAL:
        result += tl.load(residual_ptr + at, mask=mine, other=0.0).to(tl.float32)
    out = one_of(which, out_ptr, out_1_ptr, out_2_ptr, N1, N2)
    tl.store(out + at, result.to(out_ptr.dtype.element_ty), mask=mine)
