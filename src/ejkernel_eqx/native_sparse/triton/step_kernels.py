"""The Triton kernels of a step of decoding: few queries over many keys, each key read once for all heads of a group. Scores are in units of log2.

`[R]` are the queries: those of rows, or `QUERIES` for each sequence of a batch over pages, some of which may not be there. Dense keys are pages whose
table is constant. A branch's keys are split over programs; a part without keys is minus infinity in `lse`, and its sum is not written.
"""

import triton
import triton.language as tl

from ...launch.constants import LOG2E
from ...paged.triton.decode_kernel import splits_of
from ...paged.triton.tile import FILLED, load_keys, load_pages, locate, rest_of
from .choice_kernels import GROUPS
from .kernels import page_rows, rows_of, with_scores
from .step_choice import choose_blocks, SCORE_ROW


@triton.jit
def query_of(r, position_ptr, q_start_ptr, q_len_ptr, kv_len_ptr, T, offset, PAGED: tl.constexpr, PLACED: tl.constexpr,
             QUERIES: tl.constexpr):  # fmt: skip
    """Of query `r`: its token, or -1 if it is not there, the row of its table, and its position, -1 if it sees nothing."""
    if PAGED:
        n = r // QUERIES
        i = r % QUERIES
        q_len = tl.load(q_len_ptr + n)
        token = tl.load(q_start_ptr + n) + i
        last = tl.load(kv_len_ptr + n) - q_len + i
        token = tl.where((i < q_len) & (token >= 0) & (token < T), token, -1)
    else:
        n = r // T
        token = r
        if PLACED:
            last = tl.load(position_ptr + r)
        else:
            last = r % T + offset
    return token, n.to(tl.int64), tl.where(token >= 0, tl.maximum(last, -1), -1)


