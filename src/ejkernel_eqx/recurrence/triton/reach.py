"""The reach of a split's edge: tokens of which nothing is left there are not read."""

import triton
import triton.language as tl

from .decays import closed, CONSTANT, SCALAR
from .places import Chunk, last_start
from .state_tiles import chunks_of_split, sequence_of

FORGOTTEN = tl.constexpr(-256.0)  # 2 to this power times any product below 2^106 is zero in float32
FAR = tl.constexpr(2.0**30)  # a number of chunks that no split has
BLOCK = tl.constexpr(128)


# fmt: off
@triton.jit
def split_at_edge(at, seq, bounds_ptr, T, CHUNK: tl.constexpr, TABLE: tl.constexpr, SPLITS: tl.constexpr, PIECES: tl.constexpr,
                  TO_END: tl.constexpr):
    """The location of a split that others follow (`TO_END`: all but the last) or precede: first row (64 bits) and number of tokens of its sequence,
    first chunk of it (64 bits), the split's first chunk and the one after its last, and the number of chunks of a piece."""
    first, length, chunk = sequence_of(seq, bounds_ptr, T, CHUNK, TABLE)
    begin, end = chunks_of_split(at if TO_END else at + 1, length, CHUNK, SPLITS)
    return first, length, chunk, begin, end, tl.cdiv(tl.cdiv(tl.cdiv(length, CHUNK), SPLITS), PIECES)


@triton.jit
def open_segment(starts_ptr, begin, end, first, length, seq, T, CHUNK: tl.constexpr):
    """The first token of the segment that is open at the end of a split."""
    until = tl.minimum(end * CHUNK, length)
    return tl.where(begin < end, last_start(starts_ptr, Chunk(first, tl.maximum(until, 1), seq), T), -1)


@triton.jit
def reach_kernel(
    g_ptr, logs_ptr, starts_ptr, bounds_ptr, T, TOKENS,
    kept_ptr, beyond_ptr, passed_ptr,
    HS: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr,
    TABLE: tl.constexpr, EXACT: tl.constexpr, SPLITS: tl.constexpr, PIECES: tl.constexpr, TO_END: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Counts for each split and head, `[sequences, SPLITS - 1, HS]`, how many of its chunks matter to the state at its end (`TO_END`: the last) or
    to its gradient at the split's start (the first ones), the log2 decay `[.., PIECES]` between each piece and that edge, and the decay `[.., D]`
    over all. A decay that is not a number reaches everything."""
    index = tl.program_id(0)
    h = index % HS
    at, seq = index // HS % (SPLITS - 1), index // (HS * (SPLITS - 1))
    first, length, _chunk, begin, end, size = split_at_edge(at, seq, bounds_ptr, T, CHUNK, TABLE, SPLITS, PIECES, TO_END)
    # Pieces are counted from the edge, as are the chunks within them.
    chunks = end - begin
    near = tl.minimum(tl.arange(0, PIECES) * size, chunks)  # [P]
    kept = chunks
    beyond = tl.zeros([PIECES], tl.float32)  # [P]
    total = 0.0
    if DECAY == CONSTANT:
        g = closed(tl.load(g_ptr + seq.to(tl.int64) * HG + h // (HS // HG)).to(tl.float32))  # []
        share = tl.maximum(-g, 1e-9) * CHUNK / -FORGOTTEN  # [], of the way to nothing, of each chunk
        reach = tl.minimum(1.0 / share, FAR)  # []
        # The chunk at the edge, which may be short, and the one in which the reach ends.
        kept = tl.minimum(tl.where(g < 0.0, reach, FAR).to(tl.int32) + 2, chunks)
        since, until = tl.minimum(begin * CHUNK, length), tl.minimum(end * CHUNK, length)
        tokens = until - tl.minimum((end - near) * CHUNK, length) if TO_END else tl.minimum((begin + near) * CHUNK, length) - since
        beyond = tokens.to(tl.float32) * g
        total = (until - since).to(tl.float32) * g
    # Sums of the chunks' decays from the edge on, `BLOCK` chunks at a time.
    if DECAY == SCALAR:
        planes: tl.constexpr = 3 if EXACT else 2
        logs = logs_ptr + (h // (HS // HG)).to(tl.int64) * (planes * TOKENS) + first
        kept = 0 * chunks
        for n in tl.range(0, tl.cdiv(chunks, BLOCK)):
            away = n * BLOCK + tl.arange(0, BLOCK)  # [BLOCK], from the edge
            if TO_END:
                chunk = end - 1 - away  # [BLOCK]
            else:
                chunk = begin + away  # [BLOCK]
            inside = away < chunks  # [BLOCK]
            token = tl.minimum((chunk + 1) * CHUNK, length) - 1  # [BLOCK], the chunk's last, which has its decay
            whole = tl.load(logs + token, mask=inside, other=0.0)  # [BLOCK]
            if EXACT:
                whole += tl.load(logs + 2 * TOKENS + token, mask=inside, other=0.0)
            between = total + (tl.cumsum(whole, axis=0) - whole)  # [BLOCK]
            reached = inside & ~(between < FORGOTTEN)  # [BLOCK]
            kept = tl.maximum(kept, tl.max(tl.where(reached, away + 1, 0), axis=0))
            beyond += tl.sum(tl.where(away[None, :] < near[:, None], whole[None, :], 0.0), axis=1)
            total += tl.sum(whole, axis=0)
    # A state does not pass where a token within the split no longer counts.
    passed = tl.where(kept < chunks, 0.0, tl.exp2(total + 0.0))  # []
    if SEGMENTS:
        passed = tl.where(open_segment(starts_ptr, begin, end, first, length, seq, T, CHUNK) < begin * CHUNK, passed, 0.0)
    tl.store(kept_ptr + index, kept)
    tl.store(beyond_ptr + index.to(tl.int64) * PIECES + tl.arange(0, PIECES), beyond)
    d = tl.arange(0, BLOCK_K)  # [BK]
    tl.store(passed_ptr + index.to(tl.int64) * D + d, tl.zeros([BLOCK_K], tl.float32) + passed, mask=d < D)
