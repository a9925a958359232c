"""The decays of tokens in a chunk, for kinds without key channels, and the factors that they make.

Decays are kept as base-2 logarithms, summed from the first token of their chunk on, and as a pair of numbers for float32 operands, because
differences of large sums must be exact.
"""
# pyright: reportArgumentType=false

from collections import namedtuple

import triton
import triton.language as tl

from ...launch.constants import LOG2E
from .tile import load_vector

# Values of DECAY.
NONE, CONSTANT, SCALAR, KEY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)

NOTHING_LEFT = tl.constexpr(-150.5)  # 2 to this power is zero in float32
SHORT = tl.constexpr(-256)  # the bits of a float32 without the last 8


Decay = namedtuple("Decay", "HS HG CHUNK DECAY EVEN EXACT")
"""The kind of decay of a call: state heads, heads with decays of their own, the size of a chunk, one of the values above, whether all rows of chunks
are tokens, and whether sums are pairs; all are constants."""


Gates = namedtuple("Gates", "g_ptr logs_ptr TOKENS")
"""Decays in memory: `g` as the call has it, one number per sequence and head if it is constant; and `logs [HG, 2 or 3, TOKENS]`, the sums that
`decays_kernel` makes of one number per token."""


# fmt: off
@triton.jit
def closed(g):
    """Log2 decays, bounded below by one whose power is zero, so that no sum of them is infinite or NaN."""
    g = g * LOG2E
    return tl.where(g < NOTHING_LEFT, NOTHING_LEFT, g)


@triton.jit
def add_pairs(high, low, high2, low2):
    """The sum of two pairs; the rounding error of the high part goes to the low one."""
    # Knuth's two-sum: `rest` is the part of `high2` that entered the total, `error` the part of both that did not.
    total = high + high2
    rest = total - high
    error = (high - (total - rest)) + (high2 - rest)
    return total, (low + low2) + error


