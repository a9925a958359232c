"""The forward kernel of the scan, and how states advance over the tokens of a chunk."""

import triton
import triton.language as tl

from .places import channels_of, Grid, of_channels, place
from .prefetch import keep_touched, touch_projection, touch_rows
from .rows import join_rows, split_rows
from .steps import decays_of, fresh_penalty, sigmoid, time_step
from .tile import load_projection, load_rates, load_tile, no_states, Sizes, states_at, store_tile


@triton.jit
def load_inputs(x_ptr, dt_ptr, seen, j, at, lanes, zero, sizes, PREFETCH: tl.constexpr):
    """Chunk `j`: its first token, the number of tokens from it on, its location; `x` and the raw time steps; the number of tokens after it."""
    L: tl.constexpr = 1 << sizes.LEVELS
    token = j * L
    count = at.length - token
    here = (at.row + token) * sizes.I + zero
    x = load_tile(x_ptr + here, count, lanes, 0.0, sizes)  # [L, BI]
    raw = load_tile(
        dt_ptr + here, count, lanes, float("-inf"), sizes
    )  # [L, BI]; the time step is 0 past the end
    # The next chunk is loaded while this one is processed.
    ahead = tl.where(j + 1 < at.last, count - L, 0)
    if PREFETCH:
        there = here + L * sizes.I + lanes.channel
        seen += touch_rows(x_ptr + there, ahead, lanes, sizes)
        seen += touch_rows(dt_ptr + there, ahead, lanes, sizes)
    return token, count, here, x, raw, ahead, seen


@triton.jit
def advance(h, dt, x, rate, b, fresh, sizes):
    """One state of every channel after each token of a chunk, `[BI]` each, from the one before the chunk; `x` includes its time steps."""
    # h = e^(dt A) h + dt x B, token by token: one instruction each.
    decay = decays_of(dt, rate, fresh, sizes)  # L rows [BI]
    write = split_rows(x * b[:, None], sizes.BI, sizes.LEVELS)  # L rows [BI]
    rows = ()
    for r in tl.static_range(1 << sizes.LEVELS):
        h = tl.fma(decay[r], h, write[r])  # [BI]
        rows = rows + (h,)
    return rows


@triton.jit
def advance_all(states, y, dt, x, a_ptr, b_ptr, c_ptr, fresh, lanes, known, sizes, READ: tl.constexpr):
    """Every state `[NS, BI]` over the tokens of a chunk, all in registers; with `READ` their product with `C` is added to `y` `[L, BI]`."""
    L: tl.constexpr = 1 << sizes.LEVELS
    rates = load_rates(a_ptr, lanes.i, known, sizes)  # NS rows [BI]
    before = split_rows(states, sizes.BI, sizes.STATE_LEVELS)  # NS rows [BI]
    after = ()
    for n in tl.static_range(1 << sizes.STATE_LEVELS):
        if n < sizes.N:
            b = load_projection(b_ptr, n, lanes.l, sizes, 1)  # [L]
            if READ:
                c = load_projection(c_ptr, n, lanes.l, sizes, 1)  # [L]
            rows = advance(before[n], dt, x, rates[n], b, fresh, sizes)  # L rows [BI]
            if READ:
                y += join_rows(rows, sizes.BI, sizes.LEVELS) * c[:, None]  # [L, BI]
            after = after + (rows[L - 1],)
        else:
            after = after + (before[n],)
    return join_rows(after, sizes.BI, sizes.STATE_LEVELS), y


@triton.jit
def load_turn(a_ptr, state_ptr, b_ptr, n0, lanes, sizes, UNROLL: tl.constexpr):
    """The rates, the states and `B` over a chunk, for `UNROLL` states from `n0` on: all loads come before the computation."""
    rates = ()
    before = ()
    b_rows = ()
    for u in tl.static_range(UNROLL):
        known = lanes.inside & (n0 + u < sizes.N) if sizes.N % UNROLL else lanes.inside  # [BI]
        rates = rates + (tl.load(a_ptr + (n0 + u) * sizes.I + lanes.i, mask=known, other=0.0),)  # [BI]
        before = before + (tl.load(state_ptr + (n0 + u) * sizes.I + lanes.i, mask=known, other=0.0),)  # [BI]
        b_rows = b_rows + (load_projection(b_ptr, n0 + u, lanes.l, sizes, UNROLL),)  # [L]
    return rates, before, b_rows


