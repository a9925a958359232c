"""`delta_gradients` with a decay per key channel."""

from collections import namedtuple

import triton
import triton.language as tl

from .delta_gradients import from_states, Saved
from .delta_states import factors_at
from .key_tile import about_halves, about_middle, Channels, chunk_gates, gates_of, load_gates, scaled
from .operands import load_head, Operand
from .places import chunk_tile, last_start, segment_starts
from .tile import load_tile, load_vector, store_tile

Sums = namedtuple("Sums", "dq dread dk rise")
"""Gradients of a slice of channels `[C, BK]`: of queries, of the rows `beta k` that read the state for the error, of keys, and of the summed log
decays."""


Pairs = namedtuple("Pairs", "q reader k dscores_ptr dreads_ptr")
"""The operands of pairs of tokens `[C, BK]`: row i of `q` and of `reader` (beta k) was multiplied by row j of `k`; and the gradients `[i, j]` of both
products."""


# fmt: off
@triton.jit
def _add_products(sums, pairs, dscores, dreads, rows, columns, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Adds what pairs contribute whose decay from j to i is `rows` of i times `columns` of j."""
    dq, dread, dk, rise = sums
    dscores = dscores.to(OPERAND)  # [C, C]
    dreads = dreads.to(OPERAND)  # [C, C]
    queries = scaled(pairs.q, rows, OPERAND, PRECISION)  # [C, BK]
    readers = scaled(pairs.reader, rows, OPERAND, PRECISION)  # [C, BK]
    keys = scaled(pairs.k, columns, OPERAND, PRECISION)  # [C, BK]
    # A pair contributes to `rise` at i and, with the opposite sign, at j.
    part = tl.dot(dscores, keys, input_precision=PRECISION)  # [C, BK]
    dq += part * rows
    rise += part * queries.to(tl.float32)
    part = tl.dot(dreads, keys, input_precision=PRECISION)  # [C, BK]
    dread += part * rows
    rise += part * readers.to(tl.float32)
    part = tl.dot(tl.trans(dscores), queries, input_precision=PRECISION)  # [C, BK]
    part = tl.dot(tl.trans(dreads), readers, part, input_precision=PRECISION)  # [C, BK]
    dk += part * columns
    rise -= part * keys.to(tl.float32)
    return Sums(dq, dread, dk, rise)


@triton.jit
def _add_pairs(sums, pairs, stride, gates, column, of, EVEN: tl.constexpr, PRECISION: tl.constexpr):
    """Adds the contributions of pairs of tokens to a slice of channels; `stride` is that of the rows of the products' gradients."""
    operand: tl.constexpr = tl.bfloat16 if pairs.q.dtype == tl.bfloat16 else tl.float32
    levels: tl.constexpr = of.CHUNK.bit_length() - 1
    high, rest = chunk_gates(gates, column, of)  # [C, BK] each
    exponent, whole = about_middle(high, rest, gates, column, of)  # [C, BK], []
    # Typical decays: one middle row for the whole chunk.
    if whole:
        dscores = load_tile(pairs.dscores_ptr, stride, gates.count, 0, of.CHUNK, of.CHUNK, of.CHUNK, EVEN)  # [C, C]
        dreads = load_tile(pairs.dreads_ptr, stride, gates.count, 0, of.CHUNK, of.CHUNK, of.CHUNK, EVEN)  # [C, C]
        sums = _add_products(sums, pairs, dscores, dreads, tl.exp2(exponent), tl.exp2(-exponent), operand, PRECISION)
    else:
        # Strong ones: by halves, level by level.
        r = tl.arange(0, of.CHUNK)  # [C]
        level = gates.count * 0 + levels  # a tensor, as the loop changes it
        while level > 0:
            # Everything except the sums is reloaded for each level, because registers are scarce.
            high, rest = chunk_gates(gates, column, of)  # [C, BK] each
            rows, columns, whole, together = about_halves(high, rest, gates, column, level, of)  # [C, BK], [C, BK], [], [C, C]
            at = r[:, None] * stride + r[None, :]  # [C, C]
            together = together & (r < gates.count)[:, None]  # [C, C]
            dscores = tl.load(pairs.dscores_ptr + at, mask=together, other=0.0)  # [C, C]
            dreads = tl.load(pairs.dreads_ptr + at, mask=together, other=0.0)  # [C, C]
            sums = _add_products(sums, pairs, dscores, dreads, rows, columns, operand, PRECISION)
            level = tl.where(whole, 0, level - 1)
    return sums


@triton.jit
def delta_key_gradients_kernel(
    q_ptr, k_ptr, gates_ptr, low_ptr, starts_ptr, chunks_ptr, factors_ptr, do_ptr, states_ptr, dstates_ptr, written_ptr, derrors_ptr,
    dscores_ptr, dreads_ptr, diagonal_ptr, T,
    dq_ptr, dk_ptr, dg_ptr, dbeta_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
    SCALE: tl.constexpr, PRECISION: tl.constexpr,
):
    """Gradients of one chunk, state head and slice of key channels; `dbeta`, `[B, T, slices, HS]`, holds this slice's part."""
    tiles: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    index, h, tile, column, chunk = chunk_tile(tl.program_id(0), chunks_ptr, T, HS, D, BLOCK_K, CHUNK, TABLE)
    channels: tl.constexpr = Channels(HG * D, D, CHUNK, BLOCK_K, EXACT)
    row, count = chunk.first, chunk.count
    if count > 0:
        r = tl.arange(0, CHUNK)  # [C]
        offset = (index.to(tl.int64) * HS + h) * (D * V)
        place = (row * HS + h) * V
        saved = Saved(do_ptr + place, written_ptr + place, derrors_ptr + place, states_ptr + offset, dstates_ptr + offset)
        dq, dread, dk, dcarry = from_states(  # [C, BK] thrice, [BK]
            saved, count, column, Operand(HS, HS, V, CHUNK, BLOCK_V, EVEN), D, BLOCK_K, True, PRECISION)
        beta = load_vector(factors_at(factors_ptr, row, h, T, HS) + T * 2, 1, count, CHUNK, EVEN)  # [C]
        q = load_head(q_ptr, chunk, h, column, Operand(HS, HQ, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
        k = load_head(k_ptr, chunk, h, column, Operand(HS, HK, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
        gates = gates_of(gates_ptr, low_ptr, chunk, h, HS, HG, D)
        before, rest = chunk_gates(gates, column, channels)  # [C, BK] each
        end, end_rest = load_gates(gates, tl.zeros([1], tl.int32) + count - 1, column, channels)  # [1, BK] each
        after = end - before  # [C, BK]
        if EXACT:
            before += rest
            after += end_rest - rest
            end += end_rest
        before = tl.exp2(before)  # [C, BK]
        after = tl.exp2(after)  # [C, BK]
        carry = tl.sum(tl.exp2(end), axis=0)  # [BK]
        if SEGMENTS:
            starts = segment_starts(starts_ptr, chunk, T, CHUNK)  # [C]
            last = last_start(starts_ptr, chunk, T)
            before = tl.where((starts < 0)[:, None], before, 0.0)  # [C, BK]
            after = tl.where((r >= last)[:, None], after, 0.0)  # [C, BK]
            carry = tl.where(last < 0, carry, 0.0)  # [BK]
        # With decays; `dread` is the gradient with respect to `reader`, `rise` that with respect to the summed log decays.
        dq *= before * SCALE
        dread *= -before
        dk *= after
        k_wide = k.to(tl.float32)  # [C, BK]
        reader = k_wide * beta[:, None]  # [C, BK]
        # There is no decay between the last token and the end of the chunk.
        at_end = (r == count - 1)[:, None]  # [C, 1]
        rise = tl.where(at_end, 0.0, dk * k_wide)  # [C, BK]
        dend = dcarry * carry + tl.sum(rise, axis=0)  # [BK]
        rise = dq * q.to(tl.float32) + dread * reader + tl.where(at_end, dend[None, :], -rise)  # [C, BK]

        # From pairs of tokens; those on the diagonal separately, as there is no decay between them.
        products = (row * HS + h) * CHUNK
        pairs = Pairs(q, reader, k, dscores_ptr + products, dreads_ptr + products)
        dq, dread, dk, rise = _add_pairs(Sums(dq, dread, dk, rise), pairs, HS * CHUNK, gates, column, channels, EVEN, PRECISION)
        diagonal = load_vector(diagonal_ptr + row * HS + h, HS, count, CHUNK, EVEN)[:, None]  # [C, 1]
        wide = (row * HS + h) * D
        store_tile(dq_ptr + wide, dq + diagonal * k_wide, HS * D, count, column, D, CHUNK, BLOCK_K)
        dk += dread * beta[:, None] + diagonal * q.to(tl.float32)
        store_tile(dk_ptr + wide, dk, HS * D, count, column, D, CHUNK, BLOCK_K)
        tl.store(dbeta_ptr + ((row + r) * tiles + tile) * HS + h, tl.sum(dread * k_wide, axis=1), mask=r < count)
        # The gradient of a token's decay is the sum of `rise` from it to the end.
        rise = tl.cumsum(tl.where((r < count)[:, None], rise, 0.0), axis=0, reverse=True)  # [C, BK]
        store_tile(dg_ptr + wide, rise, HS * D, count, column, D, CHUNK, BLOCK_K)
