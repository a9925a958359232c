"""Cumulative decays of tokens, computed once for all kernels of a call."""

import triton
import triton.language as tl

from .decays import add_pairs, closed
from .places import chunk_tile
from .tile import load_tile


# fmt: off
@triton.jit
def decays_kernel(
    g_ptr, chunks_ptr, T, TOKENS, CHUNKS,
    logs_ptr, spans_ptr,
    HG: tl.constexpr, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
):
    """`logs [HG, 2 or 3, tokens]` of one chunk and `BLOCK_V` heads: the log2 decay from before the chunk up to and including each of its
    tokens; from the token to the end of the chunk; and with `EXACT` the rounding error of the first. `spans [HG, chunks]`: how far the first is
    from half of the whole chunk's, at most."""
    planes: tl.constexpr = 3 if EXACT else 2
    index, _, _tile, start, chunk = chunk_tile(tl.program_id(0), chunks_ptr, T, 1, HG, BLOCK_V, CHUNK, TABLE)
    first, count = chunk.first, chunk.count
    g = closed(load_tile(g_ptr + first * HG, HG, count, start, HG, CHUNK, BLOCK_V, EVEN).to(tl.float32))  # [C, BV]
    r = tl.arange(0, CHUNK)[:, None]  # [C, 1]
    head = start + tl.arange(0, BLOCK_V)[None, :]  # [1, BV]
    mask = (r < count) & (head < HG)  # [C, BV]
    logs = logs_ptr + head.to(tl.int64) * (planes * TOKENS) + (first + r)  # [C, BV]
    # Rows past the last token do not decay, so the last row holds the decay of the whole chunk.
    if EXACT:
        high, low = tl.associative_scan((g, tl.zeros_like(g)), 0, add_pairs)  # [C, BV] each
        end = tl.sum(tl.where(r == CHUNK - 1, high, 0.0), axis=0)[None, :]  # [1, BV]
        rest = tl.sum(tl.where(r == CHUNK - 1, low, 0.0), axis=0)[None, :] - low  # [C, BV]
        tl.store(logs, high, mask=mask)
        tl.store(logs + TOKENS, (end - high) + rest, mask=mask)
        tl.store(logs + 2 * TOKENS, low, mask=mask)
    else:
        high = tl.cumsum(g, axis=0)  # [C, BV]
        tl.store(logs, high, mask=mask)
        end = tl.sum(g, axis=0)[None, :]  # [1, BV]
        tl.store(logs + TOKENS, end - high, mask=mask)
    # A decay that is not a number counts as infinitely far.
    spans = tl.max(tl.where(high == high, tl.abs(high - end * 0.5), float("inf")), axis=0)[None, :]  # [1, BV]
    tl.store(spans_ptr + head.to(tl.int64) * CHUNKS + index, spans, mask=head < HG)
