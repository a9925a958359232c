"""The forward of the selected branch by blocks of keys: a program reads a block once and attends to it from queries that chose it, several at a time,
so that products have `TOKENS * GP` rows. What a query has from each of its blocks is summed by a second kernel. Scores are in units of log2."""

import triton
import triton.language as tl

from ...launch.constants import LN2, LOG2E
from .kernels import query_position, rows_of


@triton.jit
def block_forward_kernel(
    q_ptr, k_ptr, v_ptr, position_ptr, begin_ptr, pairs_ptr, owner_ptr, from_ptr, to_ptr,  # pairs [B * K * length * N], [B * K, PIECES] thrice
    T, S, M, PIECES, chunk, length, offset, part_ptr, part_lse_ptr,  # [B, K, length * N, G, V], float32 [B, K, length * N, G]
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, N: tl.constexpr, BS: tl.constexpr, BLOCK_S: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, SCALE: tl.constexpr, PLACED: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Attention to one block of keys of some of the queries `chunk .. chunk + length` that chose it, `TOKENS` of them at a time."""
    pid = tl.program_id(0).to(tl.int64)  # (b * K + kv) * PIECES + piece
    row = pid // PIECES  # b * K + kv
    kv = row % K
    b = row // K
    lo = tl.load(from_ptr + pid)
    hi = tl.load(to_ptr + pid)
    if hi > lo:
        block = tl.load(owner_ptr + pid)
        if PACKED:
            begin = tl.load(begin_ptr + b * M + block)
        else:
            begin = block * BS
        column = tl.arange(0, BLOCK_S)  # [BLOCK_S]
        j = begin + column
        # Keys of the block that no query sees, and those beyond it, may hold NaN; pairs are in the order of queries.
        oldest = chunk + tl.load(pairs_ptr + lo) // N
        newest = chunk + tl.load(pairs_ptr + hi - 1) // N
        latest = tl.minimum(query_position(newest, position_ptr, b, T, offset, PLACED), S - 1)
        safe = tl.maximum(tl.minimum(j, latest), 0)
        k = rows_of(k_ptr + (b * S * K + kv) * D, safe, K * D, D, BLOCK_D)  # [BLOCK_S, BLOCK_D]
        v = rows_of(v_ptr + (b * S * K + kv) * V, safe, K * V, V, BLOCK_V)  # [BLOCK_S, BLOCK_V]
        first = query_position(oldest, position_ptr, b, T, offset, PLACED)
        whole = (first >= begin + BS - 1) & (begin + BS <= S)
        r = tl.arange(0, TOKENS * GP)  # [R], tokens by heads
        head = kv * G + tl.minimum(r % GP, G - 1)
        c = tl.arange(0, BLOCK_V)[None, :]
        # Pairs are loaded one turn ahead, so that loads of queries do not wait for them.
        following = tl.load(pairs_ptr + tl.minimum(lo + r // GP, hi - 1))  # [R]
        for n in tl.range(lo, hi, TOKENS):
            at = n + r // GP
            pair = following
            t = chunk + pair // N
            q = rows_of(q_ptr, (b * T + t) * H + head, D, D, BLOCK_D)  # [R, BLOCK_D]
            following = tl.load(pairs_ptr + tl.minimum(at + TOKENS, hi - 1))  # [R]
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [R, BLOCK_S]
            if not whole:
                last = query_position(t, position_ptr, b, T, offset, PLACED)
                seen = (j[None, :] <= last[:, None]) & (j < S)[None, :]  # [R, BLOCK_S]
                s = tl.where(seen, s, float("-inf"))
            if BS != BLOCK_S:
                s = tl.where((column < BS)[None, :], s, float("-inf"))
            top = tl.max(s, axis=1) * (SCALE * LOG2E)  # [R]
            top = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp2(s * (SCALE * LOG2E) - top[:, None])  # [R, BLOCK_S]
            total = tl.sum(p, axis=1)  # [R]
            some = total > 0  # [R]
            total = tl.where(some, total, 1.0)
            p = p * (1.0 / total)[:, None]
            out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)  # [R, BLOCK_V]
            lse = tl.where(some, top + tl.log2(total), float("-inf"))  # [R]
            real = (at < hi) & (r % GP < G)
            to = ((row * length) * N + pair) * G + r % GP
            tl.store(part_lse_ptr + to, lse, mask=real)
            # Written for the next kernel: queries, which other blocks read again, stay in the cache.
            out = out.to(part_ptr.dtype.element_ty)
            tl.store(part_ptr + to[:, None] * V + c, out, mask=real[:, None] & (c < V), cache_modifier=".cs")


@triton.jit
def _under_gate(out_ptr, lse_ptr, gate_ptr, rows, of_lse, real, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """A branch `[GP, BLOCK_V]` under its gate; 0 where it has no keys, whatever its gate."""
    c = tl.arange(0, BLOCK_V)[None, :]
    sees = tl.load(lse_ptr + of_lse, mask=real, other=float("-inf")) > float("-inf")  # [GP]
    gate = tl.load(gate_ptr, mask=real, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + rows[:, None] * V + c, mask=real[:, None] & (c < V), other=0.0)
    return out.to(tl.float32) * tl.where(sees, gate, 0.0)[:, None]


@triton.jit
def merge_blocks_kernel(
    part_ptr, part_lse_ptr, indices_ptr,  # [B, K, length * N, G, V], float32 [B, K, length * N, G], [B, T, K, N]
    gates_ptr, compressed_out_ptr, compressed_lse_ptr, sliding_out_ptr, sliding_lse_ptr,  # [B, T, H, 3], [B, T, H, V], [B, H, T] twice
    before_ptr, before_lse_ptr,  # where other chunks wrote the same arrays
    T, chunk, length, out_ptr, lse_ptr,  # [B, T, H, V], float32 [B, H, T]
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    BLOCK_V: tl.constexpr, CHOSEN: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The results of the heads of a group at one query of the chunk from those of its blocks, which with `CHOSEN` are those where `indices` has one;
    with `GATED` the sum of the three branches under their gates. The results of other queries stay as they are."""
    first = tl.program_id(0)  # (b * K + kv) * length + t
    pid = first.to(tl.int64)
    t = chunk + first % length
    row = first // length  # b * K + kv
    kv = row % K
    b = (row // K).to(tl.int64)
    n = tl.arange(0, BLOCK_N)  # [NB]
    g = tl.arange(0, GP)  # [GP]
    c = tl.arange(0, BLOCK_V)  # [BLOCK_V]
    has = (n < N) & (t < T)  # [NB]; the last chunk may be shorter
    if CHOSEN:
        has = tl.load(indices_ptr + ((b * T + t) * K + kv) * N + n, mask=has, other=-1) >= 0
    there = has[:, None] & (g < G)[None, :]  # [NB, GP]
    at = (pid * N + n)[:, None] * G + g[None, :]  # [NB, GP]
    lse = tl.load(part_lse_ptr + at, mask=there, other=float("-inf"))  # [NB, GP]
    top = tl.max(lse, axis=0)  # [GP]
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(lse - shift[None, :])  # [NB, GP]
    total = tl.sum(weight, axis=0)  # [GP]
    some = total > 0
    weight = weight * (1.0 / tl.where(some, total, 1.0))[None, :]
    inside = there[:, :, None] & (c < V)[None, None, :]  # [NB, GP, BLOCK_V]
    part = tl.load(part_ptr + at[:, :, None] * V + c[None, None, :], mask=inside, other=0.0)
    out = tl.sum(part.to(tl.float32) * weight[:, :, None], axis=0)  # [GP, BLOCK_V]
    real = (g < G) & (t < T)
    of_query = (b * T + t) * H + kv * G + g  # [GP]
    of_lse = (b * H + kv * G + g) * T + t  # [GP]
    if GATED:
        gate = tl.load(gates_ptr + of_query * 3 + 1, mask=real, other=0.0).to(tl.float32)
        out = out * tl.where(some, gate, 0.0)[:, None]
        gates = gates_ptr + of_query * 3
        out += _under_gate(compressed_out_ptr, compressed_lse_ptr, gates, of_query, of_lse, real, V, BLOCK_V)
        gates += 2
        out += _under_gate(sliding_out_ptr, sliding_lse_ptr, gates, of_query, of_lse, real, V, BLOCK_V)
    to = of_query[:, None] * V + c[None, :]
    tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=real[:, None] & (c < V)[None, :])
    if not GATED:
        lse = tl.where(some, (shift + tl.log2(tl.where(some, total, 1.0))) * LN2, float("-inf"))
        tl.store(lse_ptr + of_lse, lse, mask=real)
