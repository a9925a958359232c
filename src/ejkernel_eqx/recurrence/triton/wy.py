"""Scores of a delta rule, and the inverse that solves a chunk: the part that needs no states.

With the state S before a chunk, the rows v' that are written solve (I + L) v' = beta (v - e^G k S), L = tril(beta k k^T o decay, -1).
"""

import triton
import triton.language as tl

from .decays import between, Decay, from_start, log_decays, strengths_of, to_end
from .delta_states import factors_at, store_factors
from .operands import load_head, Operand, operand_of
from .places import Chunk, chunk_of, last_start, segment_starts
from .tile import store_tile

BLOCK = tl.constexpr(16)  # rows of the blocks that are solved row by row
SCRATCH = tl.constexpr(32)  # numbers per row: the block's own, followed by those of its inverse


# fmt: off
@triton.jit
def unit_inverse(lower, scratch_ptr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """`(I + lower)^-1` of a strictly lower tile: diagonal blocks of 16 rows by forward substitution in float32, then neighbouring blocks are
    joined by products until one is left. `scratch_ptr`: `[CHUNK, 32]` float32, private to the program.
    """
    r = tl.arange(0, CHUNK)  # [C]
    blocks = (r[:, None] // BLOCK) == (r[None, :] // BLOCK)  # [C, C]
    corner = scratch_ptr + r[:, None] * SCRATCH + (r % BLOCK)[None, :]  # [C, C], each pair's location in its block
    tl.store(corner, lower, mask=blocks)
    tl.debug_barrier()
    # A thread holds one column of an inverse with all its rows, so nothing is exchanged between rows.
    column = r % BLOCK  # [C]
    block = scratch_ptr + r // BLOCK * (BLOCK * SCRATCH)  # [C], where the block begins
    rows = (tl.where(column == 0, 1.0, 0.0),)  # [C], row i of all inverses: x_i = e_i - sum_{j < i} L_ij x_j
    for i in tl.static_range(1, BLOCK):
        row = tl.where(column == i, 1.0, 0.0)  # [C]
        for j in tl.static_range(0, i):
            row -= tl.load(block + (i * SCRATCH + j)) * rows[j]
        rows = rows + (row,)
    for i in tl.static_range(0, BLOCK):
        tl.store(block + (i * SCRATCH + BLOCK) + column, rows[i])
    tl.debug_barrier()
    inverse = tl.load(corner + BLOCK, mask=blocks, other=0.0)  # [C, C]
    # From blocks of 2^4 rows on.
    for level in tl.static_range(4, 8):
        if (1 << level) < CHUNK:
            inverse = _join(inverse, lower, CHUNK, 1 << level, PRECISION)  # [C, C]
    return inverse


@triton.jit
def _join(inverse, lower, CHUNK: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """The inverses of diagonal blocks of twice `SIZE`, from those of `SIZE`."""
    # [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]].
    block = tl.arange(0, CHUNK) // SIZE  # [C]
    below = (block[:, None] == block[None, :] + 1) & (block[None, :] % 2 == 0)  # [C, C], where the B lie
    product = tl.dot(inverse, tl.where(below, lower, 0.0), input_precision=PRECISION)  # [C, C]
    return inverse - tl.dot(product, inverse, input_precision=PRECISION)  # [C, C]


@triton.jit
def delta_scores_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, starts_ptr, chunks_ptr, T,
    scores_ptr, inverse_ptr, factors_ptr, scratch_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, HEADS: tl.constexpr, DECAY: tl.constexpr, BETA: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr,
    EVEN: tl.constexpr, EXACT: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr,
):
    """Solves one chunk for `HEADS` state heads with the same queries and keys: the scores, the inverse of `I + L`, and three factors per token,
    `[B, HS, 3, T]`: the decay from the start of the chunk and to its end (zero across the start of a segment), and beta.
    """
    # A program: a chunk, `HEADS` heads (fastest).
    index = tl.program_id(0)
    groups: tl.constexpr = HS // HEADS
    head = index % groups * HEADS
    kind: tl.constexpr = Decay(HS, HG, CHUNK, DECAY, EVEN, EXACT)
    chunk = chunk_of(index // groups, chunks_ptr, T, CHUNK, TABLE)
    row, count = chunk.first, chunk.count
    r = tl.arange(0, CHUNK)  # [C]
    seen = r[:, None] >= r[None, :]  # [C, C]
    if SEGMENTS:
        starts = segment_starts(starts_ptr, chunk, T, CHUNK)  # [C]
        seen = seen & (r[None, :] >= starts[:, None])  # [C, C]
    k = load_head(k_ptr, chunk, head, 0, Operand(HS, HK, D, CHUNK, BLOCK_K, EVEN))  # [C, BK], all channels
    q = load_head(q_ptr, chunk, head, 0, Operand(HS, HQ, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
    qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [C, C]
    kk = tl.dot(k, tl.trans(k), input_precision=PRECISION)  # [C, C]
    # The products are shared by all heads; decays and betas are not.
    for h in range(head, head + HEADS):
        high, low = log_decays(g_ptr, chunk, h, kind)  # [C] each
        decay = between(high, low, seen, kind)  # [C, C]
        beta = tl.where(r < count, 1.0, 0.0)  # [C]
        if BETA:
            beta = strengths_of(beta_ptr, chunk, h, HB, kind)  # [C]
        place = (row * HS + h) * CHUNK
        store_tile(scores_ptr + place, operand_of(qk * decay * SCALE, k.dtype, PRECISION), HS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK)
        lower = tl.where(r[:, None] > r[None, :], kk * decay * beta[:, None], 0.0)  # [C, C], the equation's L
        scratch = scratch_ptr + (index.to(tl.int64) * HEADS + (h - head)) * (CHUNK * SCRATCH)
        inverse = unit_inverse(lower, scratch, CHUNK, SOLVE)  # [C, C]
        store_tile(inverse_ptr + place, operand_of(inverse, k.dtype, PRECISION), HS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK)
        before = from_start(high, low, kind)  # [C]
        after = to_end(high, low, kind)  # [C]
        if SEGMENTS:
            before = tl.where(starts < 0, before, 0.0)  # [C]
            after = tl.where(r >= last_start(starts_ptr, Chunk(row, tl.maximum(count, 1), chunk.seq), T), after, 0.0)  # [C]
        store_factors(factors_at(factors_ptr, row, h, T, HS) + r, before, after, beta, T, r < count)
