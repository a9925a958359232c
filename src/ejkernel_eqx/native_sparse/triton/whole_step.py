"""The Triton kernel of a whole step of decoding, where there are as many queries and key heads as the device runs programs."""

import triton
import triton.language as tl

from ...paged.triton.tile import rest_of
from . import step_kernels as step
from .choice_kernels import GROUPS
from .step_choice import Choice, choose_blocks, SCORE_ROW


@triton.jit
def _gated(acc, total, gate_ptr, real):
    """A branch `[GP, BLOCK_V]` under its gate; 0 if it has no keys, whatever its gate."""
    gate = tl.load(gate_ptr, mask=real, other=0.0).to(tl.float32)  # [GP]
    return acc * tl.where(total > 0, gate / tl.where(total > 0, total, 1.0), 0.0)[:, None]


@triton.jit
def whole_step_kernel(
    q_ptr, gates_ptr, k_ptr, v_ptr, compressed_k_ptr, compressed_v_ptr, table_ptr, small_table_ptr, q_start_ptr, q_len_ptr, kv_len_ptr,
    given_ptr,
    T, N_SEQUENCES, R, M, P, SMALL_M, P_SMALL, WIDTH, BLOCKS,
    out_ptr, indices_ptr,  # [T, H, V], int32 [T, K, N]
    scores_ptr, lse_ptr, keys_ptr,  # float32 [R, K, G, WIDTH * SCORE_ROW], [R, H], int32 [R, K, BLOCK_M + 32]
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, N: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PAGE: tl.constexpr, FAR: tl.constexpr, SMALL_PAGE: tl.constexpr,
    SMALL_FAR: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, QUERIES: tl.constexpr, BLOCK_K: tl.constexpr,
    EACH: tl.constexpr, BK: tl.constexpr, WINDOW: tl.constexpr, CHOOSES: tl.constexpr, FIRST: tl.constexpr, REACH: tl.constexpr,
    STRIDE: tl.constexpr, BS: tl.constexpr, BLOCK_M: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """All branches of the heads of a group at one query, and their sum under the gates; tokens of no sequence are 0. Every other query begins with
    its window, so that not all programs choose, which reads little, at the same time."""
    heads: tl.constexpr = step.Heads(H, K, D, V, G, GP, BLOCK_D, BLOCK_V)  # pyright: ignore[reportAssignmentType]
    scoring: tl.constexpr = step.Scoring(SCALE, PRECISION)  # pyright: ignore[reportAssignmentType]
    pid = tl.program_id(0)
    if pid >= R * K:
        token, rest = rest_of(pid - R * K, q_start_ptr, q_len_ptr, N_SEQUENCES, T, QUERIES)  # pyright: ignore[reportGeneralTypeIssues]
        if tl.max(rest.to(tl.int32), axis=0) > 0:  # usually there are none
            step.clear_outputs(token, rest, out_ptr, heads)
            if CHOOSES:
                step.clear_blocks(token, rest, indices_ptr, K * N)
        return
    kv = pid % K
    r = pid // K
    token, n, last = step.query_of(r, step.Batch(q_start_ptr, q_len_ptr, kv_len_ptr, T), QUERIES)  # pyright: ignore[reportGeneralTypeIssues]
    if token < 0:
        return
    q = step.load_query(q_ptr, token, kv, heads)  # [GP, BLOCK_D]
    pages = step.Pages(k_ptr, v_ptr, table_ptr + n * M, P, kv)
    small = step.Pages(compressed_k_ptr, compressed_v_ptr, small_table_ptr + n * SMALL_M, P_SMALL, kv)
    g = tl.arange(0, GP)  # [GP]
    real = g < G
    own = token.to(tl.int64) * H + kv * G + g  # [GP]
    row = (r * K + kv).to(tl.int64)
    at = (token.to(tl.int64) * K + kv) * N
    out = tl.zeros([GP, BLOCK_V], tl.float32)  # [GP, BLOCK_V]
    for turn in tl.range(0, 2):
        if turn == r % 2:
            count, end = step.compressed_keys(last, SMALL_M * SMALL_PAGE, FIRST, REACH, STRIDE)
            scores = scores_ptr + row * (G * WIDTH * SCORE_ROW)
            acc, total, top = step.attend(
                q, small, scores, FIRST, end, 0, WIDTH, heads, scoring, SMALL_PAGE, SMALL_FAR, BLOCK_K, 1, CHOOSES)  # fmt: skip
            out += _gated(acc, total, gates_ptr + own * 3, real)
            chosen = given_ptr + at
            if CHOOSES:
                chosen = indices_ptr + at
                safe = tl.where(total > 0, total, 1.0)
                lse = tl.where(total > 0, top + tl.log2(safe), float("-inf"))  # [GP]
                tl.store(lse_ptr + row * G + g, lse, mask=real)
                tl.debug_barrier()
                choose_blocks(scores_ptr, lse_ptr, keys_ptr + row * (BLOCK_M + GROUPS), chosen, row, count, last, BLOCKS, WIDTH,
                              Choice(N, BS, BLOCK_M, REACH, STRIDE, G, HEADS, 1, 1))  # fmt: skip
            acc, total, top = step.attend_blocks(
                q, pages, chosen, last, 0, N, M, heads, scoring, BS, PAGE, EACH, BK)  # fmt: skip
            out += _gated(acc, total, gates_ptr + own * 3 + 1, real)
        else:
            first = tl.maximum(last - (WINDOW - 1), 0)
            end = tl.minimum(last + 1, M * PAGE)
            acc, total, top = step.attend(
                q, pages, scores_ptr, first, end, 0, WIDTH, heads, scoring, PAGE, FAR, BLOCK_K, 1, False)  # fmt: skip
            out += _gated(acc, total, gates_ptr + own * 3 + 2, real)
    c = tl.arange(0, BLOCK_V)  # [BLOCK_V]
    to = own[:, None] * V + c[None, :]
    tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=real[:, None] & (c < V)[None, :])
