"""Tiles as rows. A tile `[L, BI]` lies along its tokens in the registers of one thread, so joining rows of channels to a tile and splitting a tile
into rows are free, and a recurrence over the tokens of a chunk is plain arithmetic."""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false

import triton
import triton.language as tl


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
    # The upper lane of a pair keeps the later half of the rows.
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
