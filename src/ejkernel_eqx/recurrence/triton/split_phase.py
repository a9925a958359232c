"""The passage from one split of a sequence to the next: the state before each, or the gradient of the state after it.

Sequences are split where there would be few programs otherwise. A split decays the state that passes through it and adds to it. One launch adds up
what every split adds that others follow: each of its programs has one piece of a split, a product of keys and values with weights that decay to
the split's edge, so that no piece waits for another. It reads only what has not decayed to nothing at the edge (`reach`), so a value that is not
finite does not pass from one split to the next through such a decay. Another launch takes the state from split to split.

Gradients go the other way, from the last split to the first, through queries and the outputs' gradients.
"""
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from .decays import Decay, decays_of, from_start, Gates, KEY, NONE, strengths_of
from .operands import load_head, Operand, operand_of
from .places import Chunk, segment_starts
from .reach import open_segment, split_at_edge
from .state_tiles import entering_state, state_tile, States
from .tile import load_carry, store_tile


# fmt: off
@triton.jit
def local_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, g_ptr, logs_ptr, carry_ptr, beta_ptr, starts_ptr, bounds_ptr, kept_ptr, beyond_ptr, T, TOKENS,
    local_ptr, decay_ptr,  # the second is a result if DECAY is KEY
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SCALE: tl.constexpr, DECAY: tl.constexpr,
    BETA: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    SPLITS: tl.constexpr, PIECES: tl.constexpr, TO_END: tl.constexpr,
):
    """Sums what each piece of a split adds to the state at the split's end (`TO_END`) or to the gradient at its start, `local [sequences, SPLITS - 1,
    PIECES, HS, D, V]`, pieces counted from that edge; nothing is written of those that are not reached. With a decay per key channel there is
    one piece, and the decay of the split `[sequences, SPLITS - 1, HS, D]` is computed with it."""
    kind: tl.constexpr = Decay(HS, HG, CHUNK, DECAY, EVEN, EXACT)
    seq, index, h, d0, v0, _first, _length, _chunk, _own = state_tile(  # pyright: ignore[reportGeneralTypeIssues]
        bounds_ptr, T, States(HS, D, V, BLOCK_K, BLOCK_V, PIECES * (SPLITS - 1)), CHUNK, TABLE)
    # The split counts from the first that has a program, the piece from the edge.
    piece, at = index // (SPLITS - 1), index % (SPLITS - 1)
    first, length, chunk, begin, end, size = split_at_edge(  # pyright: ignore[reportGeneralTypeIssues]
        at, seq, bounds_ptr, T, CHUNK, TABLE, SPLITS, PIECES, TO_END)
    edge = (seq.to(tl.int64) * (SPLITS - 1) + at) * HS + h
    # Chunks by their distance from the edge: those that still count there.
    near, far = piece * size, end - begin
    beyond = 0.0
    if DECAY == KEY:
        passed = tl.zeros([BLOCK_K], tl.float32) + 1.0  # [BK]
    else:
        far = tl.minimum(tl.load(kept_ptr + edge), near + size)
        beyond = tl.load(beyond_ptr + edge * PIECES + piece)
    if SEGMENTS:
        opened = open_segment(starts_ptr, begin, end, first, length, seq, T, CHUNK)

    # A sum of products of keys and values, or of queries and gradients, with weights that decay to the edge.
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)  # [BK, BV]
    for n in tl.range(near, far):
        if DECAY == KEY:
            away = far - 1 - n  # towards the edge
        else:
            away = n
        c = end - 1 - away if TO_END else begin + away
        tokens = Chunk(first + c * CHUNK, tl.minimum(length - c * CHUNK, CHUNK), seq)
        if TO_END:
            x = load_head(k_ptr, tokens, h, d0, Operand(HS, HK, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
            y = load_head(v_ptr, tokens, h, v0, Operand(HS, HV, V, CHUNK, BLOCK_V, EVEN))  # [C, BV]
        else:
            x = load_head(q_ptr, tokens, h, d0, Operand(HS, HQ, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
            y = load_head(do_ptr, tokens, h, v0, Operand(HS, HS, V, CHUNK, BLOCK_V, EVEN))  # [C, BV]
        # Only the segment that is open at the split's end writes to the state there; only the one that is open at its start reads it.
        if SEGMENTS:
            if TO_END:
                seen = c * CHUNK + tl.arange(0, CHUNK) >= opened  # [C]
            else:
                seen = c * CHUNK + segment_starts(starts_ptr, tokens, T, CHUNK) < begin * CHUNK  # [C]
            y = tl.where(seen[:, None], y, 0.0).to(x.dtype)  # [C, BV]
        if DECAY == KEY:
            # Operands include their decays to the edge of the chunk.
            carry = load_carry(carry_ptr + ((chunk + c) * HS + h) * D, d0, D, BLOCK_K)  # [BK]
            state *= carry[:, None]
            passed *= carry
        else:
            high, low, rest, whole = decays_of(Gates(g_ptr, logs_ptr, TOKENS), tokens, h, kind)  # [C], [C], [C], []
            if TO_END:
                weight = tl.exp2(rest + beyond)  # [C]
                if BETA:
                    weight *= strengths_of(beta_ptr, tokens, h, HB, kind)
            else:
                weight = from_start(high + beyond, low, kind) * SCALE  # [C]
            if DECAY != NONE or BETA or not TO_END:
                y = operand_of(y.to(tl.float32) * weight[:, None], x.dtype, PRECISION)  # [C, BV]
            beyond += whole
        state = tl.dot(tl.trans(x), y, state, input_precision=PRECISION)  # [BK, BV]

    place = ((seq.to(tl.int64) * (SPLITS - 1) + at) * PIECES + piece) * HS + h
    rows = D - d0
    if DECAY == KEY:
        if SEGMENTS:
            passed = tl.where(opened < begin * CHUNK, passed, 0.0)
        d = d0 + tl.arange(0, BLOCK_K)  # [BK]
        tl.store(decay_ptr + edge * D + d, passed, mask=(d < D) & (v0 == 0))
    else:
        rows = tl.where(near < far, rows, 0)
    store_tile(local_ptr + place * (D * V) + d0 * V, state, V, rows, v0, V, BLOCK_K, BLOCK_V)


@triton.jit
def chain_kernel(
    edge_ptr, local_ptr, passed_ptr, kept_ptr, bounds_ptr, T,
    edges_ptr,
    HS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    DECAY: tl.constexpr, GIVEN: tl.constexpr, TABLE: tl.constexpr, SPLITS: tl.constexpr, PIECES: tl.constexpr, TO_END: tl.constexpr,
):
    """The state before each split (`TO_END`), or the gradient of the state after it, `edges [sequences, SPLITS, HS, D, V]`: from `edge`, that of the
    whole sequence, and the results of the other kernels for every split."""
    whole: tl.constexpr = States(HS, D, V, BLOCK_K, BLOCK_V, 1)
    where = state_tile(bounds_ptr, T, whole, CHUNK, TABLE)
    seq, h, d0, v0 = where.seq, where.h, where.d0, where.v0
    state = entering_state(edge_ptr, edge_ptr, where, whole, GIVEN)  # [BK, BV]
    # All pieces of a split are loaded at once.
    p = tl.arange(0, PIECES)[:, None, None]  # [P, 1, 1]
    d = d0 + tl.arange(0, BLOCK_K)[None, :, None]  # [1, BK, 1]
    v = v0 + tl.arange(0, BLOCK_V)[None, None, :]  # [1, 1, BV]
    inside = (p >= 0) & (d < D) & (v < V)  # [P, BK, BV]
    for n in tl.static_range(SPLITS):
        split = n if TO_END else SPLITS - 1 - n
        store_tile(edges_ptr + ((seq.to(tl.int64) * SPLITS + split) * HS + h) * (D * V) + d0 * V, state, V, D - d0, v0, V, BLOCK_K, BLOCK_V)
        if n < SPLITS - 1:
            at = n if TO_END else SPLITS - 2 - n
            edge = (seq.to(tl.int64) * (SPLITS - 1) + at) * HS + h
            written = inside
            if DECAY != KEY:
                _first, _length, _chunk, _begin, _end, size = split_at_edge(  # pyright: ignore[reportGeneralTypeIssues]
                    at, seq, bounds_ptr, T, CHUNK, TABLE, SPLITS, PIECES, TO_END)
                written = inside & (p * size < tl.load(kept_ptr + edge))
            pieces = local_ptr + ((seq.to(tl.int64) * (SPLITS - 1) + at) * PIECES + p) * (HS * D * V) + h * (D * V) + d * V + v  # [P, BK, BV]
            local = tl.sum(tl.load(pieces, mask=written, other=0.0), axis=0)  # [BK, BV]
            passed = load_carry(passed_ptr + edge * D, d0, D, BLOCK_K)[:, None]  # [BK, 1]
            state = tl.where(passed == 0.0, 0.0, state * passed) + local
