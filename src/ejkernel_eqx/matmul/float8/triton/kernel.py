"""The kernels of the float8 product: rows are quantised, and multiplied by the codes of the weight."""

import triton
import triton.language as tl

from ...triton.tile import place_of, swizzled


@triton.jit
def quantise_kernel(
    x_ptr, x_scale_ptr, M, rounded_ptr, rounded_scales_ptr,  # [M, K], [], [M, K], [groups, M]
    K: tl.constexpr, GROUPED: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    # Codes of rows, with a scale per row and group, or by one that is given.
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    pid = tl.program_id(0)
    group = pid % groups
    m = pid // groups * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    k = group * GROUP + tl.arange(0, GROUP)  # [GROUP]
    at = m.to(tl.int64)[:, None] * K + k[None, :]  # [BLOCK_M, GROUP]
    inside = (m < M)[:, None] & (k < K)[None, :]  # [BLOCK_M, GROUP]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, GROUP]
    if GROUPED:
        top = tl.maximum(tl.max(tl.abs(x), 1), 1.2621774483536189e-29)  # [BLOCK_M], at least 2^-96
        x = x * tl.div_rn(448.0, top)[:, None]
        tl.store(rounded_scales_ptr + group.to(tl.int64) * M + m, tl.div_rn(top, 448.0), mask=m < M)
    else:
        x = x * tl.div_rn(1.0, tl.load(x_scale_ptr))
        # Comparisons keep NaN.
        x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    tl.store(rounded_ptr + at, x.to(rounded_ptr.dtype.element_ty), mask=inside)


@triton.jit
def round_kernel(
    floats_ptr, B, rounded_ptr, rounded_scales_ptr,  # [B, N, K] or [B, K, N]; [B, N, K], [groups, B, N] or [N / R, groups]
    N: tl.constexpr, K: tl.constexpr, R: tl.constexpr, TURNED: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    # Codes of rows that lie either way, by row and group, or by blocks of BLOCK_M rows.
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    tiles: tl.constexpr = (N + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    # Programs that follow one another read memory that lies together.
    if TURNED:
        tile, group = pid % tiles, pid // tiles % groups
    else:
        tile, group = pid // groups % tiles, pid % groups
    b = (pid // (tiles * groups)).to(tl.int64)
    n = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    k = group * GROUP + tl.arange(0, GROUP)  # [GROUP]
    inside = (n < N)[:, None] & (k < K)[None, :]  # [BLOCK_M, GROUP]
    at = b * N * K + n.to(tl.int64)[:, None] * K + k[None, :]  # [BLOCK_M, GROUP]
    lies = b * N * K + k.to(tl.int64)[None, :] * N + n[:, None] if TURNED else at
    x = tl.load(floats_ptr + lies, mask=inside, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(x), 1)  # [BLOCK_M]
    if BLOCKS:
        top = tl.zeros_like(top) + tl.max(top, 0)
    top = tl.maximum(top, 1.2621774483536189e-29)  # at least 2^-96
    tl.store(
        rounded_ptr + at, (x * tl.div_rn(448.0, top)[:, None]).to(rounded_ptr.dtype.element_ty), mask=inside
    )
    scale = tl.div_rn(top, 448.0)  # [BLOCK_M]
    if BLOCKS:
        # Of a block that is not whole, each row has a scale.
        tl.store(rounded_scales_ptr + n // R * groups + group, scale, mask=(n < N) & (n % R == 0))
    else:
        tl.store(rounded_scales_ptr + (group.to(tl.int64) * B + b) * N + n, scale, mask=n < N)


@triton.jit
def scales_at(
    scales_ptr, n, start, R: tl.constexpr, G: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The scales of rows `n [BLOCK_N]` of the weight from a feature on: one number where all share it, else `[1, BLOCK_N]`."""
    column = start // COLUMNS if COLUMNS > 0 else 0
    if R % BLOCK_N == 0:
        scale = tl.load(scales_ptr + tl.min(n, 0) // R * G + column)
    else:
        scale = tl.load(scales_ptr + n // R * G + column)[None, :]  # [1, BLOCK_N]
    return scale


@triton.jit
def scaled_kernel(
    rounded_ptr, rounded_scales_ptr, codes_ptr, scales_ptr, x_scale_ptr, sizes_ptr,  # [M, K], [groups, M], [*, N, K], [*, N / R, G], [], [B, E]
    M, B, E, TILES,
    out_ptr,  # [M, N]
    K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, G: tl.constexpr, COLUMNS: tl.constexpr, GROUPED: tl.constexpr,
    GROUP: tl.constexpr, RAGGED: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SWIZZLE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # out = the sum over groups of scales times (rounded codes^T). Scales that all groups share are multiplied behind the loop.
    pid = tl.program_id(0)
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    w_ptr = codes_ptr.to(tl.pointer_type(tl.float8e4nv))
    b = pid // (TILES * columns)
    tile, column = swizzled(pid % (TILES * columns), TILES, columns, SWIZZLE)  # pyright: ignore[reportGeneralTypeIssues]
    if RAGGED:
        e, first, end = place_of(sizes_ptr, b, tile, M // B, E, BLOCK_M, BLOCK_E)
        if e > E:
            return
        first, end = first + b * (M // B), end + b * (M // B)
        # Rows of no weight take no steps: their sum stays 0.
        steps = tl.where(e < E, groups, 0)
        e = tl.minimum(e, E - 1)
        w_ptr += e.to(tl.int64) * (N * K)
        scales_ptr += e * (N // R * G)
    else:
        first, end = tile * BLOCK_M, M
        steps: tl.constexpr = groups
    m = first + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    k = tl.arange(0, GROUP)  # [GROUP]
    # Rows past the last are read as the last, and not stored.
    row, column = tl.minimum(m, end - 1), tl.minimum(n, N - 1)  # [BLOCK_M], [BLOCK_N]
    x_at = rounded_ptr + row.to(tl.int64)[:, None] * K + k[None, :]  # [BLOCK_M, GROUP]
    w_at = w_ptr + column.to(tl.int64)[None, :] * K + k[:, None]  # [GROUP, BLOCK_N]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in tl.range(0, steps, num_stages=NUM_STAGES):
        start = group * GROUP
        if K % GROUP == 0:
            x = tl.load(x_at + start)  # [BLOCK_M, GROUP]
            w = tl.load(w_at + start)  # [GROUP, BLOCK_N]
        else:
            inside = start + k < K  # [GROUP]
            x = tl.load(x_at + start, mask=inside[None, :], other=0.0)
            w = tl.load(w_at + start, mask=inside[:, None], other=0.0)
        part = tl.dot(x, w)  # [BLOCK_M, BLOCK_N]
        if GROUPED:
            scale = tl.load(rounded_scales_ptr + group.to(tl.int64) * M + row)[:, None]  # [BLOCK_M, 1]
            if COLUMNS > 0:
                scale = scale * scales_at(scales_ptr, column, start, R, G, COLUMNS, BLOCK_N)
            acc += part * scale
        elif COLUMNS > 0:
            acc += part * scales_at(scales_ptr, column, start, R, G, COLUMNS, BLOCK_N)
        else:
            acc += part
    if COLUMNS == 0:
        acc *= scales_at(scales_ptr, column, 0, R, G, 0, BLOCK_N)
    if not GROUPED:
        acc *= tl.load(x_scale_ptr)
    at = m.to(tl.int64)[:, None] * N + n[None, :]  # [BLOCK_M, BLOCK_N]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(m < end)[:, None] & (n < N)[None, :])
