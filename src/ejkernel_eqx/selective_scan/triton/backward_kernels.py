"""The backward kernel of the scan: all gradients."""

import triton
import triton.language as tl

from ...launch.constants import LN2
from .places import channels_of, Grid, of_channels, place
from .prefetch import keep_touched, touch, touch_projection, touch_rows
from .rows import join_rows, split_rows, sum_channels
from .steps import decays_of, fresh_penalty, NO_TIME, sigmoid, time_step
from .tile import load_tile, Sizes, store_tile


@triton.jit
def _load_state(a_ptr, state_ptr, carry_ptr, da_ptr, n, i, inside, I: tl.constexpr):
    """Loads what the loop over states needs of each: rates, the states before the chunk, `f`, and the gradient of the rates."""
    a = tl.load(a_ptr + n * I + i, mask=inside, other=0.0)  # [BI], as all here
    h = tl.load(state_ptr + n * I + i, mask=inside, other=0.0)
    f = tl.load(carry_ptr + n * I + i, mask=inside, other=0.0)
    return a, h, f, tl.load(da_ptr + n * I + i, mask=inside, other=0.0)


@triton.jit
def backward_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, bias_ptr, states_ptr, dout_ptr, entering_ptr, starts_ptr, bounds_ptr,
    T, SPLITS, CHUNKS, SEQUENCES, zero,
    dx_ptr, ddt_ptr, dz_ptr, dprojection_ptr,  # [rows, I] each, [GROUP_BLOCKS, G, CHUNKS, N, 2 L]: dB before dC
    da_ptr, dd_ptr, dbias_ptr, dinitial_ptr, carry_ptr,  # [sequences, SPLITS, N, I], without N, without N, [sequences, N, I], as da
    I: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr,
    BI: tl.constexpr, LEVELS: tl.constexpr, A_STRIDE: tl.constexpr, BIAS_STRIDE: tl.constexpr, D_STRIDE: tl.constexpr,
    LANE_LEVELS: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr,
    SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """All gradients of a split, chunk by chunk from its last; for those that channels or splits share, this program's part.

    With `g` the gradient of the state after a token and `f` that of the state before it: `g = C dy + f'`, `f = decay g`, where `f'` belongs
    to the next token. `carry` holds `f` of every state of the split between chunks."""
    L: tl.constexpr = 1 << LEVELS
    sizes: tl.constexpr = Sizes(I, N, BI, LEVELS, 0, EVEN, SEGMENTS)
    grid: tl.constexpr = Grid(BLOCKS, GROUP, GROUP_BLOCKS, BI, L, BIAS_STRIDE, BIAS, TABLE)
    at = place(tl.program_id(0), bounds_ptr, T, SPLITS, SPLITS, L, BLOCKS, TABLE)
    split, first, last = at.split, at.first, at.last
    lanes = channels_of(at, bias_ptr, SEQUENCES, grid)
    i, inside = lanes.i, lanes.inside  # [BI], [BI]
    seen = tl.zeros([BI], tl.float32)  # [BI]
    skip = of_channels(d_ptr + lanes.batch * D_STRIDE, i, inside, SKIP)  # [BI]
    a_ptr += lanes.batch * A_STRIDE
    mine = (at.sequence * SPLITS + split).to(tl.int64)
    entering_ptr += mine * (N * I)
    carry_ptr += mine * (N * I)
    da_ptr += mine * (N * I)
    dinitial_ptr += at.sequence.to(tl.int64) * (N * I)
    projection = (lanes.group.to(tl.int64) * CHUNKS + at.chunk) * (N * L)
    b_ptr += projection
    c_ptr += projection
    partial = (at.block % GROUP_BLOCKS).to(tl.int64) * (BLOCKS // GROUP_BLOCKS) * CHUNKS * (
        N * L
    ) + projection
    dprojection_ptr += 2 * partial
    states_ptr += at.chunk * (N * I)
    chunks = (at.length + L - 1) // L

    # The gradients of the states after the split; a sequence without tokens passes them on to its initial states.
    nothing = tl.zeros([BI], tl.float32)  # [BI]
    for n in range(N):
        f = tl.load(entering_ptr + n * I + i, mask=inside, other=0.0)  # [BI]
        tl.store(carry_ptr + n * I + i, f, mask=inside)
        tl.store(da_ptr + n * I + i, nothing, mask=inside)
        tl.store(dinitial_ptr + n * I + i, f, mask=inside & (chunks == 0) & (split == 0))

    dskip = nothing
    dbias = nothing
    for back in range(last - first):
        j = last - 1 - back
        token = j * L
        count = at.length - token
        here = (at.row + token) * I + zero
        x = load_tile(x_ptr + here, count, lanes, 0.0, sizes)  # [L, BI]
        raw = load_tile(
            dt_ptr + here, count, lanes, float("-inf"), sizes
        )  # [L, BI]; past the end a time step of 0
        dy = load_tile(dout_ptr + here, count, lanes, 0.0, sizes)  # [L, BI]
        if GATE:
            z = load_tile(z_ptr + here, count, lanes, 0.0, sizes)  # [L, BI]
            dy *= z * sigmoid(z)  # [L, BI], dout silu(z)
        dt = time_step(raw, lanes.bias, SOFTPLUS)  # [L, BI]
        dskip += tl.sum(dy * x, axis=0)  # [BI]
        y = x * skip[None, :]  # [L, BI], for dz
        x *= dt  # dt x, [L, BI]
        dx = tl.zeros([L, BI], tl.float32)  # [L, BI], without dt and D until the end
        ddt = tl.zeros([L, BI], tl.float32)  # [L, BI], in log2 units and without dx until the end
        fresh = fresh_penalty(starts_ptr, at, token, lanes.l, SEGMENTS)  # [L]
        at_chunk = j.to(tl.int64) * (N * L)
        state = states_ptr + j.to(tl.int64) * (N * I)
        a, h, f, da = _load_state(a_ptr, state, carry_ptr, da_ptr, 0, i, inside, I)
        # One state after the other: forward over the tokens again, then back, in the same registers.
        for n in range(N):
            if not PREFETCH:
                a, h, f, da = _load_state(a_ptr, state, carry_ptr, da_ptr, n, i, inside, I)
            b = tl.load(b_ptr + at_chunk + n * L + lanes.l)  # [L]
            c = tl.load(c_ptr + at_chunk + n * L + lanes.l)  # [L]
            decays = decays_of(dt, a, fresh, sizes)  # L rows [BI]
            write = split_rows(x * b[:, None], BI, LEVELS)  # L rows [BI]
            read = split_rows(dy * c[:, None], BI, LEVELS)  # L rows [BI]
            passed_rows = ()
            h_rows = ()
            for r in tl.static_range(L):
                passed = decays[r] * h  # e^(dt A) h, [BI]
                h = passed + write[r]  # [BI]
                passed_rows = passed_rows + (passed,)
                h_rows = h_rows + (h,)
            passed = join_rows(passed_rows, BI, LEVELS)  # [L, BI]
            states = join_rows(h_rows, BI, LEVELS)  # [L, BI]
            if GATE:
                y += states * c[:, None]  # [L, BI]
            g_rows = ()
            for r in tl.static_range(L):
                g = read[L - 1 - r] + f  # [BI]
                f = decays[L - 1 - r] * g  # [BI]
                g_rows = (g,) + g_rows
            tl.store(carry_ptr + n * I + i, f, mask=inside)
            g = join_rows(g_rows, BI, LEVELS)  # [L, BI]
            # dx = sum g B, the exponent's gradient is g e^(dt A) h: of dt times A, of A times dt.
            dx += g * b[:, None]  # [L, BI]
            dexponent = g * passed  # [L, BI]
            ddt += dexponent * a[None, :]  # [L, BI]
            da += tl.sum(dexponent * dt, axis=0)  # [BI]
            tl.store(da_ptr + n * I + i, da, mask=inside)
            # dB = sum g dt x and dC = sum h dy, over channels: both at once, stacked.
            both = tl.reshape(tl.permute(tl.join(g * x, states * dy), (2, 0, 1)), (2 * L, BI))  # [2 L, BI]
            if PREFETCH:  # loaded while lanes exchange their rows
                a, h, f, da = _load_state(a_ptr, state, carry_ptr, da_ptr, tl.minimum(n + 1, N - 1), i, inside, I)  # fmt: skip
            shares = sum_channels(both, 2 * L, BI, LEVELS + 1, LANE_LEVELS)  # [2 L]
            tl.store(dprojection_ptr + 2 * (at_chunk + n * L) + tl.arange(0, 2 * L), shares)

        # The previous chunk is loaded while this one is finished.
        if PREFETCH:
            ahead = tl.where(j > first, L, 0)
            there = here - L * I + lanes.channel
            seen += touch_rows(x_ptr + there, ahead, lanes, sizes)
            seen += touch_rows(dt_ptr + there, ahead, lanes, sizes)
            seen += touch_rows(dout_ptr + there, ahead, lanes, sizes)
            if GATE:
                seen += touch_rows(z_ptr + there, ahead, lanes, sizes)
            if PREFETCH > 1:
                at_next = (j - 1).to(tl.int64) * (N * L)
                seen += touch_projection(b_ptr + at_next, ahead, sizes)
                seen += touch_projection(c_ptr + at_next, ahead, sizes)
            state_there = states_ptr + (j - 1).to(tl.int64) * (N * I) + lanes.channel
            seen += touch(state_there, tl.where(j > first, N, 0), lanes.width, N, BI, I, BI)
        # Reloaded rather than kept in registers over all states.
        x = load_tile(x_ptr + here, count, lanes, 0.0, sizes)  # [L, BI]
        raw = load_tile(dt_ptr + here, count, lanes, float("-inf"), sizes)  # [L, BI]
        if GATE:
            z = load_tile(z_ptr + here, count, lanes, 0.0, sizes)  # [L, BI]
            dout = load_tile(dout_ptr + here, count, lanes, 0.0, sizes)  # [L, BI]
            gate = sigmoid(z)  # [L, BI]
            dz = dout * y * gate * (1.0 + z * (1.0 - gate))  # [L, BI]
            store_tile(dz_ptr + here, dz, count, lanes, sizes)
        ddt = ddt * LN2 + dx * x  # [L, BI]; A has log2 e inside
        dx = dx * dt + dy * skip[None, :]  # [L, BI]
        # The gradient before the softplus, whose derivative is the sigmoid; zero where the time step was fixed at 0.
        if SOFTPLUS:
            ddt *= sigmoid(raw + lanes.bias[None, :])
        else:
            ddt = tl.where(raw <= NO_TIME, 0.0, ddt)
        dbias += tl.sum(ddt, axis=0)  # [BI]
        store_tile(dx_ptr + here, dx, count, lanes, sizes)
        store_tile(ddt_ptr + here, ddt, count, lanes, sizes)

    for n in range(N):
        f = tl.load(carry_ptr + n * I + i, mask=inside & (split == 0) & (chunks > 0), other=0.0)
        tl.store(dinitial_ptr + n * I + i, f, mask=inside & (split == 0) & (chunks > 0))
    tl.store(dd_ptr + mine * I + i, dskip, mask=inside)
    tl.store(dbias_ptr + mine * I + i, dbias, mask=inside)
    if PREFETCH:
        keep_touched(dbias_ptr, seen, zero, BI)
