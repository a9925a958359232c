"""Operations on one tile of scores that the kernels of latent attention share, besides those of attention (`attention/triton/tile.py`).

Keys have two parts, one of the head and one, rotated, that all heads share: a score is the sum of two products, and neither part is padded to
the other's size. A tile is `[BQ, BK]` or, where keys are the rows, `[BK, BQ]`.
"""

import triton
import triton.language as tl

from ...attention.triton.tile import load_rows, scores, visible


@triton.jit
def load_keys(k_base, rope_base, v_base, first, ok, S, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
              BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BOUND: tl.constexpr, CHECK: tl.constexpr):  # fmt: skip
    """The head's keys, the shared rotary keys and the values of a tile of `BK` keys; as `load_rows`."""
    k = load_rows(k_base, first, H * D, ok, S, D, BK, BLOCK_D, BOUND, CHECK)  # [BK, BLOCK_D]
    rope = load_rows(rope_base, first, R, ok, S, R, BK, BLOCK_R, BOUND, CHECK)  # [BK, BLOCK_R]
    v = load_rows(v_base, first, H * V, ok, S, V, BK, BLOCK_V, BOUND, CHECK)  # [BK, BLOCK_V]
    return k, rope, v


@triton.jit
def load_queries(q_base, first, ok, T, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BQ: tl.constexpr,
                 BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BOUND: tl.constexpr, CHECK: tl.constexpr):  # fmt: skip
    """Both parts of a tile of queries, whose rows hold the rotary part last."""
    q = load_rows(q_base, first, H * (D + R), ok, T, D, BQ, BLOCK_D, BOUND, CHECK)  # [BQ, BLOCK_D]
    rope = load_rows(q_base + D, first, H * (D + R), ok, T, R, BQ, BLOCK_R, BOUND, CHECK)  # [BQ, BLOCK_R]
    return q, rope


@triton.jit
def masked_scores(qk, i, j, position, start, end, q_segment, k_segment, T, S, SCALE: tl.constexpr, CAP: tl.constexpr,
                  FAST_TANH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr,
                  FOLDED: tl.constexpr, MASKED: tl.constexpr, BOUND: tl.constexpr):  # fmt: skip
    """Scores in log2 units, as `scores`; the tanh of the soft cap; and which entries are visible. Each of the shape of qk."""
    s, t = scores(qk, i, j, position, 0.0, None, T, S, SCALE, CAP, FAST_TANH, 0, False, FOLDED)
    seen = True
    if MASKED:
        seen = visible(i, j, position, start, end, q_segment, k_segment, None, T, S, True, None,
                       LEFT, RIGHT, ROWS, SEGMENTS, 0, BOUND, 0, 0, 0)  # fmt: skip
        s = tl.where(seen, s, float("-inf"))
    return s, t, seen


@triton.jit
def score_gradient(
    s, t, seen, dp, lse, delta, CAP: tl.constexpr, MULTIPLIER: tl.constexpr, MASKED: tl.constexpr
):
    """The weights of a tile and the gradient of `scale * q . k`, both of the shape of s; `lse` and `delta` broadcast to it."""
    p = tl.exp2(s * MULTIPLIER - lse)
    ds = p * (dp - delta)
    if CAP > 0:
        ds = ds * (1.0 - t * t)  # d tanh = 1 - tanh^2
    # Invisible entries may hold NaN, which multiplying by p = 0 does not remove.
    if MASKED:
        ds = tl.where(seen, ds, 0.0)
    return p, ds
