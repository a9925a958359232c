"""The forward pass over time. A program has a block of rows and walks along their tokens; or, launched once per step, one tile of columns of
them. States are in memory: the hidden state in the dtype of products, read by every tile of columns, alternates between two buffers."""
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from .step import advance, Cell
from .tile import gates_of, marks_of, rows_of, within


# fmt: off
@triton.jit
def _products(source_ptr, weight_ptr, row, inside, starts, n,
              H: tl.constexpr, GATES: tl.constexpr, MARKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              BLOCK_K: tl.constexpr, PRECISION: tl.constexpr):
    """The products of the hidden states with the columns `n` of every gate: a tuple of tiles `[BM, BN]`."""
    # A sum for every gate, so that a hidden state is loaded once for all.
    sums = ()
    for _ in tl.static_range(GATES):  # pyright: ignore[reportGeneralTypeIssues]
        sums = sums + (tl.zeros([BLOCK_M, BLOCK_N], tl.float32),)  # [BM, BN]
    for first in range(0, H, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)  # [BK]
        h = tl.load(source_ptr + row[:, None] * H + k[None, :], mask=within(inside, k, H), other=0.0)  # [BM, BK]
        if MARKS:
            h = tl.where(starts[:, None], 0.0, h).to(h.dtype)
        added = ()
        for part in tl.static_range(GATES):
            at = k[:, None] * (GATES * H) + (part * H + n)[None, :]  # [BK, BN]
            w = tl.load(weight_ptr + at, mask=within(k < H, n, H), other=0.0)  # [BK, BN]
            added = added + (tl.dot(h, w, sums[part], input_precision=PRECISION),)
        sums = added
    return sums


@triton.jit
def forward_kernel(
    x_ptr, weight_ptr, bias_ptr, bounds_ptr, marks_ptr, step_ptr, R,  # [tokens, G], [H, G], [H], [R, 2]: first token and length, [tokens], [1]
    hidden_before_ptr, cell_before_ptr, operand_before_ptr, out_before_ptr, cells_before_ptr,  # what the outputs start with
    hidden_ptr, cell_ptr, operand_ptr,  # [R, H] and [R, H] in float32, [2, R, H] in the dtype of x
    out_ptr, cells_ptr,  # [tokens, H]
    H: tl.constexpr, CELL: tl.constexpr, GATES: tl.constexpr, ACTIVATION: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    MARKS: tl.constexpr, SAVE: tl.constexpr, PER_STEP: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    kind: tl.constexpr = Cell(CELL, ACTIVATION, GATE, FAST, EXACT)
    columns: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    row, begin, length, mine = rows_of(bounds_ptr, R, columns if PER_STEP else 1, BLOCK_M)  # pyright: ignore[reportGeneralTypeIssues]
    start, end = 0, tl.max(length, 0)
    first_tile, end_tile = 0, columns
    if PER_STEP:
        start = tl.load(step_ptr)
        end = tl.minimum(end, start + 1)
        first_tile, end_tile = mine, mine + 1
    for t in range(start, end):
        inside = t < length  # [BM]
        token = begin + t  # [BM]
        starts, real = marks_of(marks_ptr, token, inside, MARKS)
        # One buffer is read in this step, the other written.
        even = (t % 2).to(tl.int64) * R
        source_ptr, target_ptr = operand_ptr + even * H, operand_ptr + (R - even) * H
        for tile in range(first_tile, end_tile):
            n = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BN]
            mask = within(inside, n, H)  # [BM, BN]
            at, along = row[:, None] * H + n[None, :], token[:, None] * H + n[None, :]  # [BM, BN]
            # Loaded before the products, which hide the time that this takes.
            xs = gates_of(x_ptr, token, n, mask, H, GATES)  # tiles [BM, BN]
            if CELL == "gru" or MARKS:
                old = tl.load(hidden_ptr + at, mask=mask, other=0.0)  # [BM, BN]
            if CELL == "lstm":
                old_cell = tl.load(cell_ptr + at, mask=mask, other=0.0)  # [BM, BN]
            u = _products(source_ptr, weight_ptr, row, inside, starts, n, H, GATES, MARKS, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)

            hidden, cell = u[0], u[0]  # read by no cell that does not load them
            if CELL == "gru":
                hidden = tl.where(starts[:, None], 0.0, old) if MARKS else old  # [BM, BN]
            if CELL == "lstm":
                cell = tl.where(starts[:, None], 0.0, old_cell) if MARKS else old_cell  # [BM, BN]
            h, c = advance(xs, u, bias_ptr, n, hidden, cell, H, BIAS, kind)
            if CELL == "lstm":
                if MARKS:
                    c = tl.where(real[:, None], c, old_cell)
                tl.store(cell_ptr + at, c, mask=mask)
                if SAVE:
                    tl.store(cells_ptr + along, c.to(cells_ptr.dtype.element_ty), mask=mask)
            if MARKS:
                h = tl.where(real[:, None], h, old)
            kept = mask
            if CELL != "gru" and not MARKS:
                kept = within(t == length - 1, n, H)  # only the last is needed
            tl.store(hidden_ptr + at, h, mask=kept)
            narrow = h.to(out_ptr.dtype.element_ty)
            tl.store(target_ptr + at, narrow, mask=mask)
            tl.store(out_ptr + along, narrow, mask=mask)
        # All tiles of the next step read what all threads have written.
        tl.debug_barrier()