@triton.jit
def load_query(q_ptr, token, kv, H: tl.constexpr, D: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """The heads of a group `[GP, BLOCK_D]`; of the first token for a query that is not there."""
    own = tl.minimum(tl.arange(0, GP), G - 1)  # [GP]
    return rows_of(q_ptr + (tl.maximum(token, 0).to(tl.int64) * H + kv * G) * D, own, D, D, BLOCK_D)


@triton.jit
def _store_part(part_ptr, lse_ptr, acc, total, top, r, kv, split, H: tl.constexpr, V: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
                BLOCK_V: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    heads = tl.arange(0, GP)  # [GP]
    some = total > 0  # [GP]
    safe = tl.where(some, total, 1.0)
    to = (r.to(tl.int64) * H + kv * G + heads) * SPLITS + split  # [GP]
    c = tl.arange(0, BLOCK_V)[None, :]
    tl.store(lse_ptr + to, tl.where(some, top + tl.log2(safe), float("-inf")), mask=heads < G)
    tl.store(
        part_ptr + to[:, None] * V + c, acc / safe[:, None], mask=((heads < G) & some)[:, None] & (c < V)
    )


@triton.jit
def attend(q, k_ptr, v_ptr, table_ptr, scores_ptr, first, end, split, kv, P, WIDTH,
            K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, PAGE: tl.constexpr, FAR: tl.constexpr,
            BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BK: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
            SPLITS: tl.constexpr, SCORES: tl.constexpr):  # fmt: skip
    """The sum of values, denominators and maxima of one split of the keys `first .. end`; with `SCORES`, their scores are stored, `[G, WIDTH *
    SCORE_ROW]` from `first` on."""
    acc = tl.zeros([GP, BLOCK_V], tl.float32)  # [GP, BLOCK_V]
    total = tl.zeros([GP], tl.float32)  # [GP]
    top = tl.full([GP], float("-inf"), tl.float32)  # [GP]
    lo, hi, size = splits_of(first, end, BK, SPLITS, 1)
    lo += split * size
    hi = tl.minimum(lo + size, hi)
    heads = tl.arange(0, GP)[:, None]  # [GP, 1]
    # Page numbers are loaded one tile ahead, so that loads of keys do not wait for them.
    page = load_pages(table_ptr, lo, end, PAGE, BK)
    for tile in tl.range(lo, hi):  # pyright: ignore[reportGeneralTypeIssues]
        j, slot, ok = locate(page, tile, first, end, P, PAGE, BK, FAR)
        page = load_pages(table_ptr, tile + 1, end, PAGE, BK)
        k = load_keys(k_ptr, slot, ok, kv, K, D, BLOCK_D, True)  # [BK, BLOCK_D]
        v = load_keys(v_ptr, slot, ok, kv, K, V, BLOCK_V, True)  # [BK, BLOCK_V]
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (SCALE * LOG2E)  # [GP, BK]
        s = tl.where(ok[None, :], s, float("-inf"))
        if SCORES:
            inside = (j >= first) & (j < end)  # [BK]
            tl.store(
                scores_ptr + heads * (WIDTH * SCORE_ROW) + (j - first)[None, :],
                s,
                mask=(heads < G) & inside[None, :],
            )
        acc, total, top = with_scores(acc, total, top, s, v, PRECISION)
    return acc, total, top


@triton.jit
def compressed_count(last, limit, FIRST: tl.constexpr, REACH: tl.constexpr, STRIDE: tl.constexpr):
    """How many compressed keys a query sees, of slots from `FIRST` up to `limit`."""
    return tl.maximum(tl.minimum((last + 1) // STRIDE - (REACH - 1), limit - FIRST), 0)


@triton.jit
def compressed_step_kernel(
    q_ptr, compressed_k_ptr, compressed_v_ptr, small_table_ptr, position_ptr, q_start_ptr, q_len_ptr, kv_len_ptr,
    T, SMALL_M, P_SMALL, WIDTH, offset,
    part_ptr, part_lse_ptr, scores_ptr,  # float32 [R, H, SPLITS, V], [R, H, SPLITS], [R, K, G, WIDTH * SCORE_ROW]
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, SMALL_PAGE: tl.constexpr, SMALL_FAR: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    PAGED: tl.constexpr, PLACED: tl.constexpr, QUERIES: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, FIRST: tl.constexpr,
    REACH: tl.constexpr, STRIDE: tl.constexpr, CHOOSES: tl.constexpr,
):  # fmt: skip
    """The compressed branch, and with `CHOOSES` the scores of its keys."""
    pid = tl.program_id(0)
    kv = pid % K
    split = pid // K % SPLITS
    r = pid // (K * SPLITS)
    token, n, last = query_of(r, position_ptr, q_start_ptr, q_len_ptr, kv_len_ptr, T, offset, PAGED, PLACED, QUERIES)  # pyright: ignore[reportGeneralTypeIssues]  # fmt: skip
    count = compressed_count(last, SMALL_M * SMALL_PAGE, FIRST, REACH, STRIDE)
    end = tl.where(count > 0, FIRST + count, 0)  # a table may end before the first slot
    q = load_query(q_ptr, token, kv, H, D, G, GP, BLOCK_D)  # [GP, BLOCK_D]
    scores = scores_ptr + (r * K + kv).to(tl.int64) * (G * WIDTH * SCORE_ROW)
    acc, total, top = attend(
        q, compressed_k_ptr, compressed_v_ptr, small_table_ptr + n * SMALL_M, scores, FIRST, end, split, kv, P_SMALL, WIDTH,
        K, D, V, G, GP, SMALL_PAGE, SMALL_FAR, BLOCK_D, BLOCK_V, BLOCK_K, SCALE, PRECISION, SPLITS, CHOOSES)  # fmt: skip
    _store_part(part_ptr, part_lse_ptr, acc, total, top, r, kv, split, H, V, G, GP, BLOCK_V, SPLITS)


@triton.jit
def sliding_step_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, position_ptr, q_start_ptr, q_len_ptr, kv_len_ptr, scores_ptr, compressed_lse_ptr,
    T, N_SEQUENCES, R, M, P, WIDTH, BLOCKS, SMALL_M, offset,
    part_ptr, part_lse_ptr, indices_ptr, keys_ptr,  # float32 [R, H, SPLITS, V], [R, H, SPLITS], int32 [T, K, N], [R, K, BLOCK_M + 32]
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, N: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PAGE: tl.constexpr, FAR: tl.constexpr, SMALL_PAGE: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr, PAGED: tl.constexpr, PLACED: tl.constexpr, QUERIES: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, CHOOSES: tl.constexpr, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    FIRST: tl.constexpr, REACH: tl.constexpr, STRIDE: tl.constexpr, BS: tl.constexpr, BLOCK_M: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The sliding branch, and with `CHOOSES` beside it the choice, which reads little and takes long: so the memory is not idle."""
    pid = tl.program_id(0)
    each: tl.constexpr = SPLITS + CHOOSES  # programs of a query and key head
    if CHOOSES and PAGED:
        if pid >= R * K * each:
            token, rest = rest_of(pid - R * K * each, q_start_ptr, q_len_ptr, N_SEQUENCES, T, QUERIES)  # pyright: ignore[reportGeneralTypeIssues]
            for c in tl.range(0, K * N):
                tl.store(indices_ptr + token.to(tl.int64) * (K * N) + c, token * 0 - 1, mask=rest)
            return
    kv = pid % K
    split = pid // K % each - CHOOSES
    r = pid // (K * each)
    token, n, last = query_of(r, position_ptr, q_start_ptr, q_len_ptr, kv_len_ptr, T, offset, PAGED, PLACED, QUERIES)  # pyright: ignore[reportGeneralTypeIssues]  # fmt: skip
    if split >= 0:
        first = tl.maximum(last - (WINDOW - 1), 0)
        end = tl.minimum(last + 1, M * PAGE)
        q = load_query(q_ptr, token, kv, H, D, G, GP, BLOCK_D)  # [GP, BLOCK_D]
        acc, total, top = attend(
            q, k_ptr, v_ptr, table_ptr + n * M, scores_ptr, first, end, split, kv, P, WIDTH,
            K, D, V, G, GP, PAGE, FAR, BLOCK_D, BLOCK_V, BLOCK_K, SCALE, PRECISION, SPLITS, False)  # fmt: skip
        _store_part(part_ptr, part_lse_ptr, acc, total, top, r, kv, split, H, V, G, GP, BLOCK_V, SPLITS)
    elif token >= 0:
        count = compressed_count(last, SMALL_M * SMALL_PAGE, FIRST, REACH, STRIDE)
        row = (r * K + kv).to(tl.int64)
        choose_blocks(
            scores_ptr, compressed_lse_ptr, keys_ptr + row * (BLOCK_M + GROUPS), indices_ptr + (token.to(tl.int64) * K + kv) * N, row, count,
            last, BLOCKS, WIDTH, N, G, HEADS, PARTS, BLOCK_PARTS, REACH, STRIDE, BS, BLOCK_M)  # fmt: skip


@triton.jit
def _part_of_block(indices_ptr, part, end, table_ptr, last, M, P, BS: tl.constexpr, EACH: tl.constexpr, BK: tl.constexpr,
                   PAGE: tl.constexpr):  # fmt: skip
    """The slots of `BK` keys of a chosen block, as `locate` has them, and which of them the query sees; a block has `EACH` such parts, and those from
    `end` on are not read."""
    index = tl.load(indices_ptr + part // EACH, mask=part < end, other=-1)
    begin = tl.maximum(index, 0) * BS + part % EACH * BK
    column = tl.arange(0, BK)  # [BK]
    j = begin + column
    seen = (j <= last) & (index >= 0)
    if BS % BK:
        seen &= part % EACH * BK + column < BS
    if PAGE % BK == 0 and BS % BK == 0:  # one page, whose number is loaded once
        first, there = page_rows(table_ptr, begin, index >= 0, M, P, PAGE)  # pyright: ignore[reportGeneralTypeIssues]
        return first, column, seen & there
    else:
        rows, seen = page_rows(table_ptr, j, seen, M, P, PAGE)  # pyright: ignore[reportGeneralTypeIssues]
        return rows, tl.zeros([BK], tl.int32), seen


@triton.jit
def attend_blocks(q, k_ptr, v_ptr, chosen, table, last, lo, hi, kv, M, P, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
                  BS: tl.constexpr, GP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PAGE: tl.constexpr,
                  SCALE: tl.constexpr, PRECISION: tl.constexpr, EACH: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """The sum of values, denominators and maxima of the chosen blocks `lo .. hi`, each in `EACH` parts of up to `BK` keys."""
    acc = tl.zeros([GP, BLOCK_V], tl.float32)  # [GP, BLOCK_V]
    total = tl.zeros([GP], tl.float32)  # [GP]
    top = tl.full([GP], float("-inf"), tl.float32)  # [GP]
    # Numbers of blocks and pages are loaded one part ahead, so that loads of keys do not wait for them.
    start, within, seen = _part_of_block(chosen, lo * EACH, hi * EACH, table, last, M, P, BS, EACH, BK, PAGE)
    for part in tl.range(lo * EACH, hi * EACH):  # pyright: ignore[reportGeneralTypeIssues]
        k = load_keys(k_ptr, (start, within), seen, kv, K, D, BLOCK_D, True)  # [BK, BLOCK_D]
        v = load_keys(v_ptr, (start, within), seen, kv, K, V, BLOCK_V, True)  # [BK, BLOCK_V]
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (SCALE * LOG2E)  # [GP, BK]
        s = tl.where(seen[None, :], s, float("-inf"))
        start, within, seen = _part_of_block(
            chosen, part + 1, hi * EACH, table, last, M, P, BS, EACH, BK, PAGE
        )
        acc, total, top = with_scores(acc, total, top, s, v, PRECISION)
    return acc, total, top


@triton.jit
def selected_step_kernel(
    q_ptr, k_ptr, v_ptr, indices_ptr, table_ptr, position_ptr, q_start_ptr, q_len_ptr, kv_len_ptr,
    T, M, P, offset,
    part_ptr, part_lse_ptr,  # float32 [R, H, SPLITS, V], [R, H, SPLITS]
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, N: tl.constexpr, BS: tl.constexpr, G: tl.constexpr,
    GP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PAGE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    PAGED: tl.constexpr, PLACED: tl.constexpr, QUERIES: tl.constexpr, SPLITS: tl.constexpr, SPAN: tl.constexpr, EACH: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """The selected branch, `SPAN` blocks a program, each in `EACH` parts of up to `BK` keys."""
    pid = tl.program_id(0)
    kv = pid % K
    split = pid // K % SPLITS
    r = pid // (K * SPLITS)
    token, n, last = query_of(r, position_ptr, q_start_ptr, q_len_ptr, kv_len_ptr, T, offset, PAGED, PLACED, QUERIES)  # pyright: ignore[reportGeneralTypeIssues]  # fmt: skip
    q = load_query(q_ptr, token, kv, H, D, G, GP, BLOCK_D)  # [GP, BLOCK_D]
    chosen = indices_ptr + (tl.maximum(token, 0).to(tl.int64) * K + kv) * N
    acc, total, top = attend_blocks(
        q, k_ptr, v_ptr, chosen, table_ptr + n * M, last, split * SPAN, tl.minimum(split * SPAN + SPAN, N), kv, M, P,
        K, D, V, BS, GP, BLOCK_D, BLOCK_V, PAGE, SCALE, PRECISION, EACH, BK)  # fmt: skip
    _store_part(part_ptr, part_lse_ptr, acc, total, top, r, kv, split, H, V, G, GP, BLOCK_V, SPLITS)


@triton.jit
def _gated(part_ptr, lse_ptr, gate, row, V: tl.constexpr, BLOCK_V: tl.constexpr, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr):  # fmt: skip
    """A branch `[BLOCK_V]` under its gate; 0 if it has no keys, whatever its gate."""
    s = tl.arange(0, BLOCK_PARTS)  # [PARTS]
    c = tl.arange(0, BLOCK_V)[None, :]
    at = row * PARTS + s
    lse = tl.load(lse_ptr + at, mask=s < PARTS, other=float("-inf"))  # [PARTS]
    top = tl.max(lse, axis=0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))  # [PARTS]
    total = tl.sum(weight, axis=0)
    # Those without keys, which may hold anything, are loaded too, as loads that wait for no other one are in flight together.
    part = tl.load(part_ptr + at[:, None] * V + c, mask=(s < PARTS)[:, None] & (c < V), other=0.0)
    part = tl.where((lse > float("-inf"))[:, None], part, 0.0)
    factor = tl.where(total > 0, gate / tl.where(total > 0, total, 1.0), 0.0)
    return tl.sum(part * weight[:, None], axis=0) * factor


@triton.jit
def combine_step_kernel(
    gates_ptr, q_start_ptr, q_len_ptr, compressed_part_ptr, compressed_lse_ptr, selected_part_ptr, selected_lse_ptr, sliding_part_ptr,
    sliding_lse_ptr,  # [T, H, 3], and of each branch [R, H, PARTS, V], [R, H, PARTS]
    T, N_SEQUENCES, R,
    out_ptr,  # [T, H, V]
    H: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, PAGED: tl.constexpr, QUERIES: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, CHOSEN_PARTS: tl.constexpr, BLOCK_CHOSEN: tl.constexpr, NEAR_PARTS: tl.constexpr,
    BLOCK_NEAR: tl.constexpr,
):  # fmt: skip
    """One head of a query a program: the parts of each branch, and the sum of the branches under their gates. Tokens of no sequence are 0."""
    pid = tl.program_id(0)
    c = tl.arange(0, BLOCK_V)  # [BLOCK_V]
    if PAGED:
        if pid >= R * H:
            token, rest = rest_of(pid - R * H, q_start_ptr, q_len_ptr, N_SEQUENCES, T, QUERIES)  # pyright: ignore[reportGeneralTypeIssues]
            if tl.max(rest.to(tl.int32), axis=0) > 0:
                nothing = tl.zeros([FILLED, BLOCK_V], out_ptr.dtype.element_ty)
                for h in tl.range(0, H):
                    to = (token.to(tl.int64) * H + h)[:, None] * V + c[None, :]
                    tl.store(out_ptr + to, nothing, mask=rest[:, None] & (c < V)[None, :])
            return
    h = pid % H
    r = pid // H
    token = r
    if PAGED:
        n = r // QUERIES
        i = r % QUERIES
        token = tl.load(q_start_ptr + n) + i
        if (i >= tl.load(q_len_ptr + n)) | (token < 0) | (token >= T):
            return
    to = token.to(tl.int64) * H + h
    row = r.to(tl.int64) * H + h
    gate = gates_ptr + to * 3
    total = _gated(
        compressed_part_ptr,
        compressed_lse_ptr,
        tl.load(gate).to(tl.float32),
        row,
        V,
        BLOCK_V,
        PARTS,
        BLOCK_PARTS,
    )
    total += _gated(
        selected_part_ptr,
        selected_lse_ptr,
        tl.load(gate + 1).to(tl.float32),
        row,
        V,
        BLOCK_V,
        CHOSEN_PARTS,
        BLOCK_CHOSEN,
    )
    total += _gated(
        sliding_part_ptr,
        sliding_lse_ptr,
        tl.load(gate + 2).to(tl.float32),
        row,
        V,
        BLOCK_V,
        NEAR_PARTS,
        BLOCK_NEAR,
    )
    tl.store(out_ptr + to * V + c, total.to(out_ptr.dtype.element_ty), mask=c < V)
