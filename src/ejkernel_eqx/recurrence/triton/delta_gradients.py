"""Triton: the gradients of a delta rule within one chunk, given the state before it and the gradient with respect to the state after it.

With e = beta (v - e^G k S), v' = (I + L)^-1 e and x the gradient with respect to e, the gradient with respect to L is
-tril(x v'^T, -1), and the one with respect to beta e^G k is -x S^T.
"""

from collections import namedtuple

import triton
import triton.language as tl

from .decays import between, Decay, KEY, log_decays, NONE
from .delta_states import factors_at, factors_of
from .operands import load_head, Operand, operand_of
from .places import chunk_tile, pairs_below
from .tile import load_state, load_tile, load_vector, store_tile

Saved = namedtuple("Saved", "do_ptr written_ptr derrors_ptr states_ptr dstates_ptr")
"""Arrays of a chunk and head, from its first row on: gradients of outputs, rows that were written to the state, and gradients of what these were
computed from; the state before the chunk, and the gradient of the state after it."""


# fmt: off
@triton.jit
def from_states(saved, count, column, of, D: tl.constexpr, BLOCK_K: tl.constexpr, CARRY: tl.constexpr, PRECISION: tl.constexpr):
    """Contributions of the states to a slice of key channels, without decays: do S^T, x S^T, v' dS^T, and with `CARRY` that of the
    state passing through the chunk, sum_v S o dS. `of`: the operand of values."""
    CHUNK: tl.constexpr = of.ROWS
    V: tl.constexpr = of.WIDTH
    BLOCK_V: tl.constexpr = of.COLUMNS
    dq = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # [C, BK]
    dread = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # [C, BK]
    dk = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # [C, BK]
    dcarry = tl.zeros([BLOCK_K], tl.float32)  # [BK]
    for v0 in tl.range(0, V, BLOCK_V):
        do = load_tile(saved.do_ptr, of.HS * V, count, v0, V, CHUNK, BLOCK_V, of.EVEN)  # [C, BV]
        written = load_tile(saved.written_ptr, of.HS * V, count, v0, V, CHUNK, BLOCK_V, of.EVEN)  # [C, BV]
        derror = load_tile(saved.derrors_ptr, of.HS * V, count, v0, V, CHUNK, BLOCK_V, of.EVEN)  # [C, BV]
        state = load_state(saved.states_ptr, v0, column, V, D, BLOCK_V, BLOCK_K)  # [BV, BK]
        dstate = load_state(saved.dstates_ptr, v0, column, V, D, BLOCK_V, BLOCK_K)  # [BV, BK]
        dq = tl.dot(do, state, dq, input_precision=PRECISION)  # [C, BK]
        dread = tl.dot(derror, state, dread, input_precision=PRECISION)  # [C, BK]
        dk = tl.dot(written, dstate, dk, input_precision=PRECISION)  # [C, BK]
        if CARRY:
            dcarry += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=0)
    return dq, dread, dk, dcarry


