"""The kernel that makes floats of quantised weights, where many rows are multiplied by them: at the speed of a copy."""
# pyright: reportAssignmentType=false, reportArgumentType=false

import triton
import triton.language as tl

from .codes import block_of, E2M1, factor_of, Form, numbers_in, scale_of, UINT4


@triton.jit
def floats_kernel(
    codes_ptr, scales_ptr, zeros_ptr, factor_ptr, COUNT,  # [E, N, K] or [E, N, K / 2], [E, blocks of N, blocks of K], as scales, [E]
    out_ptr,  # [E, N, K]
    N: tl.constexpr, K: tl.constexpr, ELEMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SCALE: tl.constexpr,
    ZEROS: tl.constexpr, FACTOR: tl.constexpr, UNIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # out = (number(code) - zero) scale factor, of COUNT = E N rows.
    form: tl.constexpr = Form(ELEMENT, ROWS, COLUMNS, SCALE, ZEROS)
    four: tl.constexpr = ELEMENT == UINT4 or ELEMENT == E2M1
    each: tl.constexpr = 8 if four else 4
    units: tl.constexpr = BLOCK_K // UNIT
    across: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    down: tl.constexpr = (N + ROWS - 1) // ROWS if ROWS else 1
    blocks: tl.constexpr = down * ((K + COLUMNS - 1) // COLUMNS if COLUMNS else 1)
    pid = tl.program_id(0)
    start = pid % across * BLOCK_K
    n = pid // across * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    # Rows past the last are read as the last, and not stored.
    row = tl.minimum(n, COUNT - 1)  # [BLOCK_N]
    word = start // each + tl.arange(0, BLOCK_K // each)  # [BLOCK_K / 8 or 4]
    words_ptr = codes_ptr.to(tl.pointer_type(tl.uint32))
    at = words_ptr + row.to(tl.int64)[:, None] * (K // each) + word[None, :]  # [BLOCK_N, BLOCK_K / 8 or 4]
    if K % BLOCK_K == 0:
        words = tl.load(at)
    else:
        words = tl.load(at, mask=(word < K // each)[None, :], other=0)
    nothing = tl.program_id(1).to(tl.uint32)
    w = tl.reshape(numbers_in(words, nothing, ELEMENT), (BLOCK_N, units, UNIT))
    e = row // N  # [BLOCK_N]
    unit = start + tl.arange(0, units) * UNIT  # [units]
    block = block_of((row % N)[:, None], unit[None, :], K, form) + (e * blocks)[:, None]  # [BLOCK_N, units]
    there = (unit < K)[None, :]
    if ZEROS:
        w -= (tl.load(zeros_ptr + block, mask=there, other=8).to(tl.float32) - 8.0)[:, :, None]
    scale = scale_of(tl.load(scales_ptr + block, mask=there, other=0), SCALE) * factor_of(ELEMENT)
    if FACTOR:
        scale *= tl.load(factor_ptr + e).to(tl.float32, bitcast=True)[:, None]
    w = tl.reshape(w * scale[:, :, None], (BLOCK_N, BLOCK_K))
    k = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    to = out_ptr + n.to(tl.int64)[:, None] * K + k[None, :]  # [BLOCK_N, BLOCK_K]
    tl.store(to, w.to(out_ptr.dtype.element_ty), mask=(n < COUNT)[:, None] & (k < K)[None, :])
