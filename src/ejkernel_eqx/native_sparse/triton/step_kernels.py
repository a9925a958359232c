"""The Triton kernels of a step of decoding: few queries over many keys, each key read once for all heads of a group. Scores are in units of log2.

`[R]` are the queries: `QUERIES` for each sequence, some of which may not be there. A branch's keys are split over programs; a part without keys is
minus infinity in `lse`, and its sum is not written.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...launch.constants import LOG2E
from ...paged.triton.decode_kernel import splits_of
from ...paged.triton.tile import FILLED, load_keys, load_pages, locate, rest_of
from .choice_kernels import GROUPS
from .kernels import page_rows, rows_of, with_scores
from .step_choice import Choice, choose_blocks, SCORE_ROW


class Heads(NamedTuple):
    """Query heads, key heads, query heads of a key head, and channels of keys and values; the last three also padded."""

    H: tl.constexpr
    K: tl.constexpr
    D: tl.constexpr
    V: tl.constexpr
    G: tl.constexpr
    GP: tl.constexpr
    BLOCK_D: tl.constexpr
    BLOCK_V: tl.constexpr


class Scoring(NamedTuple):
    """Says how products become scores."""

    SCALE: tl.constexpr
    PRECISION: tl.constexpr


class Batch(NamedTuple):
    """Pointers to the sequences of a batch, and the number of its tokens."""

    q_start: Any  # [N]
    q_len: Any  # [N]
    kv_len: Any  # [N]
    T: Any


class Pages(NamedTuple):
    """Pages, a sequence's row of their table, and the key head that is read."""

    k: Any  # [P, PAGE, K, D]
    v: Any  # [P, PAGE, K, V]
    table: Any  # [M]
    P: Any
    kv: Any


@triton.jit
def query_of(r, batch, QUERIES: tl.constexpr):
    """Of query `r`: its token, or -1 if it is not there, its sequence, and its position, -1 if it sees nothing."""
    n = r // QUERIES
    i = r % QUERIES
    q_len = tl.load(batch.q_len + n)
    token = tl.load(batch.q_start + n) + i
    last = tl.load(batch.kv_len + n) - q_len + i
    token = tl.where((i < q_len) & (token >= 0) & (token < batch.T), token, -1)
    return token, n.to(tl.int64), tl.where(token >= 0, tl.maximum(last, -1), -1)


@triton.jit
def load_query(q_ptr, token, kv, heads):
    """The heads of a group `[GP, BLOCK_D]`; of the first token for a query that is not there."""
    own = tl.minimum(tl.arange(0, heads.GP), heads.G - 1)  # [GP]
    base = q_ptr + (tl.maximum(token, 0).to(tl.int64) * heads.H + kv * heads.G) * heads.D
    return rows_of(base, own, heads.D, heads.D, heads.BLOCK_D)


@triton.jit
def clear_outputs(token, rest, out_ptr, heads):
    """Stores 0 for tokens of no sequence."""
    c = tl.arange(0, heads.BLOCK_V)  # [BLOCK_V]
    nothing = tl.zeros([FILLED, heads.BLOCK_V], out_ptr.dtype.element_ty)
    for h in tl.range(0, heads.H):  # pyright: ignore[reportGeneralTypeIssues]
        to = (token.to(tl.int64) * heads.H + h)[:, None] * heads.V + c[None, :]
        tl.store(out_ptr + to, nothing, mask=rest[:, None] & (c < heads.V)[None, :])


@triton.jit
def clear_blocks(token, rest, indices_ptr, NUMBERS: tl.constexpr):
    """Stores -1 for the blocks of tokens of no sequence."""
    for c in tl.range(0, NUMBERS):  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(indices_ptr + token.to(tl.int64) * NUMBERS + c, token * 0 - 1, mask=rest)


