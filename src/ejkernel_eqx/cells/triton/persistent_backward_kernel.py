"""The backward pass over time with the weight on the chip; `persistent.py` says how its programs work together. The gradients of a tile's states
stay in registers; those of the gates are read by all programs of the same rows."""

import triton
import triton.language as tl

from .backward_kernel import gates_of, put
from .persistent import arrive, product, resident, wait_for
from .step import gradients
from .tile import marks_of, rows_of, within


# fmt: off
@triton.jit
def persistent_backward_kernel(
    gates_ptr, cells_ptr, states_ptr, initial_ptr, weight_ptr, dout_ptr,  # [tokens, PARTS H], [tokens, H], [tokens, H], [R, H], [H, G], [tokens, H]
    bounds_ptr, marks_ptr, step_ptr, R,  # [R, 2]: first token and length, [tokens], [2]
    dhidden_before_ptr, dcell_before_ptr, arrived_before_ptr, dproduct_before_ptr, dx_before_ptr, operand_before_ptr,  # what the outputs start with
    dhidden_ptr, dcell_ptr, arrived_ptr,  # [R, H] in float32: the gradients of the final states, then of the initial ones; [tiles of rows, 32]
    dproduct_ptr, dx_ptr, operand_ptr,  # [tokens, G]; for a GRU those of x differ from those of the products in n; [2, R, G]
    H: tl.constexpr, CELL: tl.constexpr, GATES: tl.constexpr, ACTIVATION: tl.constexpr, GATE: tl.constexpr, INITIAL: tl.constexpr,
    PARTS: tl.constexpr, MARKS: tl.constexpr, GRID_BARRIER: tl.constexpr, EXCHANGE: tl.constexpr, SPIN: tl.constexpr,
    FAST: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_WARPS: tl.constexpr,
):
    columns: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    # Products without 64 rows of either operand: warps divide the features that these sum over.
    split: tl.constexpr = NUM_WARPS if BLOCK_M < 64 and BLOCK_N < 64 and BLOCK_K >= 16 * NUM_WARPS else 0  # pyright: ignore[reportAssignmentType]
    row, begin, length, tile = rows_of(bounds_ptr, R, columns, BLOCK_M)  # pyright: ignore[reportGeneralTypeIssues]
    arrived_ptr += tl.program_id(0) // columns * 32
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BN]
    blocks = resident(weight_ptr, n, n < H, GATES * H, BLOCK_K, split)
    # Steps are counted back from the last one; the one before the first token completes the gradient of the initial state.
    longest = tl.max(length, 0)
    start, end = 0, longest + 1
    if not GRID_BARRIER:  # counted from the longest of all rows
        start = tl.load(step_ptr + 1) + longest - tl.load(step_ptr)
        end = tl.minimum(start + 1, longest + 1)
        start = tl.maximum(start, 0)
    at = row[:, None] * H + n[None, :]  # [BM, BN]
    exists = within(row < R, n, H)  # [BM, BN]
    dhidden = tl.load(dhidden_ptr + at, mask=exists, other=0.0)  # [BM, BN]
    dcell = dhidden
    if CELL == "lstm":
        dcell = tl.load(dcell_ptr + at, mask=exists, other=0.0)  # [BM, BN]
    # Without pipelining, which would load gradients before they are written.
    for back in tl.range(start, end, num_stages=1):
        t = longest - 1 - back
        inside, follows = (t >= 0) & (t < length), (t + 1 < length)  # [BM]
        token = begin + t  # [BM]
        fresh, real = marks_of(marks_ptr, token, inside, MARKS)
        starts, _ = marks_of(marks_ptr, token + 1, follows, MARKS)
        mask = within(inside, n, H)  # [BM, BN]
        along = token[:, None] * H + n[None, :]  # [BM, BN]
        # Loaded before the wait, which hides the time that this takes.
        dout = tl.load(dout_ptr + along, mask=mask, other=0.0)  # [BM, BN]
        parts = gates_of(gates_ptr, token, n, mask, H, PARTS)  # tiles [BM, BN]
        cell, before = dout, dhidden
        if CELL == "lstm":
            cell = tl.load(cells_ptr + along, mask=mask, other=0.0)  # [BM, BN]
            earlier = mask & ((t > 0) & (fresh == 0))[:, None]  # [BM, BN]
            before = tl.load(cells_ptr + along - H, mask=earlier, other=0.0).to(tl.float32)  # [BM, BN]
            if INITIAL:
                first = mask & ((t == 0) & (fresh == 0))[:, None]  # [BM, BN]
                before += tl.load(initial_ptr + at, mask=first, other=0.0)
        if CELL == "gru":
            before = tl.load(states_ptr + along, mask=mask, other=0.0).to(tl.float32)  # [BM, BN]
        if GRID_BARRIER:
            wait_for(arrived_ptr, (back - start) * columns, SPIN)
        even = (t & 1).to(tl.int64) * R
        source_ptr, source = dproduct_ptr, token + 1
        if EXCHANGE:
            source_ptr, source = operand_ptr + (R - even) * (GATES * H), row
        # The state before a token that starts is not read.
        read = follows & (starts == 0)  # [BM]
        dhidden += product(source_ptr, source * (GATES * H), read, blocks, GATES * H, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, AHEAD, split)
        if MARKS:
            dhidden = tl.where(starts[:, None], 0.0, dhidden)
            dcell = tl.where(starts[:, None], 0.0, dcell)
        dhidden += dout.to(tl.float32)  # the gradient of the state after the token
        found, passing, dcell_before = gradients(parts, cell, before, dhidden, dcell, CELL, ACTIVATION, GATE, FAST, EXACT)
        for g in tl.static_range(GATES):  # pyright: ignore[reportGeneralTypeIssues]
            if EXCHANGE:
                put(operand_ptr + even * (GATES * H), found[g], real, row, n, mask, g, H, GATES, MARKS)
            else:
                put(dproduct_ptr, found[g], real, token, n, mask, g, H, GATES, MARKS)
        if GRID_BARRIER:
            arrive(arrived_ptr)
        if EXCHANGE:
            for g in tl.static_range(GATES):  # pyright: ignore[reportGeneralTypeIssues]
                put(dproduct_ptr, found[g], real, token, n, mask, g, H, GATES, MARKS)
        if CELL == "gru":
            put(dx_ptr, found[0], real, token, n, mask, 0, H, GATES, MARKS)
            put(dx_ptr, found[1], real, token, n, mask, 1, H, GATES, MARKS)
            put(dx_ptr, found[3], real, token, n, mask, 2, H, GATES, MARKS)
        # Without a real token there (padding, or before the first), all of the gradient passes.
        dhidden = tl.where(real[:, None], passing, dhidden)
        if CELL == "lstm":
            dcell = tl.where(real[:, None], dcell_before, dcell)
    tl.store(dhidden_ptr + at, dhidden, mask=exists)
    if CELL == "lstm":
        tl.store(dcell_ptr + at, dcell, mask=exists)
