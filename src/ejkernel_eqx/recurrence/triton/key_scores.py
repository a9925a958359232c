"""Decay per key channel: its sums over a chunk, the scores of a chunk, and operands that include their decays.

`gates(call)`: `gates [B, T, Hg, D]` float32 in log2 units, summed from the chunk's first token on; `low` is their rounding error, for float32
operands only (else `gates` again), and is used wherever a difference of gates is taken.

`fold(call, gates, scores=...)`: the call with `q 2^G scale` and `k 2^(G_last - G)` over state heads in place of its queries and keys, zero where
segments hide them, and `carry [chunks, HS, D]`, the decay of a whole chunk. With `scores` it also has `scores [B, T, HS, chunk]`:
`scale * sum_d q_id k_jd 2^(G_id - G_jd)` on and below the diagonal and within a segment, else zero.
"""

import triton
import triton.language as tl

from ...core import Named
from ...launch import NOTHING, result
from ...launch.sizes import cdiv
from .call import Call
from .decays import add_pairs, closed
from .key_tile import between_rows, Channels, chunk_gates, edge_gates, gates_of, is_usual, scores_by_halves
from .operands import load_head, Operand, operand_of, store_head
from .places import chunk_of, chunk_tile, last_start, segment_starts
from .tile import load_tile, store_tile
from .tile_sizes import Tile