@triton.jit
def _constant_logs(g_ptr, chunk, h, kind):
    """A constant log2 decay, the number of tokens up to each one, their product, and its rounding error."""
    g = closed(tl.load(g_ptr + chunk.seq.to(tl.int64) * kind.HG + h // (kind.HS // kind.HG)).to(tl.float32))  # []
    steps = tl.arange(0, kind.CHUNK) + 1  # [C]
    low = tl.zeros([kind.CHUNK], tl.float32)  # [C]
    # Rows past the last token decay no further.
    if not kind.EVEN:
        steps = tl.minimum(steps, chunk.count)
    high = steps.to(tl.float32) * g  # [C]
    if kind.EXACT:
        # Of few bits, so that its multiples are exact.
        short = (g.to(tl.int32, bitcast=True) & SHORT).to(tl.float32, bitcast=True)  # []
        high = steps.to(tl.float32) * short
        low = steps.to(tl.float32) * (g - short)
    return g, steps, high, low  # [], [C], [C], [C]


@triton.jit
def log_decays(g_ptr, chunk, h, kind):
    """The log2 decay from before the chunk up to and including each of its tokens, `[CHUNK]`, and its rounding error (zero if not
    `EXACT`)."""
    low = tl.zeros([kind.CHUNK], tl.float32)  # [C]
    if kind.DECAY == SCALAR:
        # One number per token: G_i = g_1 + .. + g_i.
        start = g_ptr + chunk.first * kind.HG + h // (kind.HS // kind.HG)
        g = closed(load_vector(start, kind.HG, chunk.count, kind.CHUNK, kind.EVEN))  # [C]
        if kind.EXACT:
            high, low = tl.associative_scan((g, low), 0, add_pairs)  # [C] each
        else:
            high = tl.cumsum(g, axis=0)  # [C]
    elif kind.DECAY == CONSTANT:
        # One number for all tokens: G_i = i g.
        _g, _steps, high, low = _constant_logs(g_ptr, chunk, h, kind)  # [], [C], [C], [C]
    else:
        high = tl.zeros([kind.CHUNK], tl.float32)  # [C]
    return high, low


@triton.jit
def decays_of(gates, chunk, h, kind):
    """Log2 decays of a chunk: `high`, `low` as in `log_decays`, from each token to the end, and of the whole chunk. Rows past `count` are
    undefined."""
    low = tl.zeros([kind.CHUNK], tl.float32)  # [C]
    if kind.DECAY == SCALAR:
        # One number per token: the sums are read, [planes, TOKENS] for each head that has its own decays.
        planes: tl.constexpr = 3 if kind.EXACT else 2
        logs = gates.logs_ptr + (h // (kind.HS // kind.HG)).to(tl.int64) * (planes * gates.TOKENS) + chunk.first
        end = tl.maximum(chunk.count, 1) - 1  # the chunk's last token, also for an unused entry
        whole = tl.load(logs + end)  # []
        high = load_vector(logs, 1, chunk.count, kind.CHUNK, kind.EVEN)  # [C]
        rest = load_vector(logs + gates.TOKENS, 1, chunk.count, kind.CHUNK, kind.EVEN)  # [C]
        if kind.EXACT:
            low = load_vector(logs + 2 * gates.TOKENS, 1, chunk.count, kind.CHUNK, kind.EVEN)  # [C]
            whole += tl.load(logs + 2 * gates.TOKENS + end)
    elif kind.DECAY == CONSTANT:
        # One number for all tokens: G_i = i g, and (C - i) g to the end.
        g, steps, high, low = _constant_logs(gates.g_ptr, chunk, h, kind)  # [], [C], [C], [C]
        rest = (chunk.count - steps).to(tl.float32) * g  # [C]
        whole = chunk.count.to(tl.float32) * g  # []
    else:
        high = tl.zeros([kind.CHUNK], tl.float32)  # [C]
        rest = high
        whole = 0.0
    return high, low, rest, whole  # [C], [C], [C], []


@triton.jit
def strengths_of(beta_ptr, chunk, h, HB: tl.constexpr, kind):
    """The write strengths of a head's tokens."""
    start = beta_ptr + chunk.first * HB + h // (kind.HS // HB)
    return load_vector(start, HB, chunk.count, kind.CHUNK, kind.EVEN)  # [C]


@triton.jit
def last(x, CHUNK: tl.constexpr):
    """The last entry of a vector: for log decays, that of the whole chunk, even if it is short."""
    return tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, x, 0.0), axis=0)


@triton.jit
def from_start(high, low, kind):
    """The factors from before the chunk to its tokens."""
    if kind.EXACT and kind.DECAY != NONE:
        return tl.exp2(high + low)  # [C]
    return tl.exp2(high)  # [C]


@triton.jit
def to_end(high, low, kind):
    """The factors from a chunk's tokens to its end."""
    if kind.DECAY == NONE:
        return tl.zeros([kind.CHUNK], tl.float32) + 1.0  # [C]
    if kind.EXACT:
        return tl.exp2((last(high, kind.CHUNK) - high) + (last(low, kind.CHUNK) - low))  # [C]
    return tl.exp2(last(high, kind.CHUNK) - high)  # [C]


@triton.jit
def _differences(x, TRANSPOSED: tl.constexpr):
    """`x_i - x_j`, with i in rows, or in columns if `TRANSPOSED`."""
    if TRANSPOSED:
        return x[None, :] - x[:, None]  # [C, C]
    return x[:, None] - x[None, :]  # [C, C]


@triton.jit
def between(high, low, visible, kind, TRANSPOSED: tl.constexpr = False):
    """The factors from token j (column, `TRANSPOSED` row) to token i (row, `TRANSPOSED` column), zero where not `visible`."""
    if kind.DECAY == NONE:
        return tl.where(visible, 1.0, 0.0)  # [C, C]
    exponent = _differences(high, TRANSPOSED)  # [C, C]
    if kind.EXACT:
        exponent += _differences(low, TRANSPOSED)
    return tl.exp2(tl.where(visible, exponent, float("-inf")))  # [C, C]
