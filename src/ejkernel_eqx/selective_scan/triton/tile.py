"""Shared by the kernels of the scan. A program has `BI` channels, each owned by one thread, and processes its tokens in chunks
of `L`; a tile `[L, BI]` lies along its tokens in the registers of one thread. So joining rows of channels to a tile and splitting a
tile into rows are free, and a recurrence over the tokens of a chunk is plain arithmetic.

`zero` is a run-time 0: with an address that is not known to be aligned, each thread gets one channel of a row, not several adjacent ones."""

import triton
import triton.language as tl

from ...launch.constants import LOG2E
from .. import spec

NO_TIME = tl.constexpr(spec.NO_TIME)
SECTOR = tl.constexpr(32)  # bytes that a cache loads at once


@triton.jit
def _join_halves(rows, HALF: tl.constexpr):
    joined = ()
    for r in tl.static_range(HALF):
        # [BI, 2, .., 2], with one dimension more than its halves: the digit of the token that tells them apart.
        joined = joined + (tl.join(rows[r], rows[r + HALF]),)
    return joined


@triton.jit
def join_rows(rows, BI: tl.constexpr, LEVELS: tl.constexpr):
    """`2**LEVELS` rows `[BI]`, one per token, as a tile `[L, BI]`."""
    for level in tl.static_range(LEVELS):
        rows = _join_halves(rows, 1 << (LEVELS - 1 - level))
    return tl.permute(tl.reshape(rows[0], (BI, 1 << LEVELS)), (1, 0))  # [L, BI]


@triton.jit
def split_rows(tile, BI: tl.constexpr, LEVELS: tl.constexpr):
    """A tile `[L, BI]` as rows `[BI]`, one per token."""
    rows = (tl.reshape(tl.permute(tile, (1, 0)), (BI,) + (2,) * LEVELS),)  # a dimension for each digit
    for level in tl.static_range(LEVELS):  # by the digits of the token, from the last
        low = ()
        high = ()
        for r in tl.static_range(1 << level):
            both = tl.split(rows[r])  # [BI, 2, .., 2] each, with one dimension fewer
            low = low + (both[0],)
            high = high + (both[1],)
        rows = low + high
    return rows


