"""The forward pass over time with the weight on the chip; `persistent.py` says how its programs work together. States of a tile stay in registers;
the hidden state in the dtype of products, read by all programs of the same rows, alternates between two buffers."""
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from .persistent import arrive, of_gates, product, resident, wait_for
from .step import advance, Cell
from .tile import gates_of, marks_of, rows_of, within


# fmt: off
@triton.jit
def persistent_forward_kernel(
    x_ptr, weight_ptr, bias_ptr, bounds_ptr, marks_ptr, step_ptr, R,  # [tokens, G], [G, H], [H], [R, 2]: first token and length, [tokens], [1]
    hidden_before_ptr, cell_before_ptr, operand_before_ptr, arrived_before_ptr, out_before_ptr, cells_before_ptr,  # what the outputs start with
    hidden_ptr, cell_ptr, operand_ptr, arrived_ptr,  # [R, H] and [R, H] in float32, [2, R, H] in the dtype of x, [tiles of rows, 32]
    out_ptr, cells_ptr,  # [tokens, H]
    H: tl.constexpr, CELL: tl.constexpr, GATES: tl.constexpr, ACTIVATION: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    MARKS: tl.constexpr, SAVE: tl.constexpr, GRID_BARRIER: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, AHEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    kind: tl.constexpr = Cell(CELL, ACTIVATION, GATE, FAST, EXACT)
    columns: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    parts: tl.constexpr = 1 if GATES == 1 else 4  # pyright: ignore[reportAssignmentType]
    row, begin, length, tile = rows_of(bounds_ptr, R, columns, BLOCK_M)  # pyright: ignore[reportGeneralTypeIssues]
    arrived_ptr += tl.program_id(0) // columns * 32
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BN]
    part, within_part = tl.arange(0, parts * BLOCK_N) // BLOCK_N, tile * BLOCK_N + tl.arange(0, parts * BLOCK_N) % BLOCK_N
    blocks = resident(weight_ptr, part * H + within_part, (part < GATES) & (within_part < H), 0, H, BLOCK_K, 1)
    start, end = 0, tl.max(length, 0)
    if not GRID_BARRIER:
        start = tl.load(step_ptr)
        end = tl.minimum(end, start + 1)
    at = row[:, None] * H + n[None, :]  # [BM, BN]
    exists = within(row < R, n, H)  # [BM, BN]
    hidden = tl.load(hidden_ptr + at, mask=exists, other=0.0)  # [BM, BN]
    cell = hidden
    if CELL == "lstm":
        cell = tl.load(cell_ptr + at, mask=exists, other=0.0)  # [BM, BN]
    # Without pipelining, which would load states before they are written.
    for t in tl.range(start, end, num_stages=1):
        inside = t < length  # [BM]
        token = begin + t  # [BM]
        starts, real = marks_of(marks_ptr, token, inside, MARKS)
        mask = within(inside, n, H)  # [BM, BN]
        along = token[:, None] * H + n[None, :]  # [BM, BN]
        # Loaded before the wait, which hides the time that this takes.
        xs = gates_of(x_ptr, token, n, mask, H, GATES)  # tiles [BM, BN]
        even = (t % 2).to(tl.int64) * R
        if GRID_BARRIER:
            wait_for(arrived_ptr, (t - start) * columns)
        # A token that starts has a state of zeros.
        source_ptr, read = operand_ptr + even * H, inside & (starts == 0)  # [BM]
        total = product(source_ptr, row * H, read, blocks, 0, H, BLOCK_M, parts * BLOCK_N, BLOCK_K, 1, PRECISION, AHEAD)
        us = of_gates(total, GATES, BLOCK_M, BLOCK_N)
        before, before_cell = hidden, cell
        if MARKS:
            before, before_cell = tl.where(starts[:, None], 0.0, hidden), tl.where(starts[:, None], 0.0, cell)
        new, new_cell = advance(xs, us, bias_ptr, n, before, before_cell, H, BIAS, kind)
        hidden = tl.where(real[:, None], new, hidden)
        if CELL == "lstm":
            cell = tl.where(real[:, None], new_cell, cell)
        narrow = hidden.to(out_ptr.dtype.element_ty)
        tl.store(operand_ptr + (R - even) * H + at, narrow, mask=mask)
        if GRID_BARRIER:
            arrive(arrived_ptr)
        tl.store(out_ptr + along, narrow, mask=mask)
        if CELL == "lstm" and SAVE:
            tl.store(cells_ptr + along, cell.to(cells_ptr.dtype.element_ty), mask=mask)
    tl.store(hidden_ptr + at, hidden, mask=exists)
    if CELL == "lstm":
        tl.store(cell_ptr + at, cell, mask=exists)
