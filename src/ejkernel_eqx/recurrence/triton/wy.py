"""Triton: what a delta rule needs of a chunk before the states are known: scores, and the inverse that solves the chunk.

With the state S before a chunk, the rows v' that are written solve (I + L) v' = beta (v - e^G k S), L = tril(beta k k^T o decay, -1).
"""

import triton
import triton.language as tl

from .delta_states import factors_at
from .tile import (
    between,
    chunk_of,
    from_start,
    last_start,
    load_tile,
    load_vector,
    log_decays,
    operand_of,
    segment_starts,
    store_tile,
    to_end,
)


@triton.jit
def unit_inverse(lower, scratch_ptr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """`(I + lower)^-1` of a strictly lower tile: the diagonal blocks of 16 by forward substitution in float32, then, as long as there are
    several, two neighbours become one by products. `scratch_ptr`: `[CHUNK, 32]` float32 that no other program uses.
    """
    r = tl.arange(0, CHUNK)
    blocks = (r[:, None] // 16) == (r[None, :] // 16)
    corner = scratch_ptr + r[:, None] * 32 + (r % 16)[None, :]
    tl.store(corner, lower, mask=blocks)
    tl.debug_barrier()
    # A thread has one column of an inverse, all its rows: nothing is exchanged from row to row.
    column = r % 16
    block = scratch_ptr + r // 16 * (16 * 32)
    rows = (tl.where(column == 0, 1.0, 0.0),)
    for i in tl.static_range(1, 16):
        row = tl.where(column == i, 1.0, 0.0)
        for j in tl.static_range(0, i):
            row -= tl.load(block + (i * 32 + j)) * rows[j]
        rows = rows + (row,)
    for i in tl.static_range(0, 16):
        tl.store(block + (i * 32 + 16) + column, rows[i])
    tl.debug_barrier()
    inverse = tl.load(corner + 16, mask=blocks, other=0.0)
    for level in tl.static_range(4, 8):
        if (1 << level) < CHUNK:
            inverse = _join(inverse, lower, CHUNK, 1 << level, PRECISION)
    return inverse


@triton.jit
def _join(inverse, lower, CHUNK: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """From the inverses of the diagonal blocks of `SIZE` those of twice the size."""
    block = tl.arange(0, CHUNK) // SIZE
    below = (block[:, None] == block[None, :] + 1) & (block[None, :] % 2 == 0)
    product = tl.dot(inverse, tl.where(below, lower, 0.0), input_precision=PRECISION)
    return inverse - tl.dot(product, inverse, input_precision=PRECISION)


@triton.jit
def delta_scores_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, starts_ptr, chunks_ptr, T,
    scores_ptr, inverse_ptr, factors_ptr, scratch_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, HEADS: tl.constexpr, DECAY: tl.constexpr, BETA: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr,
    EVEN: tl.constexpr, EXACT: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    """Of one chunk and `HEADS` state heads with the same queries and keys: the scores, the inverse of `I + L`, and three factors a token,
    `[B, HS, 3, T]`: the decay from the chunk's start and to its end (zero across the start of a segment), and beta.
    """
    index = tl.program_id(0)
    groups: tl.constexpr = HS // HEADS
    head = index % groups * HEADS
    row, count, seq = chunk_of(index // groups, chunks_ptr, T, CHUNK, TABLE)
    r = tl.arange(0, CHUNK)
    seen = r[:, None] >= r[None, :]
    if SEGMENTS:
        starts = segment_starts(starts_ptr, row, count, row // T, T, CHUNK)
        seen = seen & (r[None, :] >= starts[:, None])
    k = load_tile(k_ptr + row * (HK * D) + head // (HS // HK) * D, HK * D, count, 0, D, CHUNK, BLOCK_K, EVEN)
    q = load_tile(q_ptr + row * (HQ * D) + head // (HS // HQ) * D, HQ * D, count, 0, D, CHUNK, BLOCK_K, EVEN)
    qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    kk = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    for h in range(head, head + HEADS):
        high, low = log_decays(g_ptr, row, count, seq, h, HS, HG, CHUNK, DECAY, EVEN, EXACT)
        decay = between(high, low, seen, DECAY, EXACT)
        beta = tl.where(r < count, 1.0, 0.0)
        if BETA:
            beta = load_vector(beta_ptr + row * HB + h // (HS // HB), HB, count, CHUNK, EVEN)
        place = (row * HS + h) * CHUNK
        store_tile(
            scores_ptr + place,
            operand_of(qk * decay * SCALE, k.dtype, PRECISION),
            HS * CHUNK,
            count,
            0,
            CHUNK,
            CHUNK,
            CHUNK,
        )
        lower = tl.where(r[:, None] > r[None, :], kk * decay * beta[:, None], 0.0)
        scratch = scratch_ptr + (index.to(tl.int64) * HEADS + (h - head)) * (CHUNK * 32)
        inverse = unit_inverse(lower, scratch, CHUNK, SOLVE)
        store_tile(
            inverse_ptr + place,
            operand_of(inverse, k.dtype, PRECISION),
            HS * CHUNK,
            count,
            0,
            CHUNK,
            CHUNK,
            CHUNK,
        )
        before = from_start(high, low, DECAY, EXACT)
        after = to_end(high, low, CHUNK, DECAY, EXACT)
        if SEGMENTS:
            before = tl.where(starts < 0, before, 0.0)
            after = tl.where(r >= last_start(starts_ptr, row, tl.maximum(count, 1), row // T, T), after, 0.0)
        factors = factors_at(factors_ptr, row, h, T, HS) + r
        tl.store(factors, before, mask=r < count)
        tl.store(factors + T, after, mask=r < count)
        tl.store(factors + T * 2, beta, mask=r < count)
