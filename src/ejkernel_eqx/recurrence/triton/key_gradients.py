"""Decay per key channel, linear members: the gradients of a chunk, given the states and their gradients at its ends."""

import triton
import triton.language as tl

from .key_tile import between_rows, Channels, chunk_gates, edge_gates, gates_of, gradients_by_halves, is_usual
from .operands import load_head, Operand, operand_of, store_head
from .places import chunk_tile, last_start, pairs_below, segment_starts
from .tile import load_state, load_tile, load_transposed, load_vector, store_tile


# fmt: off
@triton.jit
def key_values_kernel(
    folded_k_ptr, v_ptr, scores_ptr, do_ptr, dstates_ptr, starts_ptr, chunks_ptr, T,
    dv_ptr, dscores_ptr, down_ptr,
    HS: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, SCALE: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):
    """The gradient of the values for one chunk, state head and tile of value channels; the program of the first tile also computes that of
    the scores, below the diagonal and, separately, on it (`down`), where decays play no part."""
    index, h, _tile, v0, chunk = chunk_tile(tl.program_id(0), chunks_ptr, T, HS, V, BLOCK_V, CHUNK, TABLE)
    first, count = chunk.first, chunk.count
    if count > 0:
        r = tl.arange(0, CHUNK)  # [C]
        v_base = v_ptr + first * (HV * V) + h // (HS // HV) * V
        do_base = do_ptr + first * (HS * V) + h * V
        dstate_base = dstates_ptr + (index.to(tl.int64) * HS + h) * (D * V)
        scores = first * (HS * CHUNK) + h * CHUNK
        # dv = A^T do + (e^{G_C - G} k) dS.
        do = load_tile(do_base, HS * V, count, v0, V, CHUNK, BLOCK_V, EVEN)  # [C, BV]
        transposed = load_transposed(scores_ptr + scores, HS * CHUNK, count, CHUNK)  # [C, C], A^T
        dv = tl.dot(transposed, do, input_precision=PRECISION)  # [C, BV]
        for d0 in tl.range(0, D, BLOCK_K):
            k = load_head(folded_k_ptr, chunk, h, d0, Operand(HS, HS, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
            dstate = load_state(dstate_base, d0, v0, D, V, BLOCK_K, BLOCK_V)  # [BK, BV]
            dv = tl.dot(k, dstate, dv, input_precision=PRECISION)  # [C, BV]
        store_head(dv_ptr, dv, chunk, h, v0, Operand(HS, HS, V, CHUNK, BLOCK_V, EVEN))
        # dA = scale do v^T over all value channels, by one program of each head.
        if v0 == 0:
            v = load_tile(v_base, HV * V, count, 0, V, CHUNK, BLOCK_V, EVEN)  # [C, BV]
            da = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # [C, C]
            for next in tl.static_range(BLOCK_V, V, BLOCK_V):
                do = load_tile(do_base, HS * V, count, next, V, CHUNK, BLOCK_V, EVEN)  # [C, BV]
                v = load_tile(v_base, HV * V, count, next, V, CHUNK, BLOCK_V, EVEN)  # [C, BV]
                da = tl.dot(do, tl.trans(v), da, input_precision=PRECISION)  # [C, C]
            da *= SCALE
            diagonal = tl.sum(tl.where(r[:, None] == r[None, :], da, 0.0), axis=1)  # [C]
            tl.store(down_ptr + first * HS + h + r * HS, diagonal, mask=r < count)
            before = pairs_below(starts_ptr, chunk, T, CHUNK, SEGMENTS)  # [C, C]
            da = operand_of(tl.where(before, da, 0.0), dscores_ptr.dtype.element_ty, PRECISION)  # [C, C]
            store_tile(dscores_ptr + scores, da, HS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK)


@triton.jit
def key_gradients_kernel(
    q_ptr, k_ptr, v_ptr, gates_ptr, low_ptr, do_ptr, dscores_ptr, down_ptr, states_ptr, dstates_ptr, starts_ptr,
    chunks_ptr, T,
    dq_ptr, dk_ptr, dg_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SCALE: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr,
    EVEN: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr,
):
    """The gradients of queries, keys and gates for one chunk, state head and tile of key channels."""
    operand: tl.constexpr = q_ptr.dtype.element_ty
    channels: tl.constexpr = Channels(HG * D, D, CHUNK, BLOCK_K, EXACT)
    index, h, _tile, d0, chunk = chunk_tile(tl.program_id(0), chunks_ptr, T, HS, D, BLOCK_K, CHUNK, TABLE)
    first, count = chunk.first, chunk.count
    if count > 0:
        q_base = q_ptr + first * (HQ * D) + h // (HS // HQ) * D
        k_base = k_ptr + first * (HK * D) + h // (HS // HK) * D
        v_base = v_ptr + first * (HV * V) + h // (HS // HV) * V
        do_base = do_ptr + first * (HS * V) + h * V
        gates = gates_of(gates_ptr, low_ptr, chunk, h, HS, HG, D)
        state = (index.to(tl.int64) * HS + h) * (D * V)
        offset = first * (HS * D) + h * D
        dscores = dscores_ptr + first * (HS * CHUNK) + h * CHUNK
        r = tl.arange(0, CHUNK)  # [C]

        q = load_tile(q_base, HQ * D, count, d0, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
        k = load_tile(k_base, HK * D, count, d0, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
        high, low = chunk_gates(gates, d0, channels)  # [C, BK] each
        middle, middle_low, last, last_low = edge_gates(gates, d0, channels)  # [1, BK] each

        # From the states, without their decays yet.
        dq = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # [C, BK]
        dk = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # [C, BK]
        passed = tl.zeros([BLOCK_K], tl.float32)  # [BK]
        for v0 in tl.range(0, V, BLOCK_V):
            do = load_tile(do_base, HS * V, count, v0, V, CHUNK, BLOCK_V, EVEN)  # [C, BV]
            v = load_tile(v_base, HV * V, count, v0, V, CHUNK, BLOCK_V, EVEN)  # [C, BV]
            s = load_state(states_ptr + state, d0, v0, D, V, BLOCK_K, BLOCK_V)  # [BK, BV]
            ds = load_state(dstates_ptr + state, d0, v0, D, V, BLOCK_K, BLOCK_V)  # [BK, BV]
            dq = tl.dot(do, tl.trans(s), dq, input_precision=PRECISION)  # [C, BK]
            dk = tl.dot(v, tl.trans(ds), dk, input_precision=PRECISION)  # [C, BK]
            passed += tl.sum(s.to(tl.float32) * ds.to(tl.float32), axis=1)
        dq *= SCALE
        passed = passed[None, :] * tl.exp2(last)  # [1, BK]
        if SEGMENTS:
            start = last_start(starts_ptr, chunk, T)
            dq = tl.where((segment_starts(starts_ptr, chunk, T, CHUNK) < 0)[:, None], dq, 0.0)  # [C, BK]
            dk = tl.where((r >= start)[:, None], dk, 0.0)  # [C, BK]
            passed = tl.where(start < 0, passed, 0.0)

        # `rise`: the gradient of the gates, except for `kept`, a row's share in the state at the end of the chunk.
        exponent = between_rows(high, low, middle, middle_low, EXACT)  # [C, BK]
        usual = is_usual(exponent, middle)  # []
        # About the middle row m: q^ = q e^{G - G_m} and k^ = k e^{G_m - G} are the operands of all products.
        if usual:
            rows = tl.exp2(exponent)  # [C, BK]
            columns = tl.exp2(-exponent)  # [C, BK]
            queries = operand_of(q.to(tl.float32) * rows, operand, PRECISION)  # [C, BK]
            keys = operand_of(k.to(tl.float32) * columns, operand, PRECISION)  # [C, BK]
            da = load_tile(dscores, HS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK, False)  # [C, C]
            dat = load_transposed(dscores, HS * CHUNK, count, CHUNK)  # [C, C]
            dq = tl.dot(da, keys, dq * tl.exp2(middle), input_precision=PRECISION)  # [C, BK]
            rise = dq * queries.to(tl.float32)  # [C, BK]
            dq *= rows
            dk *= tl.exp2(between_rows(last, last_low, middle, middle_low, EXACT))
            kept = dk * keys.to(tl.float32)  # [C, BK]
            part = tl.dot(dat, queries, input_precision=PRECISION)  # [C, BK]
            rise -= part * keys.to(tl.float32)
            dk = (dk + part) * columns  # [C, BK]
        else:
            # The states' part with its decays here; the pairs by halves.
            dq *= tl.exp2(high)
            dk *= tl.exp2(between_rows(last, last_low, high, low, EXACT))
            rise = dq * q.to(tl.float32)  # [C, BK]
            kept = dk * k.to(tl.float32)  # [C, BK]
            dq, dk, rise = gradients_by_halves(
                dq, dk, rise, q_base, HQ * D, k_base, HK * D, dscores, HS * CHUNK, gates, d0, channels, PRECISION)
        # There is no decay between a token and itself, so the diagonal is added last.
        down = load_vector(down_ptr + first * HS + h, HS, count, CHUNK, EVEN)[:, None]  # [C, 1]
        dq += down * k.to(tl.float32)
        dk += down * q.to(tl.float32)
        store_tile(dq_ptr + offset, dq, HS * D, count, d0, D, CHUNK, BLOCK_K)
        store_tile(dk_ptr + offset, dk, HS * D, count, d0, D, CHUNK, BLOCK_K)
        if operand == tl.float32:
            rise = operand_of(rise, operand, SUMS)  # [C, BK]
            kept = operand_of(kept, operand, SUMS)  # [C, BK]
        # A token's gate decays what later tokens read of earlier ones, and what the end of the chunk holds of those before it.
        dg = tl.dot(tl.where(r[:, None] <= r[None, :], 1.0, 0.0), rise, input_precision=SUMS)  # [C, BK]
        dg = tl.dot(tl.where(r[:, None] > r[None, :], 1.0, 0.0), kept, dg, input_precision=SUMS)  # [C, BK]
        store_tile(dg_ptr + offset, dg + passed, HS * D, count, d0, D, CHUNK, BLOCK_K)