@triton.jit
def _other_lane(x, SPAN: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr):
    """`[R, LANES]` with channels swapped in pairs `SPAN` apart: the exclusive or of a pair, xored with either, yields the other."""
    bits = tl.reshape(x.to(tl.int32, bitcast=True), (R, LANES // (2 * SPAN), 2, SPAN))  # [R, pairs of spans, 2, SPAN]  # fmt: skip
    both = tl.xor_sum(bits, axis=2, keep_dims=True)  # [R, pairs of spans, 1, SPAN]
    return tl.reshape(bits ^ both, (R, LANES)).to(tl.float32, bitcast=True)  # [R, LANES]


@triton.jit
def _halve_rows(x, SPAN: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr):
    """`[R, LANES]` to `[R / 2, LANES]`: in each pair of channels `SPAN` apart, one adds the other's half of its rows to its own."""
    low, high = tl.split(tl.permute(tl.reshape(x, (2, R // 2, LANES)), (1, 2, 0)))  # [R / 2, LANES] each
    upper = (tl.arange(0, LANES) // SPAN % 2 == 1)[None, :]  # [1, LANES]
    return tl.where(upper, high, low) + _other_lane(tl.where(upper, low, high), SPAN, R // 2, LANES)  # [R / 2, LANES]  # fmt: skip


@triton.jit
def sum_channels(x, R: tl.constexpr, BI: tl.constexpr, LEVELS: tl.constexpr, LANE_LEVELS: tl.constexpr):
    """`[R, BI]` summed to `[R]`, `R = 2**LEVELS`: the lanes of a warp divide the rows among themselves, which takes one exchange per row
    instead of five."""
    LANES: tl.constexpr = 1 << LANE_LEVELS
    STAGES: tl.constexpr = min(LEVELS, LANE_LEVELS)
    # First over the channels beyond one per lane; then pairs of lanes halve their rows until none are left to halve.
    if BI > LANES:
        x = tl.sum(tl.reshape(x, (R, BI // LANES, LANES)), axis=1)  # [R, LANES]
    for stage in tl.static_range(STAGES):
        x = _halve_rows(x, 1 << (LANE_LEVELS - 1 - stage), R >> stage, LANES)  # [R >> stage + 1, LANES]
    if LEVELS >= LANE_LEVELS:
        return tl.reshape(tl.permute(x, (1, 0)), (R,))  # from [R / LANES, LANES]: each lane has its own rows
    else:
        return tl.sum(tl.reshape(x, (R, LANES // R)), axis=1)  # of [1, LANES]: several lanes have parts of a row  # fmt: skip


@triton.jit
def load_tile(ptr, count, l, i, inside, OTHER: tl.constexpr, I: tl.constexpr, EVEN: tl.constexpr):
    """Tokens `0 .. count` of `[T, I]` as a float32 tile `[L, BI]`, `OTHER` past them; `EVEN`: the whole tile is inside."""
    at = ptr + l[:, None] * I + i[None, :]  # [L, BI]
    if EVEN:
        return tl.load(at).to(tl.float32)  # [L, BI]
    else:
        return tl.load(at, mask=(l[:, None] < count) & inside[None, :], other=OTHER).to(tl.float32)  # [L, BI]


@triton.jit
def store_tile(ptr, tile, count, l, i, inside, I: tl.constexpr, EVEN: tl.constexpr):
    at = ptr + l[:, None] * I + i[None, :]  # [L, BI]
    if EVEN:
        tl.store(at, tile.to(ptr.dtype.element_ty))
    else:
        tl.store(at, tile.to(ptr.dtype.element_ty), mask=(l[:, None] < count) & inside[None, :])


@triton.jit
def touch(ptr, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BI: tl.constexpr):
    """Prefetches into the cache without taking registers: loads one number of every sector of the first `rows` of `ROWS` rows of `width` (at
    most `WIDTH`) numbers, `STRIDE` apart. Returns sums `[BI]` for `keep_touched` only."""
    EVERY: tl.constexpr = SECTOR * 8 // ptr.dtype.element_ty.primitive_bitwidth  # numbers of a sector
    OF_ROW: tl.constexpr = (WIDTH + EVERY - 1) // EVERY  # sectors of a row
    sums = tl.zeros([BI], tl.float32)  # [BI]
    # Each lane takes a sector.
    for first in tl.static_range(0, ROWS * OF_ROW, BI):
        sector = first + tl.arange(0, BI)  # [BI]
        row = sector // OF_ROW
        column = sector % OF_ROW * EVERY
        known = (row < tl.minimum(rows, ROWS)) & (column < width)
        sums += tl.load(ptr + row * STRIDE + column, mask=known, other=0.0).to(tl.float32)  # [BI]
    return sums


@triton.jit
def keep_touched(ptr, sums, zero, BI: tl.constexpr):
    """Keeps the compiler from removing the loads of `touch`; it cannot know that nothing is stored here."""
    lane = tl.arange(0, BI)  # [BI]
    tl.store(ptr + lane, sums, mask=lane < zero)


@triton.jit
def channels_of(block, sequence, bias_ptr, SEQUENCES, GROUP: tl.constexpr, GROUP_BLOCKS: tl.constexpr, BI: tl.constexpr, L: tl.constexpr,
                BIAS_STRIDE: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """For a block of channels: the group, the channels, which of them exist, the first one, and how many from it on are in the group; the
    tokens of a chunk; the batch row of the sequence, and its bias."""
    group = block // GROUP_BLOCKS
    inner = block % GROUP_BLOCKS * BI
    each = inner + tl.arange(0, BI)  # [BI]
    if GROUP % BI == 0:
        inside = tl.full([BI], True, tl.int1)  # [BI]
    else:
        inside = each < GROUP  # [BI]
    i = group * GROUP + each  # [BI]
    channel = group * GROUP + inner
    width = GROUP - inner
    l = tl.arange(0, L)  # [L]
    batch = (sequence // SEQUENCES).to(tl.int64)
    bias = of_channels(bias_ptr + batch * BIAS_STRIDE, i, inside, BIAS)  # [BI]
    return group, i, inside, channel, width, l, batch, bias


@triton.jit
def of_channels(ptr, i, inside, GIVEN: tl.constexpr):
    """One number per channel; 0 if the call has none."""
    if GIVEN:
        return tl.load(ptr + i, mask=inside, other=0.0)  # [BI]
    else:
        return tl.zeros(i.shape, tl.float32)  # [BI]


@triton.jit
def no_states(inside, BI: tl.constexpr, N: tl.constexpr, STATE_LEVELS: tl.constexpr):
    """Which states of the channels exist, and zeros for them: tiles `[NS, BI]`."""
    known = (tl.arange(0, 1 << STATE_LEVELS) < N)[:, None] & inside[None, :]  # [NS, BI]
    return known, tl.zeros([1 << STATE_LEVELS, BI], tl.float32)


@triton.jit
def sigmoid(x):
    e = tl.exp2(-tl.abs(x) * LOG2E)  # e^-|x|, which does not overflow
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def time_step(raw, bias, SOFTPLUS: tl.constexpr):
    """The time step of a tile `[L, BI]`; 0 where `raw` is at most `NO_TIME`."""
    x = raw + bias[None, :]  # [L, BI]
    if SOFTPLUS:
        # log(1 + e) / e for e up to 1, as the polynomial of least relative error (5e-9 for an exact e); the logarithm of 1 + e would lose
        # the digits of a small e.
        e = tl.exp2(-tl.abs(x) * LOG2E)  # [L, BI]
        p = -0.0032440228387713432 * e + 0.019851455464959145  # [L, BI]
        p = p * e - 0.056959524750709534
        p = p * e + 0.10603655129671097
        p = p * e - 0.15305593609809875
        p = p * e + 0.1967594027519226
        p = p * e - 0.24954134225845337
        p = p * e + 0.3332996368408203
        p = p * e - 0.4999990165233612
        p = p * e + 1.0
        # softplus(x) = max(x, 0) + log(1 + e^-|x|).
        return p * e + tl.maximum(x, 0.0)  # [L, BI]
    else:
        return tl.where(raw <= NO_TIME, 0.0, x)  # [L, BI]


@triton.jit
def place(pid, bounds_ptr, T, SPLITS, SPLIT_COUNT, L: tl.constexpr, BLOCKS: tl.constexpr, TABLE: tl.constexpr):  # fmt: skip
    """For a program: its block of channels, its sequence, and its split of it; the sequence's first row, length and first chunk; the split's
    first chunk and the one after its last. The last of `SPLITS` splits may be omitted from the grid."""
    block = pid % BLOCKS
    split = pid // BLOCKS % SPLIT_COUNT
    sequence = pid // BLOCKS // SPLIT_COUNT
    # The location of the sequence: three numbers of a table, or uniform lengths.
    if TABLE:
        row = tl.load(bounds_ptr + sequence * 3)
        length = tl.load(bounds_ptr + sequence * 3 + 1) - row
        chunk = tl.load(bounds_ptr + sequence * 3 + 2)
    else:
        row = sequence * T
        length = sequence * 0 + T  # a tensor, even if the length is a constant
        chunk = sequence * ((T + L - 1) // L)
    # Splits consist of whole chunks, `size` each, except for the last ones, which may be shorter or empty.
    chunks = (length + L - 1) // L
    size = (chunks + SPLITS - 1) // SPLITS
    first = split * size
    last = tl.minimum(first + size, chunks)
    return block, sequence, split, row.to(tl.int64), length, chunk.to(tl.int64), first, last, size


@triton.jit
def fresh_penalty(starts_ptr, row, token, length, l, SEGMENTS: tl.constexpr):
    """A term for the exponent of a decay: minus infinity where a segment starts."""
    if SEGMENTS:
        start = tl.load(starts_ptr + row + token + l, mask=token + l < length, other=-1)  # [L]
        return tl.where(start == token + l, float("-inf"), 0.0)  # [L]
    else:
        return tl.zeros(l.shape, tl.float32)


@triton.jit
def states_at(ptr, i, N: tl.constexpr, I: tl.constexpr, STATE_LEVELS: tl.constexpr):
    """Pointers to all states of channels `i` in `[N, I]`, a tile `[2**STATE_LEVELS, BI]`."""
    n = tl.arange(0, 1 << STATE_LEVELS)  # [NS], NS = 2**STATE_LEVELS
    return (ptr + i)[None, :] + n[:, None] * I  # [NS, BI]


@triton.jit
def load_rates(ptr, i, known, BI: tl.constexpr, N: tl.constexpr, I: tl.constexpr, STATE_LEVELS: tl.constexpr):
    """The rates of all states of channels `i`, as rows. Reloaded for every chunk to save registers."""
    return split_rows(tl.load(states_at(ptr, i, N, I, STATE_LEVELS), mask=known, other=0.0), BI, STATE_LEVELS)  # [BI] each  # fmt: skip


@triton.jit
def decays_of(dt, rate, fresh, BI: tl.constexpr, LEVELS: tl.constexpr, SEGMENTS: tl.constexpr):
    """The decays of one state at each token of a chunk, as rows."""
    # e^(dt A), with log2 e included in A; where a segment starts, the state before it is multiplied by 2^-inf = 0.
    exponent = dt * rate[None, :]  # [L, BI]
    if SEGMENTS:
        exponent += fresh[:, None]
    return split_rows(tl.exp2(exponent), BI, LEVELS)  # [BI] each


@triton.jit
def load_projection(ptr, n, l, N: tl.constexpr, L: tl.constexpr, UNROLL: tl.constexpr):
    """`B` or `C` of one state over the tokens of a chunk `[N, L]`; 0 for a state past the last."""
    if N % UNROLL:
        return tl.load(ptr + n * L + l, mask=(l < L) & (n < N), other=0.0)  # [L]
    else:
        return tl.load(ptr + n * L + l)  # [L]
