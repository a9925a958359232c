"""The Triton kernels of the selected branch. Its products have the heads of a group as rows (`GP` of them, `G` real), so each chosen block is read
once for all. Scores are in units of log2."""

import triton
import triton.language as tl

from ...launch.constants import LN2, LOG2E


@triton.jit
def page_rows(table_ptr, j, seen, M, P, PAGE: tl.constexpr):
    """Returns where the keys `j` of a sequence are among the rows of all pages, and which of those that are `seen` have a page."""
    number = j // PAGE
    page = tl.load(table_ptr + number, mask=seen & (number < M), other=-1)
    return page.to(tl.int64) * PAGE + j % PAGE, seen & (page >= 0) & (page < P)


@triton.jit
def _block(
    indices_ptr, begin_ptr, at, b, last, S, M, BS: tl.constexpr, BLOCK_S: tl.constexpr, PACKED: tl.constexpr
):
    """The keys `[BLOCK_S]` of a chosen block and which of them the query sees. The others are replaced by one in bounds, so loads need no mask."""
    index = tl.load(indices_ptr + at)
    if PACKED:
        begin = tl.load(begin_ptr + b * M + tl.maximum(index, 0))
    else:
        begin = index * BS
    column = tl.arange(0, BLOCK_S)
    j = begin + column
    last = tl.minimum(last, S - 1)
    seen = (j <= last) & (index >= 0)
    if BS != BLOCK_S:
        seen &= column < BS
    return tl.maximum(tl.minimum(j, last), 0), seen


