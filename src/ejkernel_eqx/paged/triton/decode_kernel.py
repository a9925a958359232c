"""Decoding in Triton, for sequences with few queries: splits the keys of a sequence over several programs and merges their results.

The keys of a program depend only on its own sequence and on static numbers, so the results of a sequence do not depend on the others. A launch
takes a few microseconds, so what counts is how many loads wait for another one: lengths, then page numbers and queries, then keys.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from ...launch import NOTHING, Options, result
from ...launch.constants import LN2, LOG2E
from ...launch.sizes import cdiv, padded
from . import tile
from .call import Call
from .last import is_last, merge_splits, MOST_MERGED, Partials
from .latent_bytes import attend_bytes, half_queries
from .pairs import attend_pairs, PAIRS_OF, RAISED, split_queries
from .tile_sizes import MOST_PAIR_ROWS, pairs_fit

_MERGING = ("zeros_ptr", "count_ptr", "parts_ptr", "part_lse_ptr", "ROWS", "BLOCK_S", "STEP")


@triton.jit
def splits_of(first, end, BK: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr):
    """The first tile and the end of the tiles that hold keys `first .. end`, and the tiles per split."""
    lo = first // BK
    hi = tl.maximum(tl.cdiv(end, BK), lo)
    return lo, hi, tl.maximum(tl.cdiv(hi - lo, SPLITS), LEAST)


@triton.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, rope_ptr,  # [T, H, D + R], [P, PAGE, K, D], [P, PAGE, K, V], [P, PAGE, K, R]
    table_ptr, q_start_ptr, q_len_ptr, kv_len_ptr, kv_start_ptr,  # [N, M], [N] each
    k_scale_ptr, v_scale_ptr, rope_scale_ptr,  # [P, PAGE, K] or, as all that follow, of a row of sequences: [K]
    sinks_ptr, slopes_ptr, qq_bias_ptr, gates_ptr, own_gates_ptr,  # [H], [H], [Q, Q], [P, PAGE, H, 2], [T, H, 2]
    zeros_ptr, P, M, N, Q, ROW, T, LONGEST,
    # If the last program merges: counts (zeros, in place), out and lse of splits, [N, QUERIES, H, SPLITS, V], [N, QUERIES, H, SPLITS].
    count_ptr, parts_ptr, part_lse_ptr,
    q_half_ptr,  # with BYTES, queries of each program: [programs, BM, D + R]
    out_ptr, lse_ptr,  # [T, H, V], [T, H] or, if another kernel merges, as of splits
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, FAR: tl.constexpr,
    MOST: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    LATENT: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, R_SCALES: tl.constexpr, SCALE: tl.constexpr,
    CAP: tl.constexpr, FAST_TANH: tl.constexpr, LEFT: tl.constexpr, RANGED: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr,
    QQ: tl.constexpr, GATES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr, ALONE: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, PAIRS: tl.constexpr, BYTES: tl.constexpr, FAST_BYTES: tl.constexpr,
    TOGETHER: tl.constexpr, ROWS: tl.constexpr, BLOCK_S: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (QUERIES * (H // K) + BM - 1) // BM
    raised: tl.constexpr = RAISED if PAIRS or BYTES else 0  # pyright: ignore[reportAssignmentType]
    program = tl.program_id(0)
    # Without another kernel that merges, further programs fill in the remaining tokens.
    if SPLITS == 1 or TOGETHER:
        if program >= N * (blocks * K * SPLITS):
            tile.fill_rest(program - N * (blocks * K * SPLITS), q_start_ptr, q_len_ptr, out_ptr, lse_ptr, N, T, LONGEST, H, V)  # fmt: skip
            return
    # A program takes `BM` rows of one sequence and key head, and one split of its keys.
    row = program % blocks * BM
    kv_head = program // blocks % K
    split = program // (blocks * K) % SPLITS
    n = (program // (blocks * K * SPLITS)).to(tl.int64)

    # The keys that its queries see, and the tiles of this split among them. All that says whether there is something to do is loaded before any of
    # it decides, since a load after a branch waits for the loads before it.
    start = tl.load(q_start_ptr + n)
    queries, chunk, first, end = tile.sequence(  # pyright: ignore[reportGeneralTypeIssues]
        n, q_len_ptr, kv_len_ptr, kv_start_ptr, M, PAGE, MOST, LEFT, RANGED)  # fmt: skip
    lo, hi, size = splits_of(first, end, BK, SPLITS, LEAST)
    used = 1
    if TOGETHER:
        used = tl.maximum(tl.cdiv(hi - lo, size), 1)  # of a sequence without keys, too, one program stores the result  # fmt: skip
    valid = (row < queries * (H // K)) & (start < T) & (start + queries > 0)
    if not ALONE:
        valid &= queries <= QUERIES  # another kernel takes longer sequences
    busy = valid
    if SPLITS > 1:
        lo += split * size
        if TOGETHER:
            busy &= split < used
        else:
            busy &= lo < hi
        hi = tl.minimum(lo + size, hi)
    t, h = tile.query_rows(row, kv_head, H, K, BM)  # [BM] each
    token = start + t  # [BM]
    inside = valid & (t < queries) & (token >= 0) & (token < T)  # [BM]
    if not busy:
        if SPLITS > 1 and not TOGETHER:  # to the merge, minus infinity says that there are no keys
            target = ((n * QUERIES + t) * H + h) * SPLITS + split  # [BM]
            tl.store(lse_ptr + target, tl.full([BM], float("-inf"), tl.float32), mask=inside)
        return

    # Page numbers are loaded one tile ahead, so that loads of keys do not wait for them.
    table = table_ptr + n * M
    page = tile.load_pages(table, lo, end, PAGE, BK)
    q_factor = 1.0
    q = tile.load_queries(q_ptr, token, h, inside, 0, D, BLOCK_D, D + R, H, WIDE)  # [BM, BLOCK_D]
    q_rope = q
    if R > 0:
        q_rope = tile.load_queries(q_ptr, token, h, inside, D, R, BLOCK_R, D + R, H, WIDE)  # [BM, BLOCK_R]
    if BYTES:
        memory = q_half_ptr + program.to(tl.int64) * (BM * (D + R))
        q, half_rope, q_factor = half_queries(q, q_rope, memory, D, R, BM, BLOCK_D, BLOCK_R)  # pyright: ignore[reportGeneralTypeIssues]
        if R_SCALES != 0:
            q_rope = half_rope
    # Constants that travel together, for the functions that add a tile.
    sizes: tl.constexpr = tile.Sizes(D, V, R, BLOCK_D, BLOCK_V, BLOCK_R, BM, BK)  # pyright: ignore[reportAssignmentType]
    form: tl.constexpr = tile.Format(K, LATENT, K_SCALES, V_SCALES, R_SCALES, FAST_BYTES)  # pyright: ignore[reportAssignmentType]
    scoring: tl.constexpr = tile.Scoring(SCALE, CAP, FAST_TANH, LEFT, ALIBI, QQ, PRECISION, GATES)  # pyright: ignore[reportAssignmentType]
    i = (chunk + t)[:, None]  # [BM, 1]
    # Slopes, scales for each head and the bias are those of a row of sequences.
    small = n // ROW
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + small * H + h)[:, None] * LOG2E  # [BM, 1]
    gates, own, rest = tile.own_gates(gates_ptr, own_gates_ptr, token, h, inside, GATES)  # pyright: ignore[reportGeneralTypeIssues]
    pages = tile.Pages(k_ptr, v_ptr, rope_ptr, k_scale_ptr, v_scale_ptr, rope_scale_ptr, kv_head)
    factors = tile.head_factors(pages, small, form, R)
    v_factor = factors.v  # []

    # The state of the online softmax: sums of values, the largest score and the sum of weights.
    if PAIRS:
        q_even, q_odd, q_factor = split_queries(q, BM, BLOCK_D)  # [BM, BLOCK_D / 2] twice, [BM]
        acc = tl.zeros([BM, BLOCK_V // 2], tl.float32)  # [BM, BLOCK_V / 2]
        acc_odd = tl.zeros([BM, BLOCK_V // 2], tl.float32)  # [BM, BLOCK_V / 2]
    else:
        acc = tl.zeros([BM, BLOCK_V], tl.float32)  # [BM, BLOCK_V]
    top = tl.full([BM], float("-inf"), tl.float32)  # [BM]
    total = tl.zeros([BM], tl.float32)  # [BM]

    # One tile of keys after the other, by the function for the format of the pages.
    for index in tl.range(lo, hi):
        j, slot, ok = tile.locate(page, index, first, end, P, PAGE, BK, FAR)
        page = tile.load_pages(table, index + 1, end, PAGE, BK)
        keys = tile.Keys(j, slot, ok)
        rows = tile.Queries(i, t[:, None], slope, chunk, qq_bias_ptr + small * Q * Q, Q, gates, own, rest)
        if PAIRS:
            acc, acc_odd, total, top = attend_pairs(
                acc, acc_odd, total, top, q_even, q_odd, q_factor, q_rope, keys, rows, pages, factors, sizes, form, scoring, PAIRS)  # fmt: skip
        elif BYTES:
            acc, total, top = attend_bytes(
                acc, total, top, q, q_rope, q_factor, index * BK < end, keys, rows, pages, factors, sizes, form, scoring)  # fmt: skip
        else:
            acc, total, top = tile.attend_tile(
                acc, total, top, q, q_rope, keys, rows, pages, factors, sizes, form, scoring, True)  # fmt: skip

    # out = acc / total, lse = top + log2(total): for the sequence or, in units of log2, for the split and its merge.
    if PAIRS:
        acc = tl.interleave(acc, acc_odd)  # [BM, BLOCK_V]
    # A sink is a key without a value; with splits, the merge adds it once.
    if SINKS and SPLITS == 1:
        sink = tl.load(sinks_ptr + small * H + h) * LOG2E  # [BM]
        new_top = tl.maximum(top, sink)  # [BM]
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # [BM]
        part = tl.exp2(top - shift)  # [BM]
        total = total * part + tl.exp2(sink - shift + raised)  # [BM]
        v_factor = v_factor * part  # [BM]
        top = new_top
    some = total != 0  # [BM]
    acc = acc * (v_factor / tl.where(some, total, 1.0))[:, None]  # [BM, BLOCK_V]
    lse = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))  # [BM]
    if raised:
        lse -= raised
    if SPLITS == 1:
        target = token.to(tl.int64) * H + h  # [BM]
        lse = lse * LN2
    else:
        target = ((n * QUERIES + t) * H + h) * SPLITS + split  # [BM]
    c = tl.arange(0, BLOCK_V)  # [BLOCK_V]
    to_ptr = parts_ptr if TOGETHER else out_ptr
    to_lse_ptr = part_lse_ptr if TOGETHER else lse_ptr
    tl.store(to_ptr + (target * V)[:, None] + c[None, :], acc.to(to_ptr.dtype.element_ty),
             mask=inside[:, None] & (c < V)[None, :])  # [BM, BLOCK_V]  # fmt: skip
    tl.store(to_lse_ptr + target, lse, mask=inside)
    # Whichever program of the sequence ends last merges the splits of all.
    if TOGETHER:
        if is_last(count_ptr + (n * K + kv_head) * blocks + row // BM, used):
            parts: tl.constexpr = Partials(QUERIES, SPLITS, ROWS, BLOCK_S, STEP)  # pyright: ignore[reportAssignmentType]
            merge_splits(row, kv_head, n, used, queries, start, T, sinks_ptr + small * H, parts_ptr, part_lse_ptr, out_ptr, lse_ptr,
                         parts, H, K, V, BLOCK_V, SINKS)  # fmt: skip


@triton.jit
def merge_kernel(
    q_start_ptr, q_len_ptr, sinks_ptr, parts_ptr, part_lse_ptr,  # the last two: out and lse of the splits
    N, ROW, T, LONGEST,
    out_ptr, lse_ptr,  # [T, H, V], [T, H]
    H: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, SINKS: tl.constexpr, QUERIES: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    # One program for each sequence, query and head, and further programs for tokens of no sequence.
    program = tl.program_id(0)
    if program >= N * (H * QUERIES):
        tile.fill_rest(
            program - N * (H * QUERIES), q_start_ptr, q_len_ptr, out_ptr, lse_ptr, N, T, LONGEST, H, V
        )
        return
    h = program % H
    t = program // H % QUERIES
    n = (program // (H * QUERIES)).to(tl.int64)
    token = tl.load(q_start_ptr + n) + t
    queries = tl.load(q_len_ptr + n)
    mine = (t < queries) & (queries <= QUERIES) & (token >= 0) & (token < T)
    # With one query a sequence, hardly any program is idle: none branches, so that no load waits for another one.
    if QUERIES > 1:
        if not mine:
            return
    # Splits without keys have stored minus infinity for lse, and no result.
    at = ((n * QUERIES + t) * H + h) * SPLITS
    s = tl.arange(0, BLOCK_S)  # [BLOCK_S]
    c = tl.arange(0, BLOCK_V)  # [BLOCK_V]
    lse = tl.load(part_lse_ptr + at + s, mask=s < SPLITS, other=float("-inf"))  # [BLOCK_S]
    if STEP == BLOCK_S:
        part = tl.load(parts_ptr + ((at + s) * V)[:, None] + c[None, :], mask=(s < SPLITS)[:, None] & (c < V)[None, :],
                       other=0.0)  # [BLOCK_S, BLOCK_V]  # fmt: skip

    # Their weights, exp(lse - top), and the sum of all weights including the sink's.
    top = tl.max(lse, axis=0)  # []
    sink = float("-inf")
    if SINKS:
        sink = tl.load(sinks_ptr + n // ROW * H + h) * LOG2E
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(lse - top)  # [BLOCK_S]
    total = tl.sum(weights, axis=0)  # []
    if SINKS:
        total += tl.exp2(sink - top)
    # out = sum of weight * part, `STEP` splits at a time.
    if STEP == BLOCK_S:
        part = tl.where((lse > float("-inf"))[:, None], part, 0.0)  # [BLOCK_S, BLOCK_V]
        acc = tl.sum(weights[:, None] * part, axis=0)  # [BLOCK_V]
    else:
        acc = tl.zeros([BLOCK_V], tl.float32)  # [BLOCK_V]
        for begin in tl.range(0, SPLITS, STEP):
            r = begin + tl.arange(0, STEP)  # [STEP]
            part_lse = tl.load(part_lse_ptr + at + r, mask=r < SPLITS, other=float("-inf"))  # [STEP]
            part = tl.load(parts_ptr + ((at + r) * V)[:, None] + c[None, :],
                           mask=(part_lse > float("-inf"))[:, None] & (c < V)[None, :], other=0.0)  # [STEP, BLOCK_V]  # fmt: skip
            acc += tl.sum(tl.exp2(part_lse - top)[:, None] * part, axis=0)  # [BLOCK_V]
    some = total != 0  # []
    acc = acc / tl.where(some, total, 1.0)  # [BLOCK_V]
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN2, float("-inf"))
    target = token.to(tl.int64) * H + h
    tl.store(out_ptr + target * V + c, acc.to(out_ptr.dtype.element_ty), mask=(c < V) & mine)
    tl.store(lse_ptr + target, lse, mask=mine)


def decode(call: Call, queries: int) -> dict[str, Array]:
    """`out` and `lse` of the sequences with at most `queries` queries, and of tokens of no sequence. Those of other sequences are not written.
    If `max_query_len` rules out longer ones, programs skip the check."""
    sizes, types = call.config.decode, call.result_types
    rows = queries * call.group
    tile_rows = min(sizes.block_m, padded(rows))
    in_bytes = _bytes(call, tile_rows)
    splits, alone = num_splits(call, queries), call.spec.max_query_len <= queries
    together, block_s = splits > 1 and call.config.together, padded(splits, 1)
    # More queries than this kernel takes count as one more than it takes, so that buckets of queries share one compiled kernel.
    constants = {"QUERIES": queries, "ALONE": alone, "MOST": queries if alone else queries + 1}
    constants |= {"SPLITS": splits, "LEAST": cdiv(call.config.chunk_size, sizes.block_k)}
    constants |= {"PAIRS": _pairs(call, tile_rows), "BYTES": in_bytes, "TOGETHER": together}
    launch = call.launch.knowing({}, BM=tile_rows, BK=sizes.block_k, **constants)
    programs = cdiv(rows, tile_rows) * call.kv_heads * splits * call.sequences
    shape = (call.sequences, queries, call.heads, splits)
    out, lse = result(*shape, call.values), result(*shape)
    half = result(programs, tile_rows, call.arrays.q.shape[-1], dtype=jnp.float16) if in_bytes else NOTHING
    zeros, outputs = {}, types if splits == 1 else {"out": out, "lse": lse}
    # What only a launch that merges takes: as the number 1 it is no parameter of the compiled kernel.
    more: dict[str, Any] = dict.fromkeys(_MERGING, 1)
    if together:
        merged, counts = padded(min(rows, tile_rows), 1), result(programs // splits, dtype=jnp.int32)
        step = min(block_s, max(1, MOST_MERGED // (merged * padded(call.values))))
        outputs = {"count": counts, "parts": out, "part_lse": lse, **types}
        zeros = {"zeros": jnp.zeros(counts.shape, counts.dtype)}
        more = {"aliases": {"zeros": "count"}, "ROWS": merged, "BLOCK_S": block_s, "STEP": step}
    if in_bytes or together:
        outputs = {"q_half": half, **outputs}
    else:
        more["q_half_ptr"] = 1
    is_final = splits == 1 or together
    programs += _fills(call) if is_final else 0
    results = launch(decode_kernel, sizes, outputs, programs, zeros, **more)
    if is_final:
        return {name: results[name] for name in types}
    # Absent arguments are never read; the lengths take their place.
    merge = dataclasses.replace(launch, absent=call.arrays.q_len)
    step = min(block_s, max(2, MOST_MERGED // padded(call.values)))
    numbers = step * padded(call.values)
    warps = 2 if numbers < MOST_MERGED else 4
    options = Options(1 if numbers <= 512 else warps)  # one warp needs no barriers
    parts = {"parts": results["out"], "part_lse": results["lse"]}
    programs = call.heads * queries * call.sequences + _fills(call)
    return merge(merge_kernel, options, types, programs, parts, BLOCK_S=block_s, STEP=step)


def _pairs(call: Call, rows: int) -> int:
    """The number by which `attend_pairs` knows the pages' dtype; 0 if it cannot read them."""
    arrays = call.arrays
    if arrays.kernel_operand == jnp.float32 or (arrays.v is not None and arrays.v.dtype != arrays.k.dtype):
        return 0
    fits = pairs_fit(arrays.k.shape[-1], call.values) and rows <= MOST_PAIR_ROWS
    return PAIRS_OF.get(arrays.k.dtype.name, 0) if fits else 0


def _bytes(call: Call, rows: int) -> bool:
    """Reports whether `attend_bytes` can take the tiles and is better than `attend_tile`: it converts latents once for many rows."""
    arrays = call.arrays
    is_half = arrays.v is None and arrays.kernel_operand != jnp.float32
    return is_half and rows > MOST_PAIR_ROWS and arrays.k.dtype.name in PAIRS_OF


def _fills(call: Call) -> int:
    """The number of programs that look for tokens of no sequence."""
    return cdiv(call.arrays.q.shape[0], tile.FILLED.value)


def num_splits(call: Call, queries: int) -> int:
    """The number of splits of a sequence's keys, limited to what its table, or the window of so many queries, can use."""
    keys = call.arrays.page_table.shape[-1] * call.arrays.k.shape[1]
    if call.spec.left is not None:
        keys = min(keys, call.spec.left + queries + call.config.decode.block_k)
    least = max(call.config.chunk_size, call.config.decode.block_k)
    return max(1, min(call.config.split_k, cdiv(keys, least)))