# fmt: off
@triton.jit
def gates_kernel(
    g_ptr, chunks_ptr, T,
    gates_ptr, low_ptr,
    HG: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Gates of one chunk and a tile of the channels of all heads."""
    _index, _h, _tile, column, chunk = chunk_tile(tl.program_id(0), chunks_ptr, T, 1, HG * D, BLOCK_K, CHUNK, TABLE)
    at, count = chunk.first * (HG * D), chunk.count
    g = closed(load_tile(g_ptr + at, HG * D, count, column, HG * D, CHUNK, BLOCK_K, EVEN).to(tl.float32))  # [C, BK]
    if EXACT:
        g, low = tl.associative_scan((g, tl.zeros_like(g)), 0, add_pairs)  # [C, BK] each
        store_tile(low_ptr + at, low, HG * D, count, column, HG * D, CHUNK, BLOCK_K)
    else:
        g = tl.cumsum(g, axis=0)  # [C, BK]
    store_tile(gates_ptr + at, g, HG * D, count, column, HG * D, CHUNK, BLOCK_K)


@triton.jit
def key_fold_kernel(
    q_ptr, k_ptr, gates_ptr, low_ptr, starts_ptr, chunks_ptr, T,
    folded_q_ptr, folded_k_ptr, carry_ptr, scores_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    SCALE: tl.constexpr, SCORES: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Folded operands and scores of one chunk and state head."""
    operand: tl.constexpr = q_ptr.dtype.element_ty
    # A program: a chunk, a state head (fastest).
    index = tl.program_id(0)
    h = index % HS
    channels: tl.constexpr = Channels(HG * D, D, CHUNK, BLOCK_K, EXACT)
    chunk = chunk_of(index // HS, chunks_ptr, T, CHUNK, TABLE)
    if chunk.count > 0:
        r = tl.arange(0, CHUNK)  # [C]
        gates = gates_of(gates_ptr, low_ptr, chunk, h, HS, HG, D)
        offset = chunk.first * (HS * D) + h * D
        before = r[:, None] > r[None, :]  # [C, C]
        carried = 1.0
        if SEGMENTS:
            starts = segment_starts(starts_ptr, chunk, T, CHUNK)  # [C]
            start = last_start(starts_ptr, chunk, T)
            before = before & (r[None, :] >= starts[:, None])  # [C, C]
            carried = tl.where(start < 0, 1.0, 0.0)
        a = tl.zeros([CHUNK, CHUNK], tl.float32)  # [C, C]
        diagonal = tl.zeros([CHUNK], tl.float32)  # [C]
        # Sums over slices of channels, as each channel has its own decays; each slice also writes its operands.
        for column in tl.range(0, D, BLOCK_K):
            q = load_head(q_ptr, chunk, h, column, Operand(HS, HQ, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
            k = load_head(k_ptr, chunk, h, column, Operand(HS, HK, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
            high, low = chunk_gates(gates, column, channels)  # [C, BK] each
            middle, middle_low, last, last_low = edge_gates(gates, column, channels)  # [1, BK] each
            if SCORES:
                diagonal += tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1)
                exponent = between_rows(high, low, middle, middle_low, EXACT)  # [C, BK]
                usual = is_usual(exponent, middle)  # []
                # About the middle row m: e^{G - G_m} to q, e^{G_m - G} to k; the rest, up to the ends of the chunk, is one number per channel.
                if usual:
                    queries = q.to(tl.float32) * tl.exp2(exponent)  # [C, BK]
                    keys = k.to(tl.float32) * tl.exp2(-exponent)  # [C, BK]
                    transposed = tl.trans(operand_of(keys, operand, PRECISION))  # [BK, C]
                    a = tl.dot(operand_of(queries, operand, PRECISION), transposed, a, input_precision=PRECISION)  # [C, C]
                    queries *= tl.exp2(middle)
                    keys *= tl.exp2(between_rows(last, last_low, middle, middle_low, EXACT))
                else:
                    a, _ = scores_by_halves(a, a, q, k, high, low, gates, column, channels, False, PRECISION)
                    queries = q.to(tl.float32) * tl.exp2(high)  # [C, BK]
                    keys = k.to(tl.float32) * tl.exp2(between_rows(last, last_low, high, low, EXACT))  # [C, BK]
            else:
                queries = q.to(tl.float32) * tl.exp2(high)  # [C, BK]
                keys = k.to(tl.float32) * tl.exp2(between_rows(last, last_low, high, low, EXACT))  # [C, BK]
            # Rows that do not see the incoming state, or that the outgoing one does not hold, are zero.
            if SEGMENTS:
                queries = tl.where((starts < 0)[:, None], queries, 0.0)  # [C, BK]
                keys = tl.where((r >= start)[:, None], keys, 0.0)  # [C, BK]
            queries = operand_of(queries * SCALE, operand, PRECISION)  # [C, BK]
            store_tile(folded_q_ptr + offset, queries, HS * D, chunk.count, column, D, CHUNK, BLOCK_K)
            keys = operand_of(keys, operand, PRECISION)  # [C, BK]
            store_tile(folded_k_ptr + offset, keys, HS * D, chunk.count, column, D, CHUNK, BLOCK_K)
            store_tile(carry_ptr + index.to(tl.int64) * D, tl.exp2(last) * carried, 0, 1, column, D, 1, BLOCK_K)
        # The products are undefined on and above the diagonal; on it there is no decay.
        if SCORES:
            a = tl.where(before, a, 0.0)  # [C, C]
            a = tl.where(r[:, None] == r[None, :], diagonal[:, None], a) * SCALE  # [C, C]
            store_head(scores_ptr, operand_of(a, operand, PRECISION), chunk, h, 0, Operand(HS, HS, CHUNK, CHUNK, CHUNK, EVEN))
# fmt: on


_GATES = Tile(128, 16, 4, 1)


def gates(call: Call) -> Named:
    assert call.arrays.g is not None
    shape, exact = call.wide_rows(*call.arrays.g.shape[2:]), call.launch.numbers["EXACT"]
    programs = call.chunks * cdiv(shape.shape[2] * shape.shape[3], _GATES.block_k)
    outputs = {"gates": shape, "low": shape if exact else NOTHING}
    results = call.launch(gates_kernel, _GATES, outputs, programs)
    return results if exact else dict.fromkeys(outputs, results["gates"])


def fold(call: Call, gates: Named, *, scores: bool) -> Call:
    (heads, dim, _), chunk = call.sizes, call.config.chunk_size
    rows, carry = call.rows(heads, dim), result(call.chunks, heads, dim)
    outputs = {"folded_q": rows, "folded_k": rows, "carry": carry}
    outputs |= {"scores": call.rows(heads, chunk) if scores else NOTHING}
    tile, programs = call.config.scores, call.chunks * heads
    results = call.launch(key_fold_kernel, tile, outputs, programs, gates, SCORES=scores)
    names = {"folded_q": "q", "folded_k": "k", "carry": "carry"} | ({"scores": "scores"} if scores else {})
    operands = {new: results[name] for name, new in names.items()}
    return call.knowing(operands, HQ=heads, HK=heads, SCALE=1.0, SEGMENTS=False)
