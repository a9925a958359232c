"""The Triton kernels of pooling. A program reads up to `SPAN` tokens of one segment, a tile `[BT, BC]` of tokens by channels at a time, and reduces
them in registers. If segments are longer, a second kernel reduces the parts of each. The backward pass is one write: each token takes its share of
the gradient of its segment."""

import triton
import triton.language as tl

MAX = tl.constexpr(2)  # REDUCTION: the largest; 0: sum, 1: mean, 3: the last token
MEAN = tl.constexpr(1)
LAST = tl.constexpr(3)
# TABLE: rows cut every `L` tokens; 1: ranges of segments; 2: ranges of parts, of any number a segment.
WHOLE = tl.constexpr(0)
PARTS = tl.constexpr(2)
NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def _larger(x, i, y, j, ARG: tl.constexpr):
    """The larger of two values and, with `ARG`, its token; of equal values the first. A NaN is the largest."""
    if ARG:
        same = (x == y) | ((x != x) & (y != y))
        takes = (x > y) | ((x != x) & (y == y)) | (same & (i < j))
        return tl.where(takes, x, y), tl.where(takes, i, j)
    return tl.where((x > y) | (x != x), x, y), j


@triton.jit
def _reduce(x, i, REDUCTION: tl.constexpr, ARG: tl.constexpr):
    """The result over the first axis, `[BC]`, and with `ARG` the token of the largest value."""
    if REDUCTION == MAX:
        # The language's maximum ignores NaN on some devices.
        is_nan = x != x  # [BT, BC]
        has_nan = tl.max(is_nan.to(tl.int32), 0) > 0  # [BC]
        largest = tl.max(tl.where(is_nan, float("-inf"), x), 0)  # [BC]
        if ARG:
            has_it = tl.where(has_nan[None, :], is_nan, x == largest[None, :])  # [BT, BC]
            token = tl.min(tl.where(has_it, i, NO_TOKEN), 0)  # [BC]
        else:
            token = 0
        total = tl.where(has_nan, float("nan"), largest)  # [BC]
    else:
        total = tl.sum(x, 0)  # [BC]
        token = 0
    return total, token


@triton.jit
def _finish(total, token, count, out_ptr, arg_ptr, at, inside, REDUCTION: tl.constexpr, ARG: tl.constexpr):
    """Stores the result of a segment of `count` tokens."""
    if REDUCTION == MEAN:
        total /= tl.maximum(count, 1).to(tl.float32)
    if REDUCTION == MAX:
        total = tl.where(count > 0, total, 0.0)
        if ARG:
            tl.store(arg_ptr + at, tl.where(token == NO_TOKEN, -1, token), mask=inside)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _count(count_ptr, row, s, T, S, L, COUNTED: tl.constexpr):
    """The number of tokens of a segment."""
    if COUNTED:
        return tl.load(count_ptr + row * S + s)
    return tl.minimum(s * L + L, T) - s * L


