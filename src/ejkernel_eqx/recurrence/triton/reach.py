"""How far back the tokens of a split still count: those of which nothing is left at its edge are not read."""

import triton
import triton.language as tl

from .tile import closed, CONSTANT, SCALAR

FORGOTTEN = tl.constexpr(-256.0)  # 2 to this power times any product below 2^106 is zero in float32
FAR = tl.constexpr(2.0**30)  # a number of chunks that no split has
BLOCK = tl.constexpr(128)


# fmt: off
@triton.jit
def decay_to_edge(
    g_ptr, logs_ptr, begin, end, near, first, length, seq, h, TOKENS, HS: tl.constexpr, HG: tl.constexpr, CHUNK: tl.constexpr,
    DECAY: tl.constexpr, EXACT: tl.constexpr, TO_END: tl.constexpr,
):
    """How many of the chunks from `begin` to `end` matter to the state at their end (`TO_END`: the last ones) or to its gradient at their start
    (the first ones); the log2 decay over the `near` chunks next to that edge; and the one over all. A decay that is not a number reaches
    everything; one by channel is in the operands, and does here, too."""
    chunks = end - begin
    kept = chunks
    beyond = 0.0
    passed = 0.0
    if DECAY == CONSTANT:
        g = closed(tl.load(g_ptr + seq.to(tl.int64) * HG + h // (HS // HG)).to(tl.float32))  # []
        share = tl.maximum(-g, 1e-9) * CHUNK / -FORGOTTEN  # [], of the way to nothing, of each chunk
        reach = tl.minimum(1.0 / share, FAR)  # []
        # The chunk at the edge, which may be short, and the one in which the reach ends.
        kept = tl.minimum(tl.where(g < 0.0, reach, FAR).to(tl.int32) + 2, chunks)
        until = tl.minimum(end * CHUNK, length)
        tokens = until - tl.minimum((end - near) * CHUNK, length) if TO_END else tl.minimum((begin + near) * CHUNK, length) - begin * CHUNK
        beyond = tokens.to(tl.float32) * g
        passed = tl.maximum(until - begin * CHUNK, 0).to(tl.float32) * g
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
            between = passed + (tl.cumsum(whole, axis=0) - whole)  # [BLOCK]
            reached = inside & ~(between < FORGOTTEN)  # [BLOCK]
            kept = tl.maximum(kept, tl.max(tl.where(reached, away + 1, 0), axis=0))
            beyond += tl.sum(tl.where(away < near, whole, 0.0), axis=0)
            passed += tl.sum(whole, axis=0)
    return kept, beyond, passed
