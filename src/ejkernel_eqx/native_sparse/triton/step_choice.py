"""The choice of a step of decoding: the scores of blocks from those of compressed keys, and the best of them."""

from typing import NamedTuple

import triton
import triton.language as tl

from .choice_kernels import best_group, GROUPS, in_lanes, keys_of, take_from_group

SCORE_ROW = tl.constexpr(16)  # rows of scores have a multiple of as many, so that four are loaded at once


class Choice(NamedTuple):
    """`N` blocks of `BS` tokens are chosen, of up to `BLOCK_M`; a compressed key has `REACH` strides of `STRIDE` tokens. `HEADS` of the
    `G` heads of a group are summed at a time, the log-sum-exp of each from `PARTS` parts, padded `BLOCK_PARTS`."""

    N: tl.constexpr
    BS: tl.constexpr
    BLOCK_M: tl.constexpr
    REACH: tl.constexpr
    STRIDE: tl.constexpr
    G: tl.constexpr
    HEADS: tl.constexpr
    PARTS: tl.constexpr
    BLOCK_PARTS: tl.constexpr


@triton.jit
def _block_scores(scores_ptr, lse_ptr, g, row, count, WIDTH, choice):
    """The sum over heads `g .. g + HEADS` of a group of the weights of compressed keys, by the strides that each shares with a block: key
    `m * PER + o` and block `m` have those in both `o .. o + REACH` and `0 .. PER`."""
    per: tl.constexpr = choice.BS // choice.STRIDE
    heads = g + tl.arange(0, choice.HEADS)  # [HEADS]
    s = tl.arange(0, choice.BLOCK_PARTS)[:, None]  # [PARTS, 1]
    at = (row * choice.G + heads)[None, :] * choice.PARTS + s  # [PARTS, HEADS]
    there = (s < choice.PARTS) & (heads < choice.G)[None, :]
    lse = tl.load(lse_ptr + at, mask=there, other=float("-inf"))
    top = tl.max(lse, axis=0)  # [HEADS]
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse - top[None, :]), axis=0)
    whole = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), 0.0)  # [HEADS]
    m = tl.arange(0, choice.BLOCK_M)  # [BM]
    rows = scores_ptr + (row * choice.G + heads)[:, None] * (WIDTH * SCORE_ROW)  # [HEADS, 1]
    real = (heads < choice.G)[:, None]
    if choice.REACH == 1 and per == 1:
        # Four at a time, which rows of scores have room for.
        x = tl.load(rows + m[None, :], mask=real & (m // 4 < tl.cdiv(count, 4))[None, :], other=float("-inf"))
        score = tl.sum(tl.where((m < count)[None, :], tl.exp2(x - whole[:, None]), 0.0), axis=0)  # [BM]
    else:
        score = tl.zeros([choice.BLOCK_M], tl.float32)  # [BM]
        for o in tl.range(1 - choice.REACH, per):
            c = (m * per + o)[None, :]  # [1, BM]
            x = tl.load(rows + c, mask=real & (c >= 0) & (c < count), other=float("-inf"))  # [HEADS, BM]
            share = tl.minimum(per, o + choice.REACH) - tl.maximum(0, o)
            score += tl.sum(tl.exp2(x - whole[:, None]), axis=0) * share
    return score


@triton.jit
def _choose(score, keys_ptr, to, last, BLOCKS, N: tl.constexpr, BS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Stores the blocks of a query: its own, the first, those of the largest scores, of equal ones the earlier; -1 after the last.

    A warp keeps the largest of each of 32 groups of blocks in its lanes, and after each choice reads that group again."""
    width: tl.constexpr = BLOCK_M // GROUPS
    m = tl.arange(0, BLOCK_M)  # [BM]
    own = tl.where(last < 0, -1, last // BS)
    tl.store(keys_ptr + m, keys_of(score, m, own, BLOCKS))
    tl.debug_barrier()
    g = tl.arange(0, GROUPS)  # [GROUPS]
    w = tl.arange(0, width)  # [width]
    best = tl.max(tl.load(keys_ptr + g[:, None] * width + w[None, :]), axis=1)  # [GROUPS]
    best = in_lanes(best, keys_ptr + BLOCK_M)
    taken = own * 0 - 1
    before = taken
    peak = taken
    for n in tl.range(0, N):
        top, group = best_group(best)
        x = tl.load(keys_ptr + group * width + w)  # [width]
        best, column = take_from_group(best, x, top, group, peak, before, taken, width)
        tl.store(to + n, tl.where(top >= 0, group * width + column, -1))
        taken = column
        before = group
        peak = top


@triton.jit
def choose_blocks(scores_ptr, lse_ptr, keys_ptr, to, row, count, last, BLOCKS, WIDTH, choice):
    """Stores the blocks at `to`, for a query and key head that see `count` compressed keys; this program may read them afterwards."""
    score = tl.zeros([choice.BLOCK_M], tl.float32)  # [BM]
    few: tl.constexpr = choice.G <= 2 * choice.HEADS and choice.REACH == 1 and choice.BS == choice.STRIDE
    if few:  # all loads are in flight together
        for g in tl.static_range(0, choice.G, choice.HEADS):
            score += _block_scores(scores_ptr, lse_ptr, g, row, count, WIDTH, choice)
    else:
        for g in tl.range(0, choice.G, choice.HEADS):
            score += _block_scores(scores_ptr, lse_ptr, g, row, count, WIDTH, choice)
    _choose(score, keys_ptr, to, last, BLOCKS, choice.N, choice.BS, choice.BLOCK_M)
    tl.debug_barrier()