@triton.jit
def read_kernel(
    x_ptr, segment_ptr, begin_ptr, end_ptr, owner_ptr, order_ptr, count_ptr,  # [B, T, C], [B, T], [B, S or PIECES] thrice, [B, T], [B, S]
    T, S, L, PIECES, PER, out_ptr, arg_ptr,
    C: tl.constexpr, REDUCTION: tl.constexpr, ARG: tl.constexpr, TABLE: tl.constexpr, HOLES: tl.constexpr, ORDERED: tl.constexpr,
    COUNTED: tl.constexpr, FINAL: tl.constexpr, SPAN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A result `[B, S, C]` or, unless `FINAL`, a part of one `[B, PIECES, C]` in float32."""
    blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    piece = pid // blocks % PIECES
    row = (pid // (blocks * PIECES)).to(tl.int64)
    c = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)  # [BC]
    # The tokens of this program: up to `SPAN` of one segment.
    if TABLE == PARTS:
        s = tl.load(owner_ptr + row * PIECES + piece)
        begin = tl.load(begin_ptr + row * PIECES + piece)
        end = tl.load(end_ptr + row * PIECES + piece)
    else:
        s = piece // PER
        if TABLE == WHOLE:
            begin = s * L
            end = tl.minimum(begin + L, T)
        else:
            begin = tl.load(begin_ptr + row * S + s)
            end = tl.load(end_ptr + row * S + s)
        begin += piece % PER * SPAN
        end = tl.minimum(end, begin + SPAN)
    inside = c < C
    if C % BLOCK_C == 0:
        # A mask that the compiler knows to be true costs nothing.
        inside = tl.full([BLOCK_C], 1, tl.int1)
    fill: tl.constexpr = float("-inf") if REDUCTION == MAX else 0.0
    total = tl.full([BLOCK_T, BLOCK_C], fill, tl.float32)  # [BT, BC]
    tokens = tl.full([BLOCK_T, BLOCK_C if ARG else 1], NO_TOKEN, tl.int32)  # [BT, BC]
    # Each row of the tile has a sum of its own, so that the loop reduces nothing over threads.
    for start in range(begin, end, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)  # [BT]
        is_used = t < end
        if ORDERED:
            t = tl.load(order_ptr + row * T + t, mask=is_used, other=0)
        if HOLES:
            is_used &= tl.load(segment_ptr + row * T + t, mask=is_used, other=-1) == s
        at = (row * T + t)[:, None] * C + c[None, :]  # [BT, BC]
        x = tl.load(x_ptr + at, mask=is_used[:, None] & inside[None, :], other=fill).to(tl.float32)
        if REDUCTION == MAX:
            index = tl.where(is_used, t, NO_TOKEN)[:, None]  # [BT, 1]
            total, tokens = _larger(x, index, total, tokens, ARG)
        else:
            total += x
    total, token = _reduce(total, tokens, REDUCTION, ARG)  # [BC]
    # A segment in one part has its result; a longer one leaves a part in float32.
    if FINAL:
        count = _count(count_ptr, row, s, T, S, L, COUNTED)
        at = (row * S + s) * C + c
        _finish(total, token, count, out_ptr, arg_ptr, at, inside, REDUCTION, ARG)
    else:
        at = (row * PIECES + piece) * C + c
        tl.store(out_ptr + at, total, mask=inside)
        if ARG:
            tl.store(arg_ptr + at, token, mask=inside)


@triton.jit
def combine_kernel(
    part_ptr, token_ptr, first_ptr, number_ptr, count_ptr,  # [B, PIECES, C] twice, [B, S] thrice
    T, S, L, PIECES, PER, out_ptr, arg_ptr,  # [B, S, C] twice
    C: tl.constexpr, REDUCTION: tl.constexpr, ARG: tl.constexpr, TABLE: tl.constexpr, COUNTED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The results `[B, S, C]` from their parts `[B, PIECES, C]`, those of a segment one after the other."""
    blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    s = pid // blocks % S
    row = (pid // (blocks * S)).to(tl.int64)
    c = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)  # [BC]
    inside = c < C
    # The parts of this segment, in the order of its tokens.
    if TABLE == PARTS:
        begin = tl.load(first_ptr + row * S + s)
        end = begin + tl.load(number_ptr + row * S + s)
    else:
        begin = s * PER
        end = begin + PER
    fill: tl.constexpr = float("-inf") if REDUCTION == MAX else 0.0
    total = tl.full([BLOCK_T, BLOCK_C], fill, tl.float32)  # [BT, BC]
    tokens = tl.full([BLOCK_T, BLOCK_C if ARG else 1], NO_TOKEN, tl.int32)  # [BT, BC]
    for start in range(begin, end, BLOCK_T):
        p = start + tl.arange(0, BLOCK_T)  # [BT]
        at = (row * PIECES + p)[:, None] * C + c[None, :]  # [BT, BC]
        is_used = (p < end)[:, None] & inside[None, :]  # [BT, BC]
        x = tl.load(part_ptr + at, mask=is_used, other=fill)  # [BT, BC]
        if REDUCTION == MAX:
            if ARG:
                index = tl.load(token_ptr + at, mask=is_used, other=NO_TOKEN)  # [BT, BC]
            else:
                index = tokens
            total, tokens = _larger(x, index, total, tokens, ARG)
        else:
            total += x
    total, token = _reduce(total, tokens, REDUCTION, ARG)  # [BC]
    count = _count(count_ptr, row, s, T, S, L, COUNTED)
    _finish(total, token, count, out_ptr, arg_ptr, (row * S + s) * C + c, inside, REDUCTION, ARG)


@triton.jit
def write_kernel(
    dout_ptr, segment_ptr, count_ptr, last_ptr, arg_ptr, T, S, L, TILES,  # [B, S, C], [B, T], [B, S] twice, [B, S, C]
    dx_ptr,  # [B, T, C]
    C: tl.constexpr, REDUCTION: tl.constexpr, COUNTED: tl.constexpr, SHARED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`dx [B, T, C]`. With `SHARED`, all tokens of a program are in one segment."""
    blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    tile = pid // blocks % TILES
    row = (pid // (blocks * TILES)).to(tl.int64)
    c = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)  # [BC]
    inside = c < C
    if C % BLOCK_C == 0:
        inside = tl.full([BLOCK_C], 1, tl.int1)
    # The segment of each token; all have one if the row is cut evenly.
    if SHARED:
        per = tl.cdiv(L, BLOCK_T)
        s = tl.full([1], 0, tl.int32) + tile // per  # [1]
        begin = tile // per * L
        t = begin + tile % per * BLOCK_T + tl.arange(0, BLOCK_T)  # [BT]
        exists = t < tl.minimum(begin + L, T)
        is_used = tl.full([1], 1, tl.int1)
    else:
        t = tile * BLOCK_T + tl.arange(0, BLOCK_T)  # [BT]
        exists = t < T
        if COUNTED:
            s = tl.load(segment_ptr + row * T + t, mask=exists, other=-1)  # [BT]
        else:
            s = t // L
        is_used = exists & (s >= 0)
    # From here, a tile of segments has one row with `SHARED`.
    at = (row * S + s)[:, None] * C + c[None, :]  # [BT, BC]
    seen = is_used[:, None] & inside[None, :]  # [BT, BC]
    dx = tl.load(dout_ptr + at, mask=seen, other=0.0).to(tl.float32)  # [BT, BC]
    # What of its segment's gradient a token takes.
    if REDUCTION == MEAN:
        if COUNTED:
            count = tl.load(count_ptr + row * S + s, mask=is_used, other=1)  # [BT]
        else:
            count = tl.minimum(s * L + L, T) - s * L
        dx *= (1.0 / count.to(tl.float32))[:, None]
    if REDUCTION == LAST:
        if COUNTED:
            last = tl.load(last_ptr + row * S + s, mask=is_used, other=-1)  # [BT]
        else:
            last = tl.minimum(s * L + L, T) - 1
        dx = tl.where((last == t)[:, None], dx, 0.0)  # [BT, BC]
    if REDUCTION == MAX:
        arg = tl.load(arg_ptr + at, mask=seen, other=-1)  # [BT, BC]
        dx = tl.where(arg == t[:, None], dx, 0.0)
    dx = tl.broadcast_to(dx.to(dx_ptr.dtype.element_ty), [BLOCK_T, BLOCK_C])
    tl.store(dx_ptr + (row * T + t)[:, None] * C + c[None, :], dx, mask=exists[:, None] & inside[None, :])
