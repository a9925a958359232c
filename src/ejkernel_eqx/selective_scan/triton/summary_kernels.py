"""The effect of each split of a sequence on the state that passes through it, or on that state's gradient, and the passage from split to split."""
# pyright: reportOperatorIssue=false, reportAssignmentType=false

import triton
import triton.language as tl

from .forward_kernels import advance, advance_all, load_inputs, load_turn
from .places import channels_of, Grid, place
from .prefetch import keep_touched, touch_projection, touch_rows
from .rows import join_rows, split_rows
from .steps import decays_of, fresh_penalty, sigmoid, time_step
from .tile import load_rates, load_tile, no_states, Sizes, states_at


@triton.jit
def _retreat(g, dt, dy, rate, c, fresh, sizes):
    """The gradient of one state of every channel before a chunk, `[BI]`, from that of the one after it."""
    L: tl.constexpr = 1 << sizes.LEVELS
    # f = e^(dt A) (C dy + f), from the chunk's last token back.
    decay = decays_of(dt, rate, fresh, sizes)  # L rows [BI]
    read = split_rows(dy * c[:, None], sizes.BI, sizes.LEVELS)  # L rows [BI]
    for r in tl.static_range(L):
        g = decay[L - 1 - r] * (read[L - 1 - r] + g)  # [BI]
    return g


