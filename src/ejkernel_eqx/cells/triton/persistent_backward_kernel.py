"""The backward pass over time with the weight on the chip; `persistent.py` says how its programs work together. The gradients of a tile's states
stay in registers; those of the gates are read by all programs of the same rows, from two buffers in turn. `SHARED` programs have their tiles of
columns together: each multiplies all of them by its part of the features, and adds what they have found for its own tile."""
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from .backward_kernel import cell_before, step_of, store_gate, store_gates
from .persistent import arrive, product, resident, wait_for
from .step import Cell, gradients
from .tile import gates_of, marks_of, rows_of, within


# fmt: off
@triton.jit
def persistent_backward_kernel(
    gates_ptr, cells_ptr, states_ptr, initial_ptr, weight_ptr, dout_ptr,  # [tokens, PARTS H], [tokens, H], [tokens, H], [R, H], [H, G], [tokens, H]
    bounds_ptr, marks_ptr, step_ptr, R,  # [R, 2]: first token and length, [tokens], [3]
    dhidden_before_ptr, dcell_before_ptr, arrived_before_ptr,  # what the outputs start with
    dproduct_before_ptr, dx_before_ptr, operand_before_ptr, partial_before_ptr,
    dhidden_ptr, dcell_ptr, arrived_ptr,  # [R, H] in float32: the gradients of the final states, then of the initial ones; [barriers, 32]
    dproduct_ptr, dx_ptr, operand_ptr,  # [tokens, G]; for a GRU those of x differ from those of the products in n; [2, R, G]
    partial_ptr,  # [programs, BM, W]: their sums
    H: tl.constexpr, CELL: tl.constexpr, GATES: tl.constexpr, ACTIVATION: tl.constexpr, GATE: tl.constexpr, INITIAL: tl.constexpr,
    PARTS: tl.constexpr, MARKS: tl.constexpr, GRID_BARRIER: tl.constexpr, SHARED: tl.constexpr,
    FAST: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    kind: tl.constexpr = Cell(CELL, ACTIVATION, GATE, FAST, EXACT)
    W: tl.constexpr = SHARED * BLOCK_N  # pyright: ignore[reportAssignmentType]
    groups: tl.constexpr = (H + W - 1) // W
    programs: tl.constexpr = groups * SHARED  # of the same rows
    row, begin, length, tile = rows_of(bounds_ptr, R, programs, BLOCK_M)  # pyright: ignore[reportGeneralTypeIssues]
    first_program = tl.program_id(0) - tile % SHARED  # of those that share columns
    arrived_ptr += tl.program_id(0) // programs * (groups + 1) * 32
    shared_ptr = arrived_ptr + (1 + tile // SHARED) * 32
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BN]
    in_tile, wide = tl.arange(0, BLOCK_M), tl.arange(0, W)  # [BM], [W]
    column = tile // SHARED * W + wide  # [W]
    blocks = resident(weight_ptr, column, column < H, tile % SHARED, GATES * H, BLOCK_K, SHARED)
    multiplies, adds = True, True
    # Steps are counted back from the last one; the one before the first token completes the gradient of the initial state.
    longest = tl.max(length, 0)
    start, end = 0, longest + 1
    if not GRID_BARRIER:
        start, end = step_of(step_ptr, longest)
        if SHARED > 1:  # one launch multiplies, the next adds
            multiplies, adds = tl.load(step_ptr + 2) == 0, tl.load(step_ptr + 2) == 1
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
            before = cell_before(cells_ptr, initial_ptr, along, at, t, fresh, mask, H, INITIAL)  # [BM, BN]
        if CELL == "gru":
            before = tl.load(states_ptr + along, mask=mask, other=0.0).to(tl.float32)  # [BM, BN]
        if GRID_BARRIER:
            wait_for(arrived_ptr, (back - start) * programs)
        even = (t & 1).to(tl.int64) * R
        source_ptr = operand_ptr + (R - even) * (GATES * H)
        # The state before a token that starts is not read.
        read = follows & (starts == 0)  # [BM]
        if multiplies:
            total = product(source_ptr, row * (GATES * H), read, blocks, tile % SHARED, GATES * H, BLOCK_M, W, BLOCK_K, SHARED, PRECISION, AHEAD)
            if SHARED == 1:
                dhidden += total
            else:
                mine_ptr = partial_ptr + tl.program_id(0) * (BLOCK_M * W)
                tl.store(mine_ptr + in_tile[:, None] * W + wide[None, :], total)
        if GRID_BARRIER and SHARED > 1:
            arrive(shared_ptr)
            wait_for(shared_ptr, (back - start + 1) * SHARED)
        if adds:
            for other in tl.static_range(SHARED if SHARED > 1 else 0):  # pyright: ignore[reportGeneralTypeIssues]
                other_ptr = partial_ptr + (first_program + other) * (BLOCK_M * W) + tile % SHARED * BLOCK_N
                dhidden += tl.load(other_ptr + in_tile[:, None] * W + tl.arange(0, BLOCK_N)[None, :], cache_modifier=".cg")
            if MARKS:
                dhidden = tl.where(starts[:, None], 0.0, dhidden)
                dcell = tl.where(starts[:, None], 0.0, dcell)
            dhidden += dout.to(tl.float32)  # the gradient of the state after the token
            dgates, passing, dcell_before = gradients(parts, cell, before, dhidden, dcell, kind)
            for g in tl.static_range(GATES):  # pyright: ignore[reportGeneralTypeIssues]
                store_gate(operand_ptr + even * (GATES * H), dgates[g], real, row, n, mask, g, H, GATES, MARKS)
            if GRID_BARRIER:
                arrive(arrived_ptr)
            store_gates(dproduct_ptr, dx_ptr, dgates, real, token, n, mask, CELL, H, GATES, MARKS)
            # Without a real token there (padding, or before the first), all of the gradient passes.
            dhidden = tl.where(real[:, None], passing, dhidden)
            if CELL == "lstm":
                dcell = tl.where(real[:, None], dcell_before, dcell)
    tl.store(dhidden_ptr + at, dhidden, mask=exists)
    if CELL == "lstm":
        tl.store(dcell_ptr + at, dcell, mask=exists)
