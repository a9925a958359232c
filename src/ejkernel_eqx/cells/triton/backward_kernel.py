"""The backward pass over time, from the last step to the first. A step adds to the gradient of the state what the gates of the next token
contribute, and from it computes the gradients of its own gates. Rows and columns are distributed as in the forward pass."""
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from .step import Cell, gradients
from .tile import gates_of, marks_of, rows_of, within


# fmt: off
@triton.jit
def _product(gradients_ptr, weight_ptr, token, inside, n,
             H: tl.constexpr, GATES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
             PRECISION: tl.constexpr):
    """The gradients of the products of these tokens times the columns `n` of the weight, `[BM, BN]`."""
    # Over the gradients of all gates, a block of them at a time.
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # [BM, BN]
    for first in range(0, GATES * H, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)  # [BK]
        at = token[:, None] * (GATES * H) + k[None, :]  # [BM, BK]
        d = tl.load(gradients_ptr + at, mask=within(inside, k, GATES * H), other=0.0)  # [BM, BK]
        w = tl.load(weight_ptr + k[:, None] * H + n[None, :], mask=within(k < GATES * H, n, H), other=0.0)  # [BK, BN]
        total = tl.dot(d, w, total, input_precision=PRECISION)
    return total


@triton.jit
def store_gate(gradients_ptr, gradient, real, token, n, mask, part: tl.constexpr, H: tl.constexpr, GATES: tl.constexpr, MARKS: tl.constexpr):
    """Stores the gradient of a gate, which is zero at padding."""
    if MARKS:
        gradient = tl.where(real[:, None], gradient, 0.0)
    at = token[:, None] * (GATES * H) + (part * H + n)[None, :]  # [BM, BN]
    tl.store(gradients_ptr + at, gradient.to(gradients_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_gates(dproduct_ptr, dx_ptr, gradients, real, token, n, mask, CELL: tl.constexpr, H: tl.constexpr, GATES: tl.constexpr, MARKS: tl.constexpr):
    """Stores the gradients of the gates' products, and of a GRU those of its inputs, which differ in n."""
    for part in tl.static_range(GATES):  # pyright: ignore[reportGeneralTypeIssues]
        store_gate(dproduct_ptr, gradients[part], real, token, n, mask, part, H, GATES, MARKS)
    if CELL == "gru":
        store_gate(dx_ptr, gradients[0], real, token, n, mask, 0, H, GATES, MARKS)
        store_gate(dx_ptr, gradients[1], real, token, n, mask, 1, H, GATES, MARKS)
        store_gate(dx_ptr, gradients[3], real, token, n, mask, 2, H, GATES, MARKS)


@triton.jit
def cell_before(cells_ptr, initial_ptr, along, at, t, fresh, mask, H: tl.constexpr, INITIAL: tl.constexpr):
    """The cell state of an LSTM before a token: that of the token before, the initial one, or zero."""
    earlier = mask & ((t > 0) & (fresh == 0))[:, None]  # [BM, BN]
    before = tl.load(cells_ptr + along - H, mask=earlier, other=0.0).to(tl.float32)  # [BM, BN]
    if INITIAL:
        first = mask & ((t == 0) & (fresh == 0))[:, None]  # [BM, BN]
        before += tl.load(initial_ptr + at, mask=first, other=0.0)
    return before


@triton.jit
def step_of(step_ptr, longest):
    """The first step of a launch for one step, and the one after it: counted back from the last token of the longest of all rows, which may not
    be among those of the program, whose longest row is `longest`."""
    start = tl.load(step_ptr + 1) + longest - tl.load(step_ptr)
    return tl.maximum(start, 0), tl.minimum(start + 1, longest + 1)


@triton.jit
def backward_kernel(
    gates_ptr, cells_ptr, states_ptr, initial_ptr, weight_ptr, dout_ptr,  # [tokens, PARTS H], [tokens, H], [tokens, H], [R, H], [G, H], [tokens, H]
    bounds_ptr, marks_ptr, step_ptr, R,  # [R, 2]: first token and length, [tokens], [1]
    dhidden_before_ptr, dcell_before_ptr, dproduct_before_ptr, dx_before_ptr,  # what the outputs start with
    dhidden_ptr, dcell_ptr,  # [R, H] in float32: the gradients of the final states, then of the initial ones
    dproduct_ptr, dx_ptr,  # [tokens, G]; for a GRU those of x differ from those of the products in n
    H: tl.constexpr, CELL: tl.constexpr, GATES: tl.constexpr, ACTIVATION: tl.constexpr, GATE: tl.constexpr, INITIAL: tl.constexpr,
    PARTS: tl.constexpr, MARKS: tl.constexpr, PER_STEP: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    kind: tl.constexpr = Cell(CELL, ACTIVATION, GATE, FAST, EXACT)
    columns: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    row, begin, length, mine = rows_of(bounds_ptr, R, columns if PER_STEP else 1, BLOCK_M)  # pyright: ignore[reportGeneralTypeIssues]
    # Steps are counted back from the last one; the one before the first token completes the gradient of the initial state.
    longest = tl.max(length, 0)
    start, end = 0, longest + 1
    first_tile, end_tile = 0, columns
    if PER_STEP:
        start, end = step_of(step_ptr, longest)
        first_tile, end_tile = mine, mine + 1
    for back in range(start, end):
        t = longest - 1 - back
        inside, follows = (t >= 0) & (t < length), t + 1 < length  # [BM]
        token = begin + t  # [BM]
        fresh, real = marks_of(marks_ptr, token, inside, MARKS)
        starts, _ = marks_of(marks_ptr, token + 1, follows, MARKS)
        for tile in range(first_tile, end_tile):
            n = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BN]
            mask, alive = within(inside, n, H), within((t < length) & (length > 0), n, H)  # [BM, BN]
            at, along = row[:, None] * H + n[None, :], token[:, None] * H + n[None, :]  # [BM, BN]
            # Loaded before the product, which hides the time that this takes.
            dh = tl.load(dhidden_ptr + at, mask=alive, other=0.0)  # [BM, BN]
            dout = tl.load(dout_ptr + along, mask=mask, other=0.0)  # [BM, BN]
            parts = gates_of(gates_ptr, token, n, mask, H, PARTS)  # tiles [BM, BN]
            if CELL == "lstm":
                dc = tl.load(dcell_ptr + at, mask=alive, other=0.0)  # [BM, BN]
                cell = tl.load(cells_ptr + along, mask=mask, other=0.0)  # [BM, BN]
                before = cell_before(cells_ptr, initial_ptr, along, at, t, fresh, mask, H, INITIAL)  # [BM, BN]
            if CELL == "gru":
                before = tl.load(states_ptr + along, mask=mask, other=0.0).to(tl.float32)  # [BM, BN]
            dh += _product(dproduct_ptr, weight_ptr, token + 1, follows, n, H, GATES, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
            if MARKS:  # the state before a token that starts is not read
                dh = tl.where(starts[:, None], 0.0, dh)
                if CELL == "lstm":
                    dc = tl.where(starts[:, None], 0.0, dc)
            dh += dout.to(tl.float32)  # the gradient of the state after the token
            if CELL != "lstm":
                dc, cell = dh, dout  # not read
            if CELL == "rnn":
                before = dh  # not read
            dgates, passing, dc_before = gradients(parts, cell, before, dh, dc, kind)
            store_gates(dproduct_ptr, dx_ptr, dgates, real, token, n, mask, CELL, H, GATES, MARKS)
            if CELL == "lstm":
                tl.store(dcell_ptr + at, tl.where(real[:, None], dc_before, dc), mask=alive)
            # Without a real token there (padding, or before the first), all of the gradient passes.
            tl.store(dhidden_ptr + at, tl.where(real[:, None], passing, dh), mask=alive)
        # All tiles of the next step read what all threads have written.
        tl.debug_barrier()