@triton.jit
def _store_part(part_ptr, lse_ptr, acc, total, top, r, kv, split, heads, SPLITS: tl.constexpr):
    """Stores the mean of values `[GP, BLOCK_V]` and the log-sum-exp `[GP]` of one split of a branch."""
    g = tl.arange(0, heads.GP)  # [GP]
    real = g < heads.G
    some = total > 0  # [GP]
    safe = tl.where(some, total, 1.0)
    to = (r.to(tl.int64) * heads.H + kv * heads.G + g) * SPLITS + split  # [GP]
    c = tl.arange(0, heads.BLOCK_V)[None, :]
    tl.store(lse_ptr + to, tl.where(some, top + tl.log2(safe), float("-inf")), mask=real)
    inside = (real & some)[:, None] & (c < heads.V)
    tl.store(part_ptr + to[:, None] * heads.V + c, acc / safe[:, None], mask=inside)


@triton.jit
def attend(q, pages, scores_ptr, first, end, split, WIDTH, heads, scoring, PAGE: tl.constexpr,
           FAR: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, SCORES: tl.constexpr):  # fmt: skip
    """The sum of values, denominators and maxima of one split of the keys `first .. end`; with `SCORES`, their scores are stored, `[G, WIDTH *
    SCORE_ROW]` from `first` on."""
    acc = tl.zeros([heads.GP, heads.BLOCK_V], tl.float32)  # [GP, BLOCK_V]
    total = tl.zeros([heads.GP], tl.float32)  # [GP]
    top = tl.full([heads.GP], float("-inf"), tl.float32)  # [GP]
    lo, hi, size = splits_of(first, end, BK, SPLITS, 1)
    lo += split * size
    hi = tl.minimum(lo + size, hi)
    g = tl.arange(0, heads.GP)[:, None]  # [GP, 1]
    # Page numbers are loaded one tile ahead, so that loads of keys do not wait for them.
    page = load_pages(pages.table, lo, end, PAGE, BK)
    for tile in tl.range(lo, hi):  # pyright: ignore[reportGeneralTypeIssues]
        j, slot, ok = locate(page, tile, first, end, pages.P, PAGE, BK, FAR)
        page = load_pages(pages.table, tile + 1, end, PAGE, BK)
        k = load_keys(pages.k, slot, ok, pages.kv, heads.K, heads.D, heads.BLOCK_D, True)  # [BK, BLOCK_D]
        v = load_keys(pages.v, slot, ok, pages.kv, heads.K, heads.V, heads.BLOCK_V, True)  # [BK, BLOCK_V]
        s = tl.dot(q, tl.trans(k), input_precision=scoring.PRECISION) * (scoring.SCALE * LOG2E)  # [GP, BK]
        s = tl.where(ok[None, :], s, float("-inf"))
        if SCORES:
            inside = (j >= first) & (j < end)  # [BK]
            to = scores_ptr + g * (WIDTH * SCORE_ROW) + (j - first)[None, :]
            tl.store(to, s, mask=(g < heads.G) & inside[None, :])
        acc, total, top = with_scores(acc, total, top, s, v, scoring.PRECISION)
    return acc, total, top