@triton.jit
def delta_pairs_kernel(
    v_ptr, g_ptr, starts_ptr, chunks_ptr, factors_ptr, do_ptr, written_ptr, derrors_ptr, T,
    dscores_ptr, dreads_ptr, diagonal_ptr, dv_ptr, dbeta_ptr,
    HS: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr, DECAY: tl.constexpr,
    SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):
    """Gradients of one chunk and state head, summed over values: of `q_i k_j` and, without beta, of `k_i k_j`, both `[.., CHUNK]` with their
    decays (except those of key channels) and without the diagonal, which is the third result; `dv`; and the part of `dbeta` from v.
    """
    _index, h, _tile, _start, chunk = chunk_tile(tl.program_id(0), chunks_ptr, T, HS, 1, 1, CHUNK, TABLE)
    row, count = chunk.first, chunk.count
    r = tl.arange(0, CHUNK)  # [C]
    place = (row * HS + h) * V
    beta = load_vector(factors_at(factors_ptr, row, h, T, HS) + T * 2, 1, count, CHUNK, EVEN)  # [C]
    dscores = tl.zeros([CHUNK, CHUNK], tl.float32)  # [C, C]
    dreads = tl.zeros([CHUNK, CHUNK], tl.float32)  # [C, C]
    dbeta = tl.zeros([CHUNK], tl.float32)  # [C]
    # Sums over values: do v'^T, x v'^T, and x . v for dbeta; dv = beta x.
    for v0 in tl.range(0, V, BLOCK_V):
        do = load_tile(do_ptr + place, HS * V, count, v0, V, CHUNK, BLOCK_V, EVEN)  # [C, BV]
        written = load_tile(written_ptr + place, HS * V, count, v0, V, CHUNK, BLOCK_V, EVEN)  # [C, BV], v'
        derror = load_tile(derrors_ptr + place, HS * V, count, v0, V, CHUNK, BLOCK_V, EVEN)  # [C, BV], x
        v = load_head(v_ptr, chunk, h, v0, Operand(HS, HV, V, CHUNK, BLOCK_V, EVEN))  # [C, BV]
        dscores = tl.dot(do, tl.trans(written), dscores, input_precision=PRECISION)  # [C, C]
        dreads = tl.dot(derror, tl.trans(written), dreads, input_precision=PRECISION)  # [C, C]
        derror = derror.to(tl.float32)  # [C, BV]
        dbeta += tl.sum(derror * v.to(tl.float32), axis=1)
        store_tile(dv_ptr + place, derror * beta[:, None], HS * V, count, v0, V, CHUNK, BLOCK_V)
    # Pairs below the diagonal include the decays between them; those on it have none and are kept apart.
    diagonal = tl.sum(tl.where(r[:, None] == r[None, :], dscores, 0.0), axis=1)  # [C]
    below = pairs_below(starts_ptr, chunk, T, CHUNK, SEGMENTS)  # [C, C]
    if DECAY == KEY:
        decay = tl.where(below, 1.0, 0.0)  # [C, C]
    else:
        kind: tl.constexpr = Decay(HS, HG, CHUNK, DECAY, EVEN, EXACT)
        high, low = log_decays(g_ptr, chunk, h, kind)  # [C] each
        decay = between(high, low, below, kind)  # [C, C]
    pairs = (row * HS + h) * CHUNK
    operand: tl.constexpr = dscores_ptr.dtype.element_ty
    dscores = operand_of(dscores * decay * SCALE, operand, PRECISION)  # [C, C]
    dreads = operand_of(dreads * -decay, operand, PRECISION)  # [C, C]
    store_tile(dscores_ptr + pairs, dscores, HS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK)
    store_tile(dreads_ptr + pairs, dreads, HS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK)
    tokens = (row + r) * HS + h  # [C]
    tl.store(diagonal_ptr + tokens, diagonal * SCALE, mask=r < count)
    tl.store(dbeta_ptr + tokens, dbeta, mask=r < count)


