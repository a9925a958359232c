"""What passes from one split of a sequence to the next: the state before each, or the gradient of the state after it.

Sequences are split where there would be few programs otherwise. A split decays the state that passes through it and adds to it. A first launch
computes both for every split that others follow: each of its programs adds up one piece of a split, a product of keys and values with weights
that decay to the split's edge, so that no program waits for another. It reads only what has not decayed to nothing at the edge, so a value that
is not finite does not pass from one split to the next through such a decay. A second launch takes the state from split to split.

Gradients go the other way, from the last split to the first, through queries and the outputs' gradients.
"""

import triton
import triton.language as tl

from .reach import decay_to_edge
from .tile import (
    chunks_of_split,
    decays_of,
    from_start,
    KEY,
    last_start,
    load_carry,
    load_state,
    load_tile,
    load_vector,
    NONE,
    operand_of,
    segment_starts,
    state_tile,
    store_tile,
)


# fmt: off
@triton.jit
def local_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, g_ptr, logs_ptr, carry_ptr, beta_ptr, starts_ptr, bounds_ptr, T, TOKENS,
    local_ptr, passed_ptr, pieces_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SCALE: tl.constexpr, DECAY: tl.constexpr,
    BETA: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    SPLITS: tl.constexpr, PIECES: tl.constexpr, TO_END: tl.constexpr,
):
    """What each piece of a split adds to the state at the split's end (`TO_END`) or to the gradient at its start, `local [sequences, SPLITS - 1,
    PIECES, HS, D, V]`, pieces counted from that edge; how many have anything to add, `pieces [sequences, SPLITS - 1, HS]`; and the decay of the
    whole split, `passed [sequences, SPLITS - 1, HS, D]`. Of all splits but the last or, in the other direction, the first."""
    seq, at, h, d0, v0, first, length, chunk, _own = state_tile(
        bounds_ptr, T, HS, D, V, CHUNK, BLOCK_K, BLOCK_V, TABLE, PIECES * (SPLITS - 1))
    piece, edge = at // (SPLITS - 1), at % (SPLITS - 1)
    split = edge if TO_END else edge + 1
    begin, end = chunks_of_split(split, length, CHUNK, SPLITS)
    chunks = end - begin
    size = tl.cdiv(tl.cdiv(tl.cdiv(length, CHUNK), SPLITS), PIECES)  # chunks of a piece
    near = tl.minimum(piece * size, chunks)
    kept, beyond, total = decay_to_edge(
        g_ptr, logs_ptr, begin, end, near, first, length, seq, h, TOKENS, HS, HG, CHUNK, DECAY, EXACT, TO_END)
    far = tl.minimum(near + size, kept)
    passed = tl.zeros([BLOCK_K], tl.float32) + tl.where(kept < chunks, 0.0, tl.exp2(total + 0.0))  # [BK]
    edge_row = begin * CHUNK  # the split's first token
    if SEGMENTS:
        # The segment that is open at the split's end: nothing before it reaches that end.
        opened = tl.where(chunks > 0, last_start(starts_ptr, first, tl.minimum(end * CHUNK, length), seq, T), -1)
        passed = tl.where(opened < edge_row, passed, 0.0)

    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)  # [BK, BV]
    for n in tl.range(near, far):
        if DECAY == KEY:
            away = far - 1 - (n - near)  # towards the edge
        else:
            away = n
        c = end - 1 - away if TO_END else begin + away
        row = first + c * CHUNK
        count = tl.minimum(length - c * CHUNK, CHUNK)
        if TO_END:
            x = load_tile(k_ptr + row * (HK * D) + h // (HS // HK) * D, HK * D, count, d0, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
            y = load_tile(v_ptr + row * (HV * V) + h // (HS // HV) * V, HV * V, count, v0, V, CHUNK, BLOCK_V, EVEN)  # [C, BV]
        else:
            x = load_tile(q_ptr + row * (HQ * D) + h // (HS // HQ) * D, HQ * D, count, d0, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
            y = load_tile(do_ptr + row * (HS * V) + h * V, HS * V, count, v0, V, CHUNK, BLOCK_V, EVEN)  # [C, BV]
        if SEGMENTS:
            if TO_END:
                seen = c * CHUNK + tl.arange(0, CHUNK) >= opened  # [C]
            else:
                seen = c * CHUNK + segment_starts(starts_ptr, row, count, seq, T, CHUNK) < edge_row  # [C]
            y = tl.where(seen[:, None], y, 0.0).to(x.dtype)  # [C, BV]
        if DECAY == KEY:
            # Operands include their decay to the edge of the chunk.
            carry = load_carry(carry_ptr + ((chunk + c) * HS + h) * D, d0, D, BLOCK_K)  # [BK]
            state *= carry[:, None]
            passed *= carry
        else:
            high, low, rest, whole = decays_of(g_ptr, logs_ptr, row, count, seq, h, TOKENS, HS, HG, CHUNK, DECAY, EVEN, EXACT)  # [C], [C], [C], []
            if TO_END:
                weight = tl.exp2(rest + beyond)  # [C]
                if BETA:
                    weight *= load_vector(beta_ptr + row * HB + h // (HS // HB), HB, count, CHUNK, EVEN)
            else:
                weight = from_start(high + beyond, low, DECAY, EXACT) * SCALE  # [C]
            if DECAY != NONE or BETA or not TO_END:
                y = operand_of(y.to(tl.float32) * weight[:, None], x.dtype, PRECISION)  # [C, BV]
            beyond += whole
        state = tl.dot(tl.trans(x), y, state, input_precision=PRECISION)  # [BK, BV]

    own = (seq.to(tl.int64) * (SPLITS - 1) + edge) * HS + h
    place = ((seq.to(tl.int64) * (SPLITS - 1) + edge) * PIECES + piece) * HS + h
    rows = tl.where(near < far, D - d0, 0)
    store_tile(local_ptr + place * (D * V) + d0 * V, state, V, rows, v0, V, BLOCK_K, BLOCK_V)
    d = d0 + tl.arange(0, BLOCK_K)  # [BK]
    is_first = (piece == 0) & (v0 == 0)
    tl.store(passed_ptr + own * D + d, passed, mask=(d < D) & is_first)
    tl.store(pieces_ptr + own, tl.cdiv(kept, tl.maximum(size, 1)), mask=is_first & (d0 == 0))


@triton.jit
def chain_kernel(
    edge_ptr, local_ptr, passed_ptr, pieces_ptr, bounds_ptr, T,
    edges_ptr,
    HS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    GIVEN: tl.constexpr, TABLE: tl.constexpr, SPLITS: tl.constexpr, PIECES: tl.constexpr, PADDED: tl.constexpr, TO_END: tl.constexpr,
):
    """The state before each split (`TO_END`), or the gradient of the state after it, `edges [sequences, SPLITS, HS, D, V]`, from `edge`, which is
    that of the whole sequence, and the results of `local_kernel`."""
    seq, _split, h, d0, v0, _first, _length, _chunk, own = state_tile(bounds_ptr, T, HS, D, V, CHUNK, BLOCK_K, BLOCK_V, TABLE)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)  # [BK, BV]
    if GIVEN:
        state = load_state(edge_ptr + own, d0, v0, D, V, BLOCK_K, BLOCK_V).to(tl.float32)  # [BK, BV]
    p = tl.arange(0, PADDED)[:, None, None]  # [P, 1, 1]
    d = d0 + tl.arange(0, BLOCK_K)[None, :, None]  # [1, BK, 1]
    v = v0 + tl.arange(0, BLOCK_V)[None, None, :]  # [1, 1, BV]
    inside = (d < D) & (v < V)  # [1, BK, BV]
    for n in tl.static_range(SPLITS):
        split = n if TO_END else SPLITS - 1 - n
        place = (seq.to(tl.int64) * SPLITS + split) * HS + h
        store_tile(edges_ptr + place * (D * V) + d0 * V, state, V, D - d0, v0, V, BLOCK_K, BLOCK_V)
        if n < SPLITS - 1:
            edge = seq.to(tl.int64) * (SPLITS - 1) + (n if TO_END else SPLITS - 2 - n)
            count = tl.load(pieces_ptr + edge * HS + h)  # []
            pieces = local_ptr + ((edge * PIECES + p) * HS + h) * (D * V) + d * V + v  # [P, BK, BV]
            local = tl.sum(tl.load(pieces, mask=(p < count) & inside, other=0.0), axis=0)  # [BK, BV]
            passed = load_carry(passed_ptr + (edge * HS + h) * D, d0, D, BLOCK_K)[:, None]  # [BK, 1]
            state = tl.where(passed == 0.0, 0.0, state * passed) + local