@triton.jit
def compressed_keys(last, limit, FIRST: tl.constexpr, REACH: tl.constexpr, STRIDE: tl.constexpr):
    """The number of compressed keys that a query sees, of slots from `FIRST` up to `limit`, and the end of their slots."""
    count = tl.maximum(tl.minimum((last + 1) // STRIDE - (REACH - 1), limit - FIRST), 0)
    return count, tl.where(count > 0, FIRST + count, 0)  # a table may end before the first slot


@triton.jit
def compressed_step_kernel(
    q_ptr, compressed_k_ptr, compressed_v_ptr, small_table_ptr, q_start_ptr, q_len_ptr, kv_len_ptr,
    T, SMALL_M, P_SMALL, WIDTH,
    part_ptr, part_lse_ptr, scores_ptr,  # float32 [R, H, SPLITS, V], [R, H, SPLITS], [R, K, G, WIDTH * SCORE_ROW]
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, SMALL_PAGE: tl.constexpr, SMALL_FAR: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, FIRST: tl.constexpr, REACH: tl.constexpr,
    STRIDE: tl.constexpr, CHOOSES: tl.constexpr,
):  # fmt: skip
    """The compressed branch, and with `CHOOSES` the scores of its keys."""
    heads: tl.constexpr = Heads(H, K, D, V, G, GP, BLOCK_D, BLOCK_V)  # pyright: ignore[reportAssignmentType]
    scoring: tl.constexpr = Scoring(SCALE, PRECISION)  # pyright: ignore[reportAssignmentType]
    pid = tl.program_id(0)
    kv = pid % K
    split = pid // K % SPLITS
    r = pid // (K * SPLITS)
    token, n, last = query_of(r, Batch(q_start_ptr, q_len_ptr, kv_len_ptr, T), QUERIES)  # pyright: ignore[reportGeneralTypeIssues]
    _, end = compressed_keys(last, SMALL_M * SMALL_PAGE, FIRST, REACH, STRIDE)
    q = load_query(q_ptr, token, kv, heads)  # [GP, BLOCK_D]
    scores = scores_ptr + (r * K + kv).to(tl.int64) * (G * WIDTH * SCORE_ROW)
    pages = Pages(compressed_k_ptr, compressed_v_ptr, small_table_ptr + n * SMALL_M, P_SMALL, kv)
    acc, total, top = attend(q, pages, scores, FIRST, end, split, WIDTH, heads, scoring, SMALL_PAGE, SMALL_FAR, BLOCK_K, SPLITS, CHOOSES)  # fmt: skip
    _store_part(part_ptr, part_lse_ptr, acc, total, top, r, kv, split, heads, SPLITS)


@triton.jit
def sliding_step_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, q_start_ptr, q_len_ptr, kv_len_ptr, scores_ptr, compressed_lse_ptr,
    T, N_SEQUENCES, R, M, P, WIDTH, BLOCKS, SMALL_M,
    part_ptr, part_lse_ptr, indices_ptr, keys_ptr,  # float32 [R, H, SPLITS, V], [R, H, SPLITS], int32 [T, K, N], [R, K, BLOCK_M + 32]
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, N: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PAGE: tl.constexpr, FAR: tl.constexpr, SMALL_PAGE: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr, QUERIES: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    CHOOSES: tl.constexpr, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, FIRST: tl.constexpr, REACH: tl.constexpr,
    STRIDE: tl.constexpr, BS: tl.constexpr, BLOCK_M: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The sliding branch, and with `CHOOSES` beside it the choice, which reads little and takes long: so the memory is not idle."""
    heads: tl.constexpr = Heads(H, K, D, V, G, GP, BLOCK_D, BLOCK_V)  # pyright: ignore[reportAssignmentType]
    scoring: tl.constexpr = Scoring(SCALE, PRECISION)  # pyright: ignore[reportAssignmentType]
    pid = tl.program_id(0)
    each: tl.constexpr = SPLITS + CHOOSES  # programs of a query and key head
    if CHOOSES:
        if pid >= R * K * each:
            token, rest = rest_of(pid - R * K * each, q_start_ptr, q_len_ptr, N_SEQUENCES, T, QUERIES)  # pyright: ignore[reportGeneralTypeIssues]
            clear_blocks(token, rest, indices_ptr, K * N)
            return
    kv = pid % K
    split = pid // K % each - CHOOSES
    r = pid // (K * each)
    token, n, last = query_of(r, Batch(q_start_ptr, q_len_ptr, kv_len_ptr, T), QUERIES)  # pyright: ignore[reportGeneralTypeIssues]
    if split >= 0:
        first = tl.maximum(last - (WINDOW - 1), 0)
        end = tl.minimum(last + 1, M * PAGE)
        q = load_query(q_ptr, token, kv, heads)  # [GP, BLOCK_D]
        pages = Pages(k_ptr, v_ptr, table_ptr + n * M, P, kv)
        acc, total, top = attend(q, pages, scores_ptr, first, end, split, WIDTH, heads, scoring, PAGE, FAR, BLOCK_K, SPLITS, False)  # fmt: skip
        _store_part(part_ptr, part_lse_ptr, acc, total, top, r, kv, split, heads, SPLITS)
    elif token >= 0:
        count, _ = compressed_keys(last, SMALL_M * SMALL_PAGE, FIRST, REACH, STRIDE)
        row = (r * K + kv).to(tl.int64)
        to = indices_ptr + (token.to(tl.int64) * K + kv) * N
        choose_blocks(scores_ptr, compressed_lse_ptr, keys_ptr + row * (BLOCK_M + GROUPS), to, row, count, last, BLOCKS, WIDTH,
                      Choice(N, BS, BLOCK_M, REACH, STRIDE, G, HEADS, PARTS, BLOCK_PARTS))  # fmt: skip


@triton.jit
def _part_of_block(chosen, part, end, pages, last, M, BS: tl.constexpr, EACH: tl.constexpr, BK: tl.constexpr,
                   PAGE: tl.constexpr):  # fmt: skip
    """The slots of `BK` keys of a chosen block, as `locate` has them, and which of them the query sees; a block has `EACH` such parts, and those from
    `end` on are not read."""
    index = tl.load(chosen + part // EACH, mask=part < end, other=-1)
    begin = tl.maximum(index, 0) * BS + part % EACH * BK
    column = tl.arange(0, BK)  # [BK]
    j = begin + column
    seen = (j <= last) & (index >= 0)
    if BS % BK:
        seen &= part % EACH * BK + column < BS
    if PAGE % BK == 0 and BS % BK == 0:  # one page, whose number is loaded once
        first, there = page_rows(pages.table, begin, index >= 0, M, pages.P, PAGE)  # pyright: ignore[reportGeneralTypeIssues]
        return first, column, seen & there
    else:
        rows, seen = page_rows(pages.table, j, seen, M, pages.P, PAGE)  # pyright: ignore[reportGeneralTypeIssues]
        return rows, tl.zeros([BK], tl.int32), seen


@triton.jit
def attend_blocks(q, pages, chosen, last, lo, hi, M, heads, scoring, BS: tl.constexpr, PAGE: tl.constexpr,
                  EACH: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """The sum of values, denominators and maxima of the chosen blocks `lo .. hi`, each in `EACH` parts of up to `BK` keys."""
    acc = tl.zeros([heads.GP, heads.BLOCK_V], tl.float32)  # [GP, BLOCK_V]
    total = tl.zeros([heads.GP], tl.float32)  # [GP]
    top = tl.full([heads.GP], float("-inf"), tl.float32)  # [GP]
    # Numbers of blocks and pages are loaded one part ahead, so that loads of keys do not wait for them.
    start, within, seen = _part_of_block(chosen, lo * EACH, hi * EACH, pages, last, M, BS, EACH, BK, PAGE)
    for part in tl.range(lo * EACH, hi * EACH):  # pyright: ignore[reportGeneralTypeIssues]
        slot = (start, within)
        k = load_keys(pages.k, slot, seen, pages.kv, heads.K, heads.D, heads.BLOCK_D, True)  # [BK, BLOCK_D]
        v = load_keys(pages.v, slot, seen, pages.kv, heads.K, heads.V, heads.BLOCK_V, True)  # [BK, BLOCK_V]
        s = tl.dot(q, tl.trans(k), input_precision=scoring.PRECISION) * (scoring.SCALE * LOG2E)  # [GP, BK]
        s = tl.where(seen[None, :], s, float("-inf"))
        start, within, seen = _part_of_block(chosen, part + 1, hi * EACH, pages, last, M, BS, EACH, BK, PAGE)
        acc, total, top = with_scores(acc, total, top, s, v, scoring.PRECISION)
    return acc, total, top


@triton.jit
def selected_step_kernel(
    q_ptr, k_ptr, v_ptr, indices_ptr, table_ptr, q_start_ptr, q_len_ptr, kv_len_ptr,
    T, M, P,
    part_ptr, part_lse_ptr,  # float32 [R, H, SPLITS, V], [R, H, SPLITS]
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, N: tl.constexpr, BS: tl.constexpr, G: tl.constexpr,
    GP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PAGE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    QUERIES: tl.constexpr, SPLITS: tl.constexpr, SPAN: tl.constexpr, EACH: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The selected branch, `SPAN` blocks a program, each in `EACH` parts of up to `BK` keys."""
    heads: tl.constexpr = Heads(H, K, D, V, G, GP, BLOCK_D, BLOCK_V)  # pyright: ignore[reportAssignmentType]
    scoring: tl.constexpr = Scoring(SCALE, PRECISION)  # pyright: ignore[reportAssignmentType]
    pid = tl.program_id(0)
    kv = pid % K
    split = pid // K % SPLITS
    r = pid // (K * SPLITS)
    token, n, last = query_of(r, Batch(q_start_ptr, q_len_ptr, kv_len_ptr, T), QUERIES)  # pyright: ignore[reportGeneralTypeIssues]
    q = load_query(q_ptr, token, kv, heads)  # [GP, BLOCK_D]
    chosen = indices_ptr + (tl.maximum(token, 0).to(tl.int64) * K + kv) * N
    lo = split * SPAN
    pages = Pages(k_ptr, v_ptr, table_ptr + n * M, P, kv)
    hi = tl.minimum(lo + SPAN, N)
    acc, total, top = attend_blocks(q, pages, chosen, last, lo, hi, M, heads, scoring, BS, PAGE, EACH, BK)
    _store_part(part_ptr, part_lse_ptr, acc, total, top, r, kv, split, heads, SPLITS)


@triton.jit
def _gated(part_ptr, lse_ptr, gate_ptr, row, V: tl.constexpr, BLOCK_V: tl.constexpr, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr):  # fmt: skip
    """A branch `[BLOCK_V]` under its gate; 0 if it has no keys, whatever its gate."""
    gate = tl.load(gate_ptr).to(tl.float32)
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
    sliding_lse_ptr,  # [T, H, 3], [N] twice, and of each branch [R, H, PARTS, V], [R, H, PARTS]
    T, N_SEQUENCES, R,
    out_ptr,  # [T, H, V]
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, QUERIES: tl.constexpr, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, CHOSEN_PARTS: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr, NEAR_PARTS: tl.constexpr, BLOCK_NEAR: tl.constexpr,
):  # fmt: skip
    """One head of a query a program: the parts of each branch, and the sum of the branches under their gates. Tokens of no sequence are 0."""
    heads: tl.constexpr = Heads(H, K, D, V, G, GP, BLOCK_D, BLOCK_V)  # pyright: ignore[reportAssignmentType]
    pid = tl.program_id(0)
    c = tl.arange(0, BLOCK_V)  # [BLOCK_V]
    if pid >= R * H:
        token, rest = rest_of(pid - R * H, q_start_ptr, q_len_ptr, N_SEQUENCES, T, QUERIES)  # pyright: ignore[reportGeneralTypeIssues]
        if tl.max(rest.to(tl.int32), axis=0) > 0:  # usually there are none
            clear_outputs(token, rest, out_ptr, heads)
        return
    h = pid % H
    r = pid // H
    n = r // QUERIES
    i = r % QUERIES
    token = tl.load(q_start_ptr + n) + i
    if (i >= tl.load(q_len_ptr + n)) | (token < 0) | (token >= T):
        return
    to = token.to(tl.int64) * H + h
    row = r.to(tl.int64) * H + h
    gates = gates_ptr + to * 3
    total = _gated(compressed_part_ptr, compressed_lse_ptr, gates, row, V, BLOCK_V, PARTS, BLOCK_PARTS)
    total += _gated(
        selected_part_ptr, selected_lse_ptr, gates + 1, row, V, BLOCK_V, CHOSEN_PARTS, BLOCK_CHOSEN
    )
    total += _gated(sliding_part_ptr, sliding_lse_ptr, gates + 2, row, V, BLOCK_V, NEAR_PARTS, BLOCK_NEAR)
    tl.store(out_ptr + to * V + c, total.to(out_ptr.dtype.element_ty), mask=c < V)
