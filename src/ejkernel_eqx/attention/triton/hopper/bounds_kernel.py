"""The bounds of `tile_table.key_tile_table` in one launch: its dozen array operations would take as long as short attention does."""

import triton
import triton.language as tl

_CHUNK = tl.constexpr(32)
"""Tiles of keys that are looked at together."""
_FAR = tl.constexpr(2**31 - 1)


# fmt: off
@triton.jit
def key_bounds_kernel(
    q_segments_ptr, marks_ptr, start_ptr, end_ptr,  # [B, T] and, of keys, [B, S rounded up to whole tiles]
    T, S, offset,
    tiles_ptr, kinds_ptr, first_ptr, past_ptr, no_claims_ptr,  # [B, tiles of queries, 4], [B, tiles of queries], [B, T], [B, T], [1]: 0
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, MOST: tl.constexpr, STEPS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """A program for each tile of queries; `MOST`: their number, rounded up to a power of two. `STEPS`: of a search among the keys.

    Also the range of keys of each query: of its segment too, if keys of a segment are side by side; and what is odd about the keys of each tile, as
    `scores.SCATTERED` says."""
    tiles, count = tl.cdiv(T, BLOCK_Q), tl.cdiv(S, BLOCK_K)
    b, m = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    each = tl.arange(0, MOST)  # [MOST]
    row = m * BLOCK_Q + each  # [MOST]
    inside = (each < BLOCK_Q) & (row < T)  # [MOST]
    # The keys that the first query sees to the last one, and those that all of them see, by ranges.
    if ROWS:
        start = tl.load(start_ptr + b * T + row, mask=inside, other=0)  # [MOST]
        end = tl.maximum(tl.load(end_ptr + b * T + row, mask=inside, other=0), 0)  # [MOST]; differences of it are taken
    else:
        start = row * 0
        end = row * 0 + S
        if LEFT >= 0:
            start = tl.minimum(tl.maximum(row + (offset - LEFT), 0), S)
        if RIGHT >= 0:
            end = tl.minimum(tl.maximum(row + (offset + RIGHT + 1), 0), S)
    scattered, real, uncovered = count < 0, S + 0, count + 0
    some = inside & (start < end)  # [MOST]
    first = tl.min(tl.where(some, start, _FAR), 0)
    last = tl.max(tl.where(some, end, 0), 0)
    latest = tl.max(tl.where(inside, start, 0), 0)
    earliest = tl.min(tl.where(inside, tl.where(start < end, end, 0), _FAR), 0)
    q_low, q_high, alike = 0, 0, True
    if SEGMENTS:
        segment = tl.load(q_segments_ptr + b * T + row, mask=inside, other=-1)  # [MOST]
        q_low = tl.min(tl.where(segment >= 0, segment, _FAR), 0)
        q_high = tl.max(segment, 0)
        alike = tl.min(tl.where(inside, segment, _FAR), 0) == q_high
    # Tiles of keys that any query may see, those that all of them see, and the first tile with a key that no query sees.
    lo, hi, whole_lo, whole_hi = count, 0, count, count
    marks_ptr += b * (count * BLOCK_K)
    for c in range(0, tl.cdiv(count, _CHUNK)):
        n = c * _CHUNK + tl.arange(0, _CHUNK)  # [_CHUNK]
        touched = (first < n * BLOCK_K + BLOCK_K) & (last > n * BLOCK_K)  # [_CHUNK]
        whole = (latest <= n * BLOCK_K) & (earliest >= n * BLOCK_K + BLOCK_K)  # [_CHUNK]
        j = n[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]  # [_CHUNK, BLOCK_K]
        mark = tl.load(marks_ptr + j, mask=j < S, other=-1)  # [_CHUNK, BLOCK_K]
        lowest = tl.min(tl.where(j < S, mark, _FAR), 1)  # [_CHUNK]
        if SEGMENTS:
            before = tl.load(marks_ptr + j - 1, mask=(j > 0) & (j < S), other=0)  # [_CHUNK, BLOCK_K]
            real = tl.minimum(real, tl.min(tl.min(tl.where(mark >= 0, j, S), 1), 0))  # the first key of a segment
            # Keys of a segment are side by side if segments never fall behind the first one.
            falls = (j < S) & (mark >= 0) & (j > real) & ((before < 0) | (before > mark))
            scattered |= tl.max(tl.max(falls.to(tl.int32), 1), 0) > 0
            k_low = tl.min(tl.where(mark >= 0, mark, _FAR), 1)  # [_CHUNK]
            k_high = tl.max(mark, 1)  # [_CHUNK]
            touched = touched & (q_low <= k_high) & (k_low <= q_high)
            whole = whole & alike & (lowest == k_high) & (q_low == k_low)
        touched = touched & (n < count)
        whole = whole & touched
        lo = tl.minimum(lo, tl.min(tl.where(touched, n, count), 0))
        uncovered = tl.minimum(uncovered, tl.min(tl.where((n >= lo) & (lowest < 0), n, count), 0))
        hi = tl.maximum(hi, tl.max(tl.where(touched, n + 1, 0), 0))
        whole_lo = tl.minimum(whole_lo, tl.min(tl.where(whole, n, count), 0))
        whole_hi = tl.minimum(whole_hi, tl.min(tl.where((n > whole_lo) & (whole == 0), n, count), 0))
    whole_lo = tl.minimum(whole_lo, hi)
    record = tiles_ptr + tl.program_id(0) * 4
    tl.store(record, tl.minimum(lo, hi))
    tl.store(record + 1, whole_lo)
    tl.store(record + 2, tl.minimum(tl.maximum(whole_hi, whole_lo), hi))
    tl.store(record + 3, hi)
    # A tile of queries without keys runs one tile of them, too.
    tl.store(kinds_ptr + tl.program_id(0), ((uncovered < hi) | (lo >= hi)).to(tl.int32) + scattered.to(tl.int32) * 2)
    if SEGMENTS:
        low, high = _among(marks_ptr, S, real, segment, STEPS)
        start = tl.where(scattered, start, tl.maximum(start, low))
        end = tl.where(scattered, end, tl.minimum(end, high))
        end = tl.where(segment >= 0, end, 0)
    tl.store(first_ptr + b * T + row, start, mask=inside)
    tl.store(past_ptr + b * T + row, end, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(no_claims_ptr, 0)


@triton.jit
def _among(marks_ptr, S, real, segment, STEPS: tl.constexpr):
    """Begin and end of the keys of segments, if they are in order from key `real` on, with those of none before and behind."""
    begin, end = segment * 0, segment * 0  # [MOST]
    # A binary search for each query: the first key of its segment, and the one behind the last.
    size = 1 << (STEPS - 1)
    for _ in range(0, STEPS):
        for_begin = tl.load(marks_ptr + begin + size - 1, mask=begin + size <= S, other=-1)  # [MOST]
        for_end = tl.load(marks_ptr + end + size - 1, mask=end + size <= S, other=-1)  # [MOST]
        begin += tl.where((begin + size <= real) | ((for_begin >= 0) & (for_begin < segment)), size, 0)
        end += tl.where((end + size <= real) | ((for_end >= 0) & (for_end <= segment)), size, 0)
        size = size // 2
    return begin, end