@triton.jit
def forward_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, bias_ptr,  # z as x, c as b, d as bias; else as in the summary
    entering_ptr, starts_ptr, bounds_ptr,  # [sequences, SPLITS, N, I]
    T, SPLITS, CHUNKS, SEQUENCES, zero,
    out_ptr, final_ptr, states_ptr,  # [rows, I], [sequences, N, I], [chunks, N, I] or [sequences, SPLITS, N, I]
    I: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr,
    BI: tl.constexpr, LEVELS: tl.constexpr, UNROLL: tl.constexpr, STATE_LEVELS: tl.constexpr,
    A_STRIDE: tl.constexpr, BIAS_STRIDE: tl.constexpr, D_STRIDE: tl.constexpr,
    BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr, ENTERS: tl.constexpr,
    SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, SAVE: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """The outputs of a split, and the state before every chunk if states are saved; else `states` holds the running state of a split,
    unless it stays in registers (as in the summary)."""
    L: tl.constexpr = 1 << LEVELS
    KEPT: tl.constexpr = 1 << STATE_LEVELS <= UNROLL  # [NS, BI] are all states, NS = 2**STATE_LEVELS
    sizes: tl.constexpr = Sizes(I, N, BI, LEVELS, STATE_LEVELS, EVEN, SEGMENTS)
    grid: tl.constexpr = Grid(BLOCKS, GROUP, GROUP_BLOCKS, BI, L, BIAS_STRIDE, BIAS, TABLE)
    at = place(tl.program_id(0), bounds_ptr, T, SPLITS, SPLITS, L, BLOCKS, TABLE)
    lanes = channels_of(at, bias_ptr, SEQUENCES, grid)
    i, inside = lanes.i, lanes.inside  # [BI], [BI]
    seen = tl.zeros([BI], tl.float32)  # [BI]
    # Pointers to what the program has of each array.
    skip = of_channels(d_ptr + lanes.batch * D_STRIDE, i, inside, SKIP)  # [BI]
    a_ptr += lanes.batch * A_STRIDE
    final_ptr += at.sequence.to(tl.int64) * (N * I)
    mine = (at.sequence * SPLITS + at.split).to(tl.int64)
    entering_ptr += mine * (N * I)
    projection = (lanes.group.to(tl.int64) * CHUNKS + at.chunk) * (N * L)
    b_ptr += projection
    c_ptr += projection
    states_ptr += (at.chunk + at.first if SAVE else mine) * (N * I)
    chunks = (at.length + L - 1) // L

    # The states before the first chunk, to registers or to memory. For a sequence without tokens they are the final ones.
    known_states, states = no_states(inside, sizes)  # [NS, BI] each
    if KEPT:
        if ENTERS:
            states = tl.load(states_at(entering_ptr + zero, i, sizes), mask=known_states, other=0.0)  # [NS, BI]  # fmt: skip
    else:
        for n in range(N):
            h = tl.zeros([BI], tl.float32)
            if ENTERS:
                h = tl.load(entering_ptr + n * I + i, mask=inside, other=0.0)  # [BI]
            tl.store(states_ptr + n * I + i, h, mask=inside & (at.first < at.last))
            tl.store(final_ptr + n * I + i, h, mask=inside & (chunks == 0) & (at.split == 0))

    for j in range(at.first, at.last):
        token, count, here, x, raw, ahead, seen = load_inputs(x_ptr, dt_ptr, seen, j, at, lanes, zero, sizes, PREFETCH)  # fmt: skip
        if PREFETCH:
            if GATE:  # at the end of this chunk
                seen += touch_rows(z_ptr + here + lanes.channel, count, lanes, sizes)
            if PREFETCH > 1:
                at_next = (j + 1).to(tl.int64) * (N * L)
                seen += touch_projection(b_ptr + at_next, ahead, sizes)
                seen += touch_projection(c_ptr + at_next, ahead, sizes)
        dt = time_step(raw, lanes.bias, SOFTPLUS)  # [L, BI]
        y = x * skip[None, :]  # [L, BI]; h C + D x, gated at the end
        x *= dt  # dt x, [L, BI]
        fresh = fresh_penalty(starts_ptr, at, token, lanes.l, SEGMENTS)  # [L]
        b_chunk = b_ptr + j.to(tl.int64) * (N * L)
        c_chunk = c_ptr + j.to(tl.int64) * (N * L)
        state = states_ptr
        if SAVE:
            state += (j - at.first).to(tl.int64) * (N * I)
        if KEPT:
            if SAVE:
                tl.store(states_at(state + zero, i, sizes), states, mask=known_states)
            states, y = advance_all(states, y, dt, x, a_ptr + zero, b_chunk, c_chunk, fresh, lanes, known_states, sizes, True)  # fmt: skip
        else:
            # `UNROLL` states at a time over the tokens of the chunk, from memory and back.
            for n0 in range(0, N, UNROLL):
                rates, before, b_rows = load_turn(a_ptr, state, b_chunk, n0, lanes, sizes, UNROLL)
                c_rows = ()
                for u in tl.static_range(UNROLL):
                    c_rows = c_rows + (load_projection(c_chunk, n0 + u, lanes.l, sizes, UNROLL),)  # [L]
                for u in tl.static_range(UNROLL):
                    known = inside & (n0 + u < N) if N % UNROLL else inside
                    rows = advance(before[u], dt, x, rates[u], b_rows[u], fresh, sizes)  # L rows [BI]
                    y += join_rows(rows, BI, LEVELS) * c_rows[u][:, None]  # [L, BI]
                    next_state = state + (n0 + u + (N if SAVE else 0)) * I + i
                    tl.store(next_state, rows[L - 1], mask=known & (j + 1 < at.last))
                    tl.store(final_ptr + (n0 + u) * I + i, rows[L - 1], mask=known & (j + 1 == chunks))
        if GATE:
            z = load_tile(z_ptr + here, count, lanes, 0.0, sizes)  # [L, BI]
            y *= z * sigmoid(z)  # [L, BI]
        store_tile(out_ptr + here, y, count, lanes, sizes)
    if KEPT:
        ends = (at.last == chunks) & ((at.first < at.last) | (at.split == 0))
        tl.store(states_at(final_ptr + zero, i, sizes), states, mask=known_states & ends)
    if PREFETCH:
        keep_touched(final_ptr, seen, zero, BI)
