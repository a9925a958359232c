"""The Triton kernels of the choice: for each query and key head its own block, the first, and those of the largest scores."""

import triton
import triton.language as tl

NO_BLOCK = tl.constexpr(2**31 - 1)
GROUPS = tl.constexpr(32)  # of blocks, one for each lane of a warp
# The keys of infinity, and of the largest number below.
OWN, FIRST = tl.constexpr(0x7F800000), tl.constexpr(0x7F7FFFFF)


@triton.jit
def choose_kernel(
    importance_ptr, start_ptr, end_ptr, place_ptr, base_ptr,  # [B, K, length, C], [B, T] four times
    T, C, M, chunk, length, chosen_ptr,  # [B, K, length, N]
    K: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr, REACH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The blocks of some queries: their own, the first, those of the largest weight. Compressed key `m * PER + o` shares with block `m` as many
    strides as lie in both `o .. o + REACH` and `0 .. PER`."""
    pid = tl.program_id(0)
    tiles = tl.cdiv(length, ROWS)
    own = pid % tiles * ROWS + tl.arange(0, ROWS)  # [ROWS], in the chunk
    kv = pid // tiles % K
    b = (pid // (tiles * K)).to(tl.int64)
    inside = own < length
    at = b * T + chunk + own
    start = tl.load(start_ptr + at, mask=inside, other=0)  # [ROWS]
    end = tl.load(end_ptr + at, mask=inside, other=0)  # [ROWS]
    place = tl.load(place_ptr + at, mask=inside, other=-1)  # [ROWS]
    base = tl.load(base_ptr + at, mask=inside, other=0)  # [ROWS]
    m = tl.arange(0, BLOCK_M)  # [BM], of the query's sequence
    row = (b * K + kv) * length + own  # [ROWS]
    score = tl.zeros([ROWS, BLOCK_M], tl.float32)  # [ROWS, BM]
    for o in tl.static_range(1 - REACH, PER):
        c = start[:, None] + (m * PER + o)[None, :]  # [ROWS, BM]
        seen = (c >= start[:, None]) & (c < end[:, None])
        weight = tl.load(importance_ptr + row[:, None] * C + c, mask=seen, other=0.0)  # [ROWS, BM]
        score += weight * (min(PER, o + REACH) - max(0, o))
    last = tl.where(place < 0, -1, place // BLOCK)  # [ROWS]
    score = tl.where((m == 0)[None, :], 3.0e38, score)
    score = tl.where(m[None, :] == last[:, None], float("inf"), score)
    score = tl.where((m[None, :] > last[:, None]) | (m >= M)[None, :], -1.0, score)
    for n in tl.range(0, N):
        best = tl.max(score, axis=1)  # [ROWS]
        index = tl.min(tl.where(score == best[:, None], m[None, :], NO_BLOCK), axis=1)  # [ROWS]
        chosen = tl.where(best >= 0, index + base, -1)
        tl.store(chosen_ptr + row * N + n, chosen, mask=inside)
        score = tl.where(m[None, :] == index[:, None], -1.0, score)


@triton.jit
def keys_of(score, m, own, BLOCKS):
    """Integers in the order of the scores of blocks `m`, which are not negative: their bits. A query's own block comes first, then block 0; those
    after its own are -1."""
    key = score.to(tl.int32, bitcast=True)
    key = tl.where(m == 0, FIRST, key)
    key = tl.where(m == own, OWN, key)
    return tl.where((m > own) | (m >= BLOCKS), -1, key)


@triton.jit
def in_lanes(best, peaks_ptr):
    """The same numbers `[GROUPS]`, by way of memory one in each lane of every warp, so that reductions need no other warp."""
    g = tl.arange(0, GROUPS)  # [GROUPS]
    tl.store(peaks_ptr + g, best)
    tl.debug_barrier()
    return tl.load(peaks_ptr + g)


@triton.jit
def best_group(best):
    """The largest key of all groups, and the first group that has it."""
    top = tl.max(best, axis=0)
    g = tl.arange(0, GROUPS)  # [GROUPS]
    return top, tl.min(tl.where(best == top, g, GROUPS), axis=0)


@triton.jit
def take_from_group(best, x, top, group, peak, before, taken, WIDTH: tl.constexpr):
    """The largest keys `[GROUPS]` without the key `top` of a group, whose keys are `x`, and its column there. The last one was `peak`, of group
    `before` and column `taken`: equal keys of a group are taken one after the other."""
    g = tl.arange(0, GROUPS)  # [GROUPS]
    w = tl.arange(0, WIDTH)  # [WIDTH]
    start = tl.where((group == before) & (top == peak), taken, -1)
    column = tl.min(tl.where((x == top) & (w > start), w, WIDTH), axis=0)
    later = (x < top) | ((x == top) & (w > column))  # [WIDTH]
    return tl.where(g == group, tl.max(tl.where(later, x, -1), axis=0), best), column


@triton.jit
def choose_one_kernel(
    importance_ptr, start_ptr, end_ptr, place_ptr, base_ptr,  # [B, K, length, C], [B, T] four times
    T, C, M, chunk, length, chosen_ptr, peaks_ptr,  # [B, K, length, N], [B, K, length, GROUPS]
    K: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Works as `choose_kernel`, where compressed keys are those of blocks. One query and key head a program of one warp, which keeps the largest
    of each of 32 groups of blocks in its lanes and after each choice reads that group again, so a choice takes as many steps as a group has
    blocks."""
    width: tl.constexpr = BLOCK_M // GROUPS
    pid = tl.program_id(0)
    kv = pid // length % K
    b = (pid // (length * K)).to(tl.int64)
    at = b * T + chunk + pid % length
    start = tl.load(start_ptr + at)
    count = tl.load(end_ptr + at) - start
    place = tl.load(place_ptr + at)
    base = tl.load(base_ptr + at)
    own = tl.where(place < 0, -1, place // BLOCK)
    row = (b * K + kv) * length + pid % length
    weights = importance_ptr + row * C + start
    w = tl.arange(0, width)  # [width]
    every = tl.arange(0, GROUPS)[:, None] * width + w[None, :]  # [GROUPS, width]
    best = tl.max(keys_of(tl.load(weights + every, mask=every < count, other=0.0), every, own, M), axis=1)
    best = in_lanes(best, peaks_ptr + row * GROUPS)  # [GROUPS]
    taken = own * 0 - 1
    before = taken
    peak = taken
    for n in tl.range(0, N):
        top, group = best_group(best)
        m = group * width + w  # [width]
        x = keys_of(tl.load(weights + m, mask=m < count, other=0.0), m, own, M)
        best, column = take_from_group(best, x, top, group, peak, before, taken, width)
        tl.store(chosen_ptr + row * N + n, tl.where(top >= 0, group * width + column + base, -1))
        taken = column
        before = group
        peak = top