@triton.jit
def delta_gradients_kernel(
    q_ptr, k_ptr, chunks_ptr, factors_ptr, do_ptr, states_ptr, dstates_ptr, written_ptr, derrors_ptr, dscores_ptr, dreads_ptr, diagonal_ptr, T,
    dq_ptr, dk_ptr, dg_ptr, dbeta_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, HEADS: tl.constexpr, DECAY: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of one chunk and a slice of key channels, for `HEADS` state heads with the same queries and keys, over which `dq` and `dk` are
    summed; and this slice's parts of `dg` (natural logarithm) and `dbeta`, `[B, T, slices, HS]`."""
    values: tl.constexpr = Operand(HS, HS, V, CHUNK, BLOCK_V, EVEN)
    groups: tl.constexpr = HS // HEADS
    tiles: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    index, group, tile, column, chunk = chunk_tile(tl.program_id(0), chunks_ptr, T, groups, D, BLOCK_K, CHUNK, TABLE)
    row, count = chunk.first, chunk.count
    r = tl.arange(0, CHUNK)  # [C]
    dq_sum = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # [C, BK]
    dk_sum = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # [C, BK]
    for h in range(group * HEADS, group * HEADS + HEADS):
        place = (row * HS + h) * V
        offset = (index.to(tl.int64) * HS + h) * (D * V)
        saved = Saved(do_ptr + place, written_ptr + place, derrors_ptr + place, states_ptr + offset, dstates_ptr + offset)
        dq, dread, dk, dcarry = from_states(saved, count, column, values, D, BLOCK_K, DECAY != NONE, PRECISION)  # [C, BK] thrice, [BK]
        # The factors of the chunk's tokens, as the forward pass stored them.
        factors = factors_at(factors_ptr, row, h, T, HS)
        before, after, carry = factors_of(factors, count, T, CHUNK, EVEN)  # [C], [C], []
        beta = load_vector(factors + T * 2, 1, count, CHUNK, EVEN)  # [C]
        q = load_head(q_ptr, chunk, h, column, Operand(HS, HQ, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
        k = load_head(k_ptr, chunk, h, column, Operand(HS, HK, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
        pairs = (row * HS + h) * CHUNK
        dscores = load_tile(dscores_ptr + pairs, HS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK, EVEN)  # [C, C]
        dreads = load_tile(dreads_ptr + pairs, HS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK, EVEN)  # [C, C]
        diagonal = load_vector(diagonal_ptr + row * HS + h, HS, count, CHUNK, EVEN)  # [C]
        q_wide = q.to(tl.float32)  # [C, BK]
        k_wide = k.to(tl.float32)  # [C, BK]
        reader = k_wide * beta[:, None]  # [C, BK], the rows that read the state for the error: beta k

        # With decays, and from pairs of tokens; `dread` is the gradient with respect to `reader`.
        dq = tl.dot(dscores, k, dq * (before * SCALE)[:, None], input_precision=PRECISION)  # [C, BK]
        dread = tl.dot(dreads, k, dread * -before[:, None], input_precision=PRECISION)  # [C, BK]
        dk *= after[:, None]
        # There is no decay between the last token and the end of the chunk.
        dend = tl.sum(tl.where((r == count - 1)[:, None], 0.0, dk * k_wide))  # []
        dk = tl.dot(tl.trans(dscores), q, dk, input_precision=PRECISION)  # [C, BK]
        dk = tl.dot(tl.trans(dreads), operand_of(reader, k.dtype, PRECISION), dk, input_precision=PRECISION)  # [C, BK]
        dbeta = tl.sum(dread * k_wide, axis=1)  # [C]
        sums = ((row + r) * tiles + tile) * HS + h  # [C]
        tl.store(dbeta_ptr + sums, dbeta, mask=r < count)
        # G_i increases what row i reads and decreases what it wrote; the sum from the end yields each token's own gradient.
        if DECAY != NONE:
            dlog = tl.where(r == count - 1, 0.0, -tl.sum(dk * k_wide, axis=1))  # [C]
            dlog += beta * dbeta + tl.sum(dq * q_wide, axis=1)
            dlog = tl.cumsum(tl.where(r < count, dlog, 0.0), axis=0, reverse=True)  # [C]
            dlog += dend + tl.sum(dcarry, axis=0) * carry
            tl.store(dg_ptr + sums, dlog, mask=r < count)
        dq_sum += dq + diagonal[:, None] * k_wide
        dk_sum += dk + dread * beta[:, None] + diagonal[:, None] * q_wide
    # Sums over the heads of the group, in one place each.
    width: tl.constexpr = groups * D
    store_tile(dq_ptr + row * width + group * D, dq_sum, width, count, column, D, CHUNK, BLOCK_K)
    store_tile(dk_ptr + row * width + group * D, dk_sum, width, count, column, D, CHUNK, BLOCK_K)