@triton.jit
def summary_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, z_ptr, bias_ptr, dout_ptr, starts_ptr, bounds_ptr,  # as in the forward kernel, dout as out
    T, SPLITS, CHUNKS, SEQUENCES, zero,
    local_ptr, total_ptr,  # [sequences, SPLITS, N, I], [sequences, SPLITS, I]
    I: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr,
    BI: tl.constexpr, LEVELS: tl.constexpr, UNROLL: tl.constexpr, STATE_LEVELS: tl.constexpr,
    A_STRIDE: tl.constexpr, BIAS_STRIDE: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, GATE: tl.constexpr,
    SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, PREFETCH: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Computes for every split except the last the state after it given a zero state before it, and the sum of its time steps. With `REVERSE` for
    every split except the first the gradient of the state before it given a zero gradient after it, and the same sum.

    If all states are processed side by side (`UNROLL`), they stay in registers; else they are in `local` between chunks."""
    L: tl.constexpr = 1 << LEVELS
    KEPT: tl.constexpr = 1 << STATE_LEVELS <= UNROLL  # [NS, BI] are all states, NS = 2**STATE_LEVELS
    sizes: tl.constexpr = Sizes(I, N, BI, LEVELS, STATE_LEVELS, EVEN, SEGMENTS)
    grid: tl.constexpr = Grid(BLOCKS, GROUP, GROUP_BLOCKS, BI, L, BIAS_STRIDE, BIAS, TABLE)
    at = place(tl.program_id(0), bounds_ptr, T, SPLITS, SPLITS - 1, L, BLOCKS, TABLE)
    split, first, last = at.split, at.first, at.last
    if REVERSE:  # the split without a program is the first
        split = at.split + 1
        first = split * at.size
        last = tl.minimum(first + at.size, (at.length + L - 1) // L)
    lanes = channels_of(at, bias_ptr, SEQUENCES, grid)
    i, inside = lanes.i, lanes.inside  # [BI], [BI]
    seen = tl.zeros([BI], tl.float32)  # [BI]
    a_ptr += lanes.batch * A_STRIDE
    mine = (at.sequence * SPLITS + split).to(tl.int64)
    local_ptr += mine * (N * I)
    projection = (lanes.group.to(tl.int64) * CHUNKS + at.chunk) * (N * L)
    total = tl.zeros([BI], tl.float32)  # [BI]
    known_states, states = no_states(inside, sizes)  # [NS, BI] each, or their gradients
    if not KEPT:
        for n in range(N):
            tl.store(local_ptr + n * I + i, total, mask=inside)
    for step in range(0 if REVERSE else first, last - first if REVERSE else last):
        j = last - 1 - step if REVERSE else step
        if REVERSE:
            token = j * L
            count = at.length - token
            here = (at.row + token) * I + zero
            raw = load_tile(
                dt_ptr + here, count, lanes, float("-inf"), sizes
            )  # [L, BI]; past the end a time step of 0
            dy = load_tile(dout_ptr + here, count, lanes, 0.0, sizes)  # [L, BI]
            chunk = c_ptr + projection + j.to(tl.int64) * (N * L)
            # The previous chunk is loaded while this one is processed.
            if PREFETCH:
                ahead = tl.where(j > first, L, 0)
                there = here - L * I + lanes.channel
                seen += touch_rows(dt_ptr + there, ahead, lanes, sizes)
                seen += touch_rows(dout_ptr + there, ahead, lanes, sizes)
                if GATE:
                    seen += touch_rows(z_ptr + there, ahead, lanes, sizes)
                if PREFETCH > 1:
                    seen += touch_projection(
                        c_ptr + projection + (j - 1).to(tl.int64) * (N * L), ahead, sizes
                    )
            if GATE:
                z = load_tile(z_ptr + here, count, lanes, 0.0, sizes)  # [L, BI]
                dy *= z * sigmoid(z)  # [L, BI]
        else:
            token, _count, _here, x, raw, ahead, seen = load_inputs(x_ptr, dt_ptr, seen, j, at, lanes, zero, sizes, PREFETCH)  # fmt: skip
            chunk = b_ptr + projection + j.to(tl.int64) * (N * L)
            if PREFETCH > 1:
                seen += touch_projection(b_ptr + projection + (j + 1).to(tl.int64) * (N * L), ahead, sizes)
        dt = time_step(raw, lanes.bias, SOFTPLUS)  # [L, BI]
        # The decay over a split follows from the sum of its time steps.
        total += tl.sum(dt, axis=0)  # [BI]; decays multiply, so their exponents add
        fresh = fresh_penalty(starts_ptr, at, token, lanes.l, SEGMENTS)  # [L]
        if REVERSE and KEPT:
            rates = load_rates(a_ptr + zero, i, known_states, sizes)  # NS rows [BI]
            behind = split_rows(states, BI, STATE_LEVELS)  # NS rows [BI]
            before = ()
            # The gradient of every state over the tokens of the chunk, all in registers.
            for n in tl.static_range(1 << STATE_LEVELS):
                if n < N:
                    c = tl.load(chunk + n * L + lanes.l)  # [L]
                    before = before + (_retreat(behind[n], dt, dy, rates[n], c, fresh, sizes),)  # [BI]
                else:
                    before = before + (behind[n],)
            states = join_rows(before, BI, STATE_LEVELS)  # [NS, BI]
        elif REVERSE:
            # The same for one state after the other, through memory.
            for n in range(N):
                a = tl.load(a_ptr + n * I + i, mask=inside, other=0.0)  # [BI]
                g = tl.load(local_ptr + n * I + i, mask=inside, other=0.0)  # [BI]
                c = tl.load(chunk + n * L + lanes.l)  # [L]
                tl.store(local_ptr + n * I + i, _retreat(g, dt, dy, a, c, fresh, sizes), mask=inside)
        elif KEPT:
            x *= dt  # dt x, [L, BI]
            states, _ = advance_all(states, x, dt, x, a_ptr + zero, chunk, chunk, fresh, lanes, known_states, sizes, False)  # fmt: skip
        else:
            x *= dt  # dt x, [L, BI]
            # `UNROLL` states at a time over the tokens of the chunk, from memory and back.
            for n0 in range(0, N, UNROLL):
                rates, before, b_rows = load_turn(a_ptr, local_ptr, chunk, n0, lanes, sizes, UNROLL)
                for u in tl.static_range(UNROLL):
                    known = inside & (n0 + u < N) if N % UNROLL else inside
                    rows = advance(before[u], dt, x, rates[u], b_rows[u], fresh, sizes)  # L rows [BI]
                    tl.store(local_ptr + (n0 + u) * I + i, rows[L - 1], mask=known)
    if KEPT:
        tl.store(states_at(local_ptr + zero, i, sizes), states, mask=known_states)
    tl.store(total_ptr + mine * I + i, total, mask=inside)
    if PREFETCH:
        keep_touched(total_ptr, seen, zero, BI)


@triton.jit
def combine_kernel(
    a_ptr, first_ptr, local_ptr, total_ptr, starts_ptr, bounds_ptr,  # first [sequences, N, I], local and total of the summary
    T, SPLITS, SEQUENCES,
    entering_ptr,  # [sequences, SPLITS, N, I]
    I: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr, A_STRIDE: tl.constexpr,
    FIRST: tl.constexpr, REVERSE: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """The state that enters each split, from the initial one and the effect of every split; with `REVERSE` from the last split to the first."""
    # A program has one state of `BLOCK` channels of a sequence.
    blocks: tl.constexpr = (I + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    n = pid // blocks % N
    sequence = pid // (blocks * N)
    i = pid % blocks * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = i < I  # [BLOCK]
    split = place(sequence, bounds_ptr, T, SPLITS, 1, L, 1, TABLE)
    at = (sequence * SPLITS).to(tl.int64)
    a = tl.load(a_ptr + (sequence // SEQUENCES).to(tl.int64) * A_STRIDE + n * I + i, mask=inside, other=0.0)  # [BLOCK]  # fmt: skip
    h = tl.zeros([BLOCK], tl.float32)  # [BLOCK]
    if FIRST:
        h = tl.load(first_ptr + (sequence.to(tl.int64) * N + n) * I + i, mask=inside, other=0.0)  # [BLOCK]
    # h = e^(A sum dt) h + local: a split is one decay and one addition.
    for k in range(SPLITS):
        s = SPLITS - 1 - k if REVERSE else k
        here = ((at + s) * N + n) * I + i  # [BLOCK]
        tl.store(entering_ptr + here, h, mask=inside)
        # Nothing comes after the last split, whose effect is not computed.
        known = inside & (k + 1 < SPLITS)  # [BLOCK]
        begin = s * split.size * L
        decay = tl.exp2(a * tl.load(total_ptr + (at + s) * I + i, mask=known, other=0.0))  # [BLOCK]
        # If a segment starts within the split, nothing from before passes through.
        if SEGMENTS:
            end = tl.minimum(begin + split.size * L, split.length)
            decay = tl.where(tl.load(starts_ptr + split.row + end - 1) < begin, decay, 0.0)  # [BLOCK]
        h = decay * h + tl.load(local_ptr + here, mask=known, other=0.0)  # [BLOCK]