@triton.jit
def rows_where(base, rows, there, width: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Works as `rows_of`, but 0 for those that are not `there`, which are not read."""
    c = tl.arange(0, BLOCK_C)[None, :]
    at = base + rows[:, None].to(tl.int64) * width + c
    if C == BLOCK_C:
        return tl.load(at, mask=there[:, None], other=0.0)
    return tl.load(at, mask=there[:, None] & (c < C), other=0.0)


@triton.jit
def rows_of(base, rows, width: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Rows `[len(rows), BLOCK_C]` of `C` channels, `width` apart; all are in bounds."""
    c = tl.arange(0, BLOCK_C)[None, :]
    at = base + rows[:, None].to(tl.int64) * width + c
    if C == BLOCK_C:
        return tl.load(at)
    return tl.load(at, mask=c < C, other=0.0)


@triton.jit
def query_position(t_of_call, position_ptr, b, T, offset, PLACED: tl.constexpr):
    """The position of a query among the keys."""
    if PLACED:
        return tl.load(position_ptr + b * T + t_of_call)
    return t_of_call + offset


@triton.jit
def with_scores(acc, total, top, s, v, PRECISION: tl.constexpr):
    """The sum of values `[GP, BLOCK_V]`, denominators and maxima `[GP]` after keys with scores `s`, minus infinity where unseen."""
    new_top = tl.maximum(top, tl.max(s, axis=1))  # [GP]
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # [GP]
    p = tl.exp2(s - shift[:, None])  # [GP, keys]
    alpha = tl.exp2(top - shift)  # [GP]
    total = total * alpha + tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, total, new_top


@triton.jit
def _with_keys(acc, total, top, q, k, v, seen, SCALE: tl.constexpr, PRECISION: tl.constexpr):
    """Does the same for the keys of a block, of which some are `seen`."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (SCALE * LOG2E)  # [GP, BLOCK_S]
    s = tl.where(seen[None, :], s, float("-inf"))
    return with_scores(acc, total, top, s, v, PRECISION)


@triton.jit
def _store(out_ptr, lse_ptr, acc, total, top, row, kv, b, split, T, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr,
           GP: tl.constexpr, BLOCK_V: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """`out` and `lse` of the heads of a group at query `row = b * T + t`, or, with splits, those of some of its blocks as `merge_blocks_kernel` reads
    them."""
    heads = tl.arange(0, GP)  # [GP]
    real = heads < G
    some = total > 0  # [GP]
    acc = tl.where(some[:, None], acc / tl.where(some, total, 1.0)[:, None], 0.0)
    lse = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))  # [GP]
    if SPLITS > 1:
        to = (((b * K + kv) * T + row % T) * SPLITS + split) * G + heads
        place = to
    else:
        to = row * H + kv * G + heads
        place = (b * H + kv * G + heads) * T + row % T
        lse = lse * LN2
    c = tl.arange(0, BLOCK_V)[None, :]
    tl.store(out_ptr + to[:, None] * V + c, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & (c < V))
    tl.store(lse_ptr + place, lse, mask=real)


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, indices_ptr, position_ptr, begin_ptr,  # [B, T, H, D], [B, S, K, D], [B, S, K, V], [B, T, K, N], [B, T], [B, M]
    T, S, M, offset, out_ptr, lse_ptr,  # [B, T, H, V], [B, H, T]
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, N: tl.constexpr, BS: tl.constexpr, BLOCK_S: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, SCALE: tl.constexpr, PLACED: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, SPLITS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The heads of one group at one query a program, or with splits `SPAN` of its blocks; online softmax over blocks."""
    # All queries of a key head first: its keys may fit the cache where those of all heads do not.
    pid = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    rows = tl.num_programs(0) // (K * SPLITS)
    kv = pid // rows
    row = (pid % rows).to(tl.int64)  # b * T + t
    b = row // T
    last = query_position((row % T).to(tl.int32), position_ptr, b, T, offset, PLACED)
    own = tl.minimum(tl.arange(0, GP), G - 1)  # [GP]
    q = rows_of(q_ptr + (row * H + kv * G) * D, own, D, D, BLOCK_D)  # [GP, BLOCK_D]
    k_base = k_ptr + (b * S * K + kv) * D
    v_base = v_ptr + (b * S * K + kv) * V
    acc = tl.zeros([GP, BLOCK_V], tl.float32)  # [GP, BLOCK_V]
    total = tl.zeros([GP], tl.float32)  # [GP]
    top = tl.full([GP], float("-inf"), tl.float32)  # [GP]
    for n in tl.range(split * SPAN, tl.minimum(split * SPAN + SPAN, N)):
        at = (row * K + kv) * N + n
        j, seen = _block(indices_ptr, begin_ptr, at, b, last, S, M, BS, BLOCK_S, PACKED)  # [BLOCK_S]
        k = rows_of(k_base, j, K * D, D, BLOCK_D)  # [BLOCK_S, BLOCK_D]
        v = rows_of(v_base, j, K * V, V, BLOCK_V)  # [BLOCK_S, BLOCK_V]
        acc, total, top = _with_keys(acc, total, top, q, k, v, seen, SCALE, PRECISION)
    _store(out_ptr, lse_ptr, acc, total, top, row, kv, b, split, T, H, K, V, G, GP, BLOCK_V, SPLITS)


@triton.jit
def page_forward_kernel(
    q_ptr, k_ptr, v_ptr, indices_ptr, position_ptr, table_ptr,  # [T, H, D], [P, PAGE, K, D], [P, PAGE, K, V], [T, K, N], [T], [T, M]
    T, M, P, out_ptr, lse_ptr,  # [T, H, V], [H, T]
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, N: tl.constexpr, BS: tl.constexpr, BLOCK_S: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, SCALE: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr, SPLITS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Works as `forward_kernel`, on the pages that the query's row of the table names. Position -1 for a token of no sequence."""
    split = tl.program_id(0) % SPLITS
    pid = tl.program_id(0) // SPLITS
    kv = pid % K
    row = (pid // K).to(tl.int64)  # t
    last = tl.load(position_ptr + row)
    own = tl.minimum(tl.arange(0, GP), G - 1)  # [GP]
    q = rows_of(q_ptr + (row * H + kv * G) * D, own, D, D, BLOCK_D)  # [GP, BLOCK_D]
    acc = tl.zeros([GP, BLOCK_V], tl.float32)  # [GP, BLOCK_V]
    total = tl.zeros([GP], tl.float32)  # [GP]
    top = tl.full([GP], float("-inf"), tl.float32)  # [GP]
    column = tl.arange(0, BLOCK_S)  # [BLOCK_S]
    for n in tl.range(split * SPAN, tl.minimum(split * SPAN + SPAN, N)):
        index = tl.load(indices_ptr + (row * K + kv) * N + n)
        begin = tl.maximum(index, 0) * BS
        j = begin + column
        seen = (j <= last) & (index >= 0)
        if BS != BLOCK_S:
            seen &= column < BS
        if PAGE % BS == 0 and BS == BLOCK_S:  # one page, whose number is loaded once
            first, there = page_rows(table_ptr + row * M, begin, index >= 0, M, P, PAGE)
            r = first + column
            seen &= there
        else:
            r, seen = page_rows(table_ptr + row * M, j, seen, M, P, PAGE)
        k = rows_where(k_ptr + kv * D, r, seen, K * D, D, BLOCK_D)  # [BLOCK_S, BLOCK_D]
        v = rows_where(v_ptr + kv * V, r, seen, K * V, V, BLOCK_V)  # [BLOCK_S, BLOCK_V]
        acc, total, top = _with_keys(acc, total, top, q, k, v, seen, SCALE, PRECISION)
    _store(out_ptr, lse_ptr, acc, total, top, row, kv, 0, split, T, H, K, V, G, GP, BLOCK_V, SPLITS)


@triton.jit
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, indices_ptr, position_ptr, begin_ptr,  # lse (of log2) and delta [B, H, T]
    T, S, M, offset, dq_ptr,  # [B, T, H, D] float32
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, N: tl.constexpr, BS: tl.constexpr, BLOCK_S: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, SCALE: tl.constexpr, PLACED: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`dq` of the heads of one group at one query a program."""
    # All queries of a key head first: its keys may fit the cache where those of all heads do not.
    pid = tl.program_id(0)
    rows = tl.num_programs(0) // K
    kv = pid // rows
    row = (pid % rows).to(tl.int64)  # b * T + t
    b = row // T
    last = query_position((row % T).to(tl.int32), position_ptr, b, T, offset, PLACED)
    heads = tl.arange(0, GP)  # [GP]
    real = heads < G
    own = tl.minimum(heads, G - 1)
    q = rows_of(q_ptr + (row * H + kv * G) * D, own, D, D, BLOCK_D)  # [GP, BLOCK_D]
    do = rows_of(do_ptr + (row * H + kv * G) * V, own, V, V, BLOCK_V)  # [GP, BLOCK_V]
    at = (b * H + kv * G + own) * T + row % T
    lse = tl.load(lse_ptr + at)  # [GP]
    delta = tl.load(delta_ptr + at)  # [GP]
    k_base = k_ptr + (b * S * K + kv) * D
    v_base = v_ptr + (b * S * K + kv) * V
    dq = tl.zeros([GP, BLOCK_D], tl.float32)  # [GP, BLOCK_D]
    for n in tl.range(0, N):
        j, seen = _block(  # pyright: ignore[reportGeneralTypeIssues]
            indices_ptr, begin_ptr, (row * K + kv) * N + n, b, last, S, M, BS, BLOCK_S, PACKED
        )  # [BLOCK_S]
        k = rows_of(k_base, j, K * D, D, BLOCK_D)  # [BLOCK_S, BLOCK_D]
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (SCALE * LOG2E)  # [GP, BLOCK_S]
        v = rows_of(v_base, j, K * V, V, BLOCK_V)  # [BLOCK_S, BLOCK_V]
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # [GP, BLOCK_S]
        p = tl.exp2(s - lse[:, None])  # [GP, BLOCK_S]
        ds = tl.where(seen[None, :], p * (dp - delta[:, None]), 0.0)  # [GP, BLOCK_S]
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    # A query that sees nothing may hold NaN.
    dq = tl.where((lse < float("inf"))[:, None], dq * SCALE, 0.0)
    c = tl.arange(0, BLOCK_D)[None, :]
    tl.store(dq_ptr + (row * H + kv * G + heads)[:, None] * D + c, dq, mask=real[:, None] & (c < D))


@triton.jit
def key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, position_ptr, begin_ptr,
    pairs_ptr, owner_ptr, from_ptr, to_ptr,  # [B * K * T * N], [B * K, PIECES] thrice
    T, S, M, PIECES, offset, dk_ptr, dv_ptr,  # [B, K, PIECES, BS, D], [B, K, PIECES, BS, V] float32
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, N: tl.constexpr, BS: tl.constexpr, BLOCK_S: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, SCALE: tl.constexpr, PLACED: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """A part of the gradient of one block of keys: from some of the queries that chose it, `TOKENS` of them at a time."""
    pid = tl.program_id(0).to(tl.int64)  # (b * K + kv) * PIECES + piece
    kv = (pid // PIECES) % K
    b = pid // PIECES // K
    block = tl.load(owner_ptr + pid)
    lo = tl.load(from_ptr + pid)
    hi = tl.load(to_ptr + pid)
    if PACKED:
        begin = tl.load(begin_ptr + b * M + block)
    else:
        begin = block * BS
    column = tl.arange(0, BLOCK_S)  # [BLOCK_S]
    j = begin + column
    safe = tl.minimum(j, S - 1)
    if hi > lo:
        # Keys of the block that no query sees, and those beyond it, may hold NaN; `lo .. hi` are in the order of queries.
        newest = tl.load(pairs_ptr + hi - 1) // N
        latest = query_position(newest, position_ptr, b, T, offset, PLACED)
        safe = tl.maximum(tl.minimum(safe, latest), 0)
    k = rows_of(k_ptr + (b * S * K + kv) * D, safe, K * D, D, BLOCK_D)  # [BLOCK_S, BLOCK_D]
    v = rows_of(v_ptr + (b * S * K + kv) * V, safe, K * V, V, BLOCK_V)  # [BLOCK_S, BLOCK_V]
    dk = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)  # [BLOCK_S, BLOCK_D]
    dv = tl.zeros([BLOCK_S, BLOCK_V], tl.float32)  # [BLOCK_S, BLOCK_V]
    r = tl.arange(0, TOKENS * GP)  # [R], tokens by heads
    head = kv * G + tl.minimum(r % GP, G - 1)
    for n in tl.range(lo, hi, TOKENS):
        at = n + r // GP
        t = tl.load(pairs_ptr + tl.minimum(at, hi - 1)) // N  # [R]
        real = (at < hi) & (r % GP < G)
        q = rows_of(q_ptr, (b * T + t) * H + head, D, D, BLOCK_D)  # [R, BLOCK_D]
        do = rows_of(do_ptr, (b * T + t) * H + head, V, V, BLOCK_V)  # [R, BLOCK_V]
        stat = (b * H + head) * T + t
        lse = tl.load(lse_ptr + stat)  # [R]
        delta = tl.load(delta_ptr + stat)  # [R]
        last = query_position(t, position_ptr, b, T, offset, PLACED)
        seen = (j[:, None] <= last[None, :]) & real[None, :]  # [BLOCK_S, R]
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (SCALE * LOG2E)  # [BLOCK_S, R]
        p = tl.where(seen, tl.exp2(s - lse[None, :]), 0.0)  # [BLOCK_S, R]
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)  # [BLOCK_S, R]
        ds = p * (dp - delta[None, :])  # [BLOCK_S, R]
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    inside = (column < BS)[:, None]
    c = tl.arange(0, BLOCK_D)[None, :]
    tl.store(dk_ptr + (pid * BS + column)[:, None] * D + c, dk * SCALE, mask=inside & (c < D))
    c = tl.arange(0, BLOCK_V)[None, :]
    tl.store(dv_ptr + (pid * BS + column)[:, None] * V + c, dv, mask=inside & (c < V))


@triton.jit
def combine_kernel(
    part_ptr, piece_ptr, PIECES, M, whole_ptr,  # [R, PIECES, SIZE], [R, M + 1], [R, M, SIZE]
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of a block's parts, in their order."""
    tiles: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    pid = tl.program_id(0).to(tl.int64)
    c = (pid % tiles) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    block = pid // tiles
    row = block // M
    at = row * (M + 1) + block % M
    lo = tl.load(piece_ptr + at)
    hi = tl.load(piece_ptr + at + 1)
    total = tl.zeros([BLOCK], tl.float32)  # [BLOCK]
    for p in tl.range(lo, hi):
        total += tl.load(part_ptr + (row * PIECES + p) * SIZE + c, mask=c < SIZE, other=0.0)
    tl.store(whole_ptr + block * SIZE + c, total, mask=c < SIZE)


@triton.jit
def importance_kernel(
    q_ptr, k_ptr, lse_ptr, start_ptr, end_ptr,  # [B, T, H, D], [B, C, K, D], [B, H, T] of log2, [B, T] twice
    T, C, chunk, length, importance_ptr,  # [B, K, length, C]
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, G: tl.constexpr, BLOCK_D: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The weights of compressed keys, summed over the heads of a group, for queries `chunk .. chunk + length`. Unseen ones are 0, or in tiles that no
    query sees not written."""
    columns = tl.cdiv(C, BLOCK_K)
    tiles = tl.cdiv(length, BLOCK_Q)
    pid = tl.program_id(0)
    first = pid % columns * BLOCK_K
    own = pid // columns % tiles * BLOCK_Q + tl.arange(0, BLOCK_Q)  # [BQ], in the chunk
    t = chunk + own
    kv = pid // (columns * tiles) % K
    b = (pid // (columns * tiles * K)).to(tl.int64)
    inside = own < length
    start = tl.load(start_ptr + b * T + t, mask=inside, other=0)  # [BQ]
    end = tl.load(end_ptr + b * T + t, mask=inside, other=0)  # [BQ]
    if tl.max(end, axis=0) > first:
        c = first + tl.arange(0, BLOCK_K)  # [BK]
        seen = (start[:, None] <= c[None, :]) & (c[None, :] < end[:, None])  # [BQ, BK]
        k = rows_of(k_ptr + (b * C * K + kv) * D, tl.minimum(c, C - 1), K * D, D, BLOCK_D)  # [BK, BLOCK_D]
        total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)  # [BQ, BK]
        safe = tl.minimum(t, T - 1)
        for g in tl.range(0, G):
            q = rows_of(q_ptr + (b * T * H + kv * G + g) * D, safe, H * D, D, BLOCK_D)  # [BQ, BLOCK_D]
            lse = tl.load(lse_ptr + (b * H + kv * G + g) * T + safe)  # [BQ]
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (SCALE * LOG2E)  # [BQ, BK]
            total += tl.exp2(s - lse[:, None])
        # All heads of a query see the same keys. Sums over others may be NaN.
        total = tl.where(seen, total, 0.0)
        at = ((b * K + kv) * length + own)[:, None] * C + c[None, :]
        tl.store(importance_ptr + at, total, mask=inside[:, None] & (c < C)[None, :])


@triton.jit
def page_importance_kernel(
    q_ptr, k_ptr, table_ptr, lse_ptr, end_ptr,  # [T, H, D], [P, PAGE, K, D], [T, M], [H, T] of log2, [T]
    T, M, P, C, chunk, length, importance_ptr,  # [K, length, C]
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, BLOCK_D: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr, PAGE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Works as `importance_kernel`, on pages of compressed keys. A program has one query, so that all keys are those of its sequence. What is
    stored for the unused first slots of a sequence, which may hold NaN, is read by none: the choice begins at `start`."""
    columns = tl.cdiv(C, BLOCK_K)
    pid = tl.program_id(0)
    first = pid % columns * BLOCK_K
    kv = pid // columns % K
    own = (pid // (columns * K)).to(tl.int64)  # in the chunk
    t = chunk + own
    end = tl.load(end_ptr + t)
    if first < end:
        c = first + tl.arange(0, BLOCK_K)  # [BK]
        r, seen = page_rows(table_ptr + t * M, c, c < end, M, P, PAGE)
        k = rows_where(k_ptr + kv * D, r, seen, K * D, D, BLOCK_D)  # [BK, BLOCK_D]
        heads = tl.arange(0, GP)  # [GP]
        safe = kv * G + tl.minimum(heads, G - 1)
        q = rows_of(q_ptr + t * H * D, safe, D, D, BLOCK_D)  # [GP, BLOCK_D]
        lse = tl.load(lse_ptr + safe * T + t)  # [GP]
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (SCALE * LOG2E)  # [GP, BK]
        p = tl.where((heads < G)[:, None] & seen[None, :], tl.exp2(s - lse[:, None]), 0.0)
        tl.store(importance_ptr + (kv * length + own) * C + c, tl.sum(p, axis=0), mask=c < C)
