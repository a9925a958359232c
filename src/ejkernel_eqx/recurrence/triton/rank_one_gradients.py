"""Transitions of rank one: the gradients within one chunk, given the state before it and the gradient with respect to the state after it.

With U = (I - A)^-1 (L V + a_in S) and dU the gradient with respect to U, z = (I - A)^-T dU is the one with respect to L V + a_in S.
"""

from collections import namedtuple

import triton
import triton.language as tl

from .key_tile import between_rows, Channels, chunk_gates, gates_of, load_gates
from .operands import load_head, Operand, operand_of, store_head
from .places import Chunk, chunk_tile, last_start, pairs_below, segment_starts
from .rank_one_scores import factors_about, Four, gates_before, Scores, weighed
from .tile import load_state, load_tile, load_vector

Sums = namedtuple("Sums", "q a k b rise early")
"""Gradients of a slice of channels `[C, BK]`: of the four operands, of the summed log decays, and of those before each token (`early`)."""


# fmt: off
@triton.jit
def rank_one_pairs_kernel(
    v_ptr, do_ptr, written_ptr, dreads_ptr, dstates_ptr, qk_ptr, mixed_ptr, inverse_ptr, k_end_ptr, starts_ptr, chunks_ptr, T,
    dqk_ptr, dqb_ptr, dak_ptr, dab_ptr, own_k_ptr, own_b_ptr, near_k_ptr, near_b_ptr, dv_ptr,
    HS: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):
    """Gradients of one chunk and state head, summed over values: of the four kinds of scores, without decays; and `dv`. Scores without decay are kept
    apart: of queries with their own token (`own`), and of the vectors `a` with the token before (`near`)."""
    index, h, _tile, _start, chunk = chunk_tile(tl.program_id(0), chunks_ptr, T, HS, 1, 1, CHUNK, TABLE)
    square: tl.constexpr = Operand(HS, HS, CHUNK, CHUNK, CHUNK, EVEN)
    rows: tl.constexpr = Operand(HS, HS, V, CHUNK, BLOCK_V, EVEN)
    operand: tl.constexpr = v_ptr.dtype.element_ty
    r = tl.arange(0, CHUNK)  # [C]
    dqk = tl.zeros([CHUNK, CHUNK], tl.float32)  # [C, C]
    dqb = tl.zeros([CHUNK, CHUNK], tl.float32)  # [C, C]
    dak = tl.zeros([CHUNK, CHUNK], tl.float32)  # [C, C]
    dab = tl.zeros([CHUNK, CHUNK], tl.float32)  # [C, C]
    for v0 in tl.range(0, V, BLOCK_V):
        do = load_head(do_ptr, chunk, h, v0, rows)  # [C, BV]
        v = load_head(v_ptr, chunk, h, v0, Operand(HS, HV, V, CHUNK, BLOCK_V, EVEN))  # [C, BV]
        written = load_head(written_ptr, chunk, h, v0, rows)  # [C, BV], U
        dread = load_head(dreads_ptr, chunk, h, v0, rows)  # [C, BV], dU
        dqk = tl.dot(do, tl.trans(v), dqk, input_precision=PRECISION)  # [C, C]
        dqb = tl.dot(do, tl.trans(written), dqb, input_precision=PRECISION)  # [C, C]
        dak = tl.dot(dread, tl.trans(v), dak, input_precision=PRECISION)  # [C, C]
        dab = tl.dot(dread, tl.trans(written), dab, input_precision=PRECISION)  # [C, C]
        # dv = (qk)^T do + mixed^T dU + k_end dS.
        qk = load_head(qk_ptr, chunk, h, 0, square)  # [C, C]
        mixed = load_head(mixed_ptr, chunk, h, 0, square)  # [C, C]
        dv = tl.dot(tl.trans(qk), do, input_precision=PRECISION)  # [C, BV]
        dv = tl.dot(tl.trans(mixed), dread, dv, input_precision=PRECISION)  # [C, BV]
        for d0 in tl.static_range(0, D, BLOCK_K):
            k_end = load_head(k_end_ptr, chunk, h, d0, Operand(HS, HS, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
            dstate = load_state(dstates_ptr + (index.to(tl.int64) * HS + h) * (D * V), v0, d0, V, D, BLOCK_V, BLOCK_K)  # [BV, BK]
            dv = tl.dot(k_end, tl.trans(dstate), dv, input_precision=PRECISION)  # [C, BV]
        store_head(dv_ptr, dv, chunk, h, v0, rows)
    own = r[:, None] == r[None, :]  # [C, C]
    near = r[:, None] == r[None, :] + 1  # [C, C]
    tokens = (chunk.first + r) * HS + h  # [C]
    tl.store(own_k_ptr + tokens, tl.sum(tl.where(own, dqk, 0.0), axis=1) * SCALE, mask=r < chunk.count)
    tl.store(own_b_ptr + tokens, tl.sum(tl.where(own, dqb, 0.0), axis=1) * SCALE, mask=r < chunk.count)
    # Those of L and A: z V^T and z U^T.
    solving = tl.trans(load_head(inverse_ptr, chunk, h, 0, square))  # [C, C]
    dak = tl.dot(solving, operand_of(dak, operand, PRECISION), input_precision=PRECISION)  # [C, C]
    dab = tl.dot(solving, operand_of(dab, operand, PRECISION), input_precision=PRECISION)  # [C, C]
    below = pairs_below(starts_ptr, chunk, T, CHUNK, SEGMENTS)  # [C, C]
    tl.store(near_k_ptr + tokens, tl.sum(tl.where(near & below, dak, 0.0), axis=1), mask=r < chunk.count)
    tl.store(near_b_ptr + tokens, tl.sum(tl.where(near & below, dab, 0.0), axis=1), mask=r < chunk.count)
    far = below & (r[:, None] > r[None, :] + 1)  # [C, C]
    store_head(dqk_ptr, operand_of(tl.where(below, dqk * SCALE, 0.0), operand, PRECISION), chunk, h, 0, square)
    store_head(dqb_ptr, operand_of(tl.where(below, dqb * SCALE, 0.0), operand, PRECISION), chunk, h, 0, square)
    store_head(dak_ptr, operand_of(tl.where(far, dak, 0.0), operand, PRECISION), chunk, h, 0, square)
    store_head(dab_ptr, operand_of(tl.where(far, dab, 0.0), operand, PRECISION), chunk, h, 0, square)


@triton.jit
def _load_scores(ptr, stride, count, together, of, MASKED: tl.constexpr, EVEN: tl.constexpr):
    """The gradients of a chunk's scores, with `MASKED` those `together` in a block."""
    x = load_tile(ptr, stride, count, 0, of.CHUNK, of.CHUNK, of.CHUNK, EVEN)  # [C, C]
    if MASKED:
        x = tl.where(together, x, 0.0).to(x.dtype)
    return x


@triton.jit
def _add_products(sums, four, scores, stride, factors, together, count, of, MASKED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr):
    """Adds what pairs contribute, with `MASKED` those `together`, whose decay from j to i is the factor of i times that of j. `scores`: pointers to
    the gradients of scores; `stride`: between their rows."""
    operand: tl.constexpr = tl.bfloat16 if four.q.dtype == tl.bfloat16 else tl.float32
    dq, da, dk, db, rise, early = sums
    q, a, k, b = weighed(four, factors, operand, PRECISION)  # [C, BK] each
    # A pair contributes to the gradient of the decays at i and, with the opposite sign, at j.
    pairs = _load_scores(scores.qk, stride, count, together, of, MASKED, EVEN)  # [C, C]
    read = tl.dot(pairs, k, input_precision=PRECISION)  # [C, BK]
    of_k = tl.dot(tl.trans(pairs), q, input_precision=PRECISION)  # [C, BK]
    pairs = _load_scores(scores.qb, stride, count, together, of, MASKED, EVEN)  # [C, C]
    read = tl.dot(pairs, b, read, input_precision=PRECISION)  # [C, BK]
    of_b = tl.dot(tl.trans(pairs), q, input_precision=PRECISION)  # [C, BK]
    dq += read * factors.q
    rise += read * q.to(tl.float32)
    pairs = _load_scores(scores.ak, stride, count, together, of, MASKED, EVEN)  # [C, C]
    read = tl.dot(pairs, k, input_precision=PRECISION)  # [C, BK]
    of_k = tl.dot(tl.trans(pairs), a, of_k, input_precision=PRECISION)  # [C, BK]
    dk += of_k * factors.columns
    rise -= of_k * k.to(tl.float32)
    pairs = _load_scores(scores.ab, stride, count, together, of, MASKED, EVEN)  # [C, C]
    read = tl.dot(pairs, b, read, input_precision=PRECISION)  # [C, BK]
    of_b = tl.dot(tl.trans(pairs), a, of_b, input_precision=PRECISION)  # [C, BK]
    da += read * factors.a
    early += read * a.to(tl.float32)
    db += of_b * factors.columns
    rise -= of_b * b.to(tl.float32)
    return Sums(dq, da, dk, db, rise, early)


@triton.jit
def _load_before(ptr, chunk, h, column, of):
    """The rows before those of `load_head`, in float32, zero for the first."""
    r = tl.arange(0, of.ROWS)  # [C]
    d = column + tl.arange(0, of.COLUMNS)  # [BK]
    at = (chunk.first - 1 + r)[:, None] * (of.HEADS * of.WIDTH) + h // (of.HS // of.HEADS) * of.WIDTH + d[None, :]  # [C, BK]
    inside = (r > 0) & (r < chunk.count)  # [C]
    return tl.load(ptr + at, mask=inside[:, None] & (d < of.WIDTH)[None, :], other=0.0).to(tl.float32)  # [C, BK]


@triton.jit
def rank_one_gradients_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, gates_ptr, low_ptr, do_ptr, written_ptr, dreads_ptr, states_ptr, dstates_ptr, inverse_ptr,
    dqk_ptr, dqb_ptr, dak_ptr, dab_ptr, own_k_ptr, own_b_ptr, near_k_ptr, near_b_ptr, starts_ptr, chunks_ptr, T,
    dq_ptr, dk_ptr, da_ptr, db_ptr, dg_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, HA: tl.constexpr, HW: tl.constexpr, HG: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SEGMENTS: tl.constexpr,
    TABLE: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Gradients of one chunk, state head and slice of key channels."""
    index, h, _tile, column, chunk = chunk_tile(tl.program_id(0), chunks_ptr, T, HS, D, BLOCK_K, CHUNK, TABLE)
    channels: tl.constexpr = Channels(HG * D, D, CHUNK, BLOCK_K, EXACT)
    square: tl.constexpr = Operand(HS, HS, CHUNK, CHUNK, CHUNK, EVEN)
    rows: tl.constexpr = Operand(HS, HS, V, CHUNK, BLOCK_V, EVEN)
    wide: tl.constexpr = Operand(HS, HS, D, CHUNK, BLOCK_K, EVEN)
    operand: tl.constexpr = q_ptr.dtype.element_ty
    count = chunk.count
    if count > 0:
        r = tl.arange(0, CHUNK)  # [C]
        state_at = (index.to(tl.int64) * HS + h) * (D * V)
        dq = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # [C, BK]
        da = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # [C, BK]
        dk = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # [C, BK]
        db = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # [C, BK]
        dcarry = tl.zeros([BLOCK_K], tl.float32)  # [BK]
        # From the states, without decays.
        for v0 in tl.range(0, V, BLOCK_V):
            state = load_state(states_ptr + state_at, v0, column, V, D, BLOCK_V, BLOCK_K)  # [BV, BK]
            dstate = load_state(dstates_ptr + state_at, v0, column, V, D, BLOCK_V, BLOCK_K)  # [BV, BK]
            dq = tl.dot(load_head(do_ptr, chunk, h, v0, rows), state, dq, input_precision=PRECISION)  # [C, BK]
            da = tl.dot(load_head(dreads_ptr, chunk, h, v0, rows), state, da, input_precision=PRECISION)  # [C, BK]
            v = load_head(v_ptr, chunk, h, v0, Operand(HS, HV, V, CHUNK, BLOCK_V, EVEN))  # [C, BV]
            dk = tl.dot(v, dstate, dk, input_precision=PRECISION)  # [C, BK]
            db = tl.dot(load_head(written_ptr, chunk, h, v0, rows), dstate, db, input_precision=PRECISION)  # [C, BK]
            dcarry += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=0)
        solving = tl.trans(load_head(inverse_ptr, chunk, h, 0, square))  # [C, C]
        da = tl.dot(solving, operand_of(da, operand, PRECISION), input_precision=PRECISION)  # [C, BK]
        q = load_head(q_ptr, chunk, h, column, Operand(HS, HQ, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
        a = load_head(a_ptr, chunk, h, column, Operand(HS, HA, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
        k = load_head(k_ptr, chunk, h, column, Operand(HS, HK, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
        b = load_head(b_ptr, chunk, h, column, Operand(HS, HW, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
        gates = gates_of(gates_ptr, low_ptr, chunk, h, HS, HG, D)
        high, low = chunk_gates(gates, column, channels)  # [C, BK] each
        end, end_low = load_gates(gates, tl.zeros([1], tl.int32) + count - 1, column, channels)  # [1, BK] each
        after = tl.exp2(between_rows(end, end_low, high, low, EXACT))  # [C, BK]
        if EXACT:
            high += low
            end += end_low
        before = tl.exp2(high) * SCALE  # [C, BK]
        early = tl.exp2(gates_before(gates, column, channels))  # [C, BK]
        carry = tl.sum(tl.exp2(end), axis=0)  # [BK]
        if SEGMENTS:
            last = last_start(starts_ptr, chunk, T)
            sees = (segment_starts(starts_ptr, chunk, T, CHUNK) < 0)[:, None]  # [C, 1]
            before = tl.where(sees, before, 0.0)  # [C, BK]
            early = tl.where(sees, early, 0.0)  # [C, BK]
            after = tl.where((r >= last)[:, None], after, 0.0)  # [C, BK]
            carry = tl.where(last < 0, carry, 0.0)  # [BK]
        # With decays; `rise` is the gradient with respect to the summed log decays.
        dq *= before
        da *= early
        dk *= after
        db *= after
        # There is no decay between the last token and the end of the chunk.
        at_end = (r == count - 1)[:, None]  # [C, 1]
        rise = tl.where(at_end, 0.0, dk * k.to(tl.float32) + db * b.to(tl.float32))  # [C, BK]
        dend = dcarry * carry + tl.sum(rise, axis=0)  # [BK]
        rise = dq * q.to(tl.float32) + tl.where(at_end, dend[None, :], -rise)  # [C, BK]

        # From pairs of tokens: about one row, or by halves, level by level, as the scores.
        early = tl.where((r == 0)[:, None], 0.0, da * a.to(tl.float32))  # [C, BK], no decay lies before the first token
        sums, four = Sums(dq, da, dk, db, rise, early), Four(q, a, k, b)
        products = chunk.first * (HS * CHUNK) + h * CHUNK
        scores = Scores(dqk_ptr + products, dqb_ptr + products, dak_ptr + products, dab_ptr + products)
        level = count * 0 + (CHUNK.bit_length() - 1)  # a tensor, as the loop changes it
        factors, whole, together = factors_about(gates, column, level, channels)
        if whole:
            sums = _add_products(sums, four, scores, HS * CHUNK, factors, False, count, channels, False, EVEN, PRECISION)
        else:
            while level > 0:
                factors, whole, together = factors_about(gates, column, level, channels)
                sums = _add_products(sums, four, scores, HS * CHUNK, factors, together, count, channels, True, EVEN, PRECISION)
                level = tl.where(whole, 0, level - 1)
        dq, da, dk, db, rise, early = sums
        # The gradient of a token's decay is the sum of `rise` from it to the end, and that of `early` from the next token on.
        rise = operand_of(tl.where((r < count)[:, None], rise + early, 0.0), tl.float32, SUMS)  # [C, BK]
        rise = tl.dot(tl.where(r[:, None] <= r[None, :], 1.0, 0.0), rise, input_precision=SUMS)  # [C, BK]
        store_head(dg_ptr, rise - early, chunk, h, column, wide)
        # Pairs without decays between them: of a token's `a` with the token before, of that of the next token with its own, and of `q` with its own.
        near_k = near_k_ptr + chunk.first * HS + h
        near_b = near_b_ptr + chunk.first * HS + h
        before = _load_before(k_ptr, chunk, h, column, Operand(HS, HK, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
        da += load_vector(near_k, HS, count, CHUNK, EVEN)[:, None] * before
        before = _load_before(b_ptr, chunk, h, column, Operand(HS, HW, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
        da += load_vector(near_b, HS, count, CHUNK, EVEN)[:, None] * before
        next = Chunk(chunk.first + 1, count - 1, chunk.seq)
        after = load_head(a_ptr, next, h, column, Operand(HS, HA, D, CHUNK, BLOCK_K, False)).to(tl.float32)  # [C, BK]
        dk += load_vector(near_k + HS, HS, count - 1, CHUNK, False)[:, None] * after
        db += load_vector(near_b + HS, HS, count - 1, CHUNK, False)[:, None] * after
        own_k = load_vector(own_k_ptr + chunk.first * HS + h, HS, count, CHUNK, EVEN)[:, None]  # [C, 1]
        own_b = load_vector(own_b_ptr + chunk.first * HS + h, HS, count, CHUNK, EVEN)[:, None]  # [C, 1]
        store_head(dq_ptr, dq + own_k * k.to(tl.float32) + own_b * b.to(tl.float32), chunk, h, column, wide)
        store_head(dk_ptr, dk + own_k * q.to(tl.float32), chunk, h, column, wide)
        store_head(da_ptr, da, chunk, h, column, wide)
        store_head(db_ptr, db + own_b * q.to(tl.float32), chunk, h, column, wide)
