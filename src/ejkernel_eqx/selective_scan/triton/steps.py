"""The time steps of a chunk, its decays, and its gate."""

import triton
import triton.language as tl

from ...launch.constants import LOG2E
from .. import spec
from .rows import split_rows

NO_TIME = tl.constexpr(spec.NO_TIME)


@triton.jit
def sigmoid(x):
    e = tl.exp2(-tl.abs(x) * LOG2E)  # e^-|x|, which does not overflow
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def time_step(raw, bias, SOFTPLUS: tl.constexpr):
    """The time step of a tile `[L, BI]`; 0 where `raw` is at most `NO_TIME`."""
    x = raw + bias[None, :]  # [L, BI]
    if SOFTPLUS:
        # log(1 + e) / e for e up to 1, as the polynomial of least relative error (5e-9 for an exact e); the logarithm of 1 + e would lose
        # the digits of a small e.
        e = tl.exp2(-tl.abs(x) * LOG2E)  # [L, BI]
        p = -0.0032440228387713432 * e + 0.019851455464959145  # [L, BI]
        p = p * e - 0.056959524750709534
        p = p * e + 0.10603655129671097
        p = p * e - 0.15305593609809875
        p = p * e + 0.1967594027519226
        p = p * e - 0.24954134225845337
        p = p * e + 0.3332996368408203
        p = p * e - 0.4999990165233612
        p = p * e + 1.0
        # softplus(x) = max(x, 0) + log(1 + e^-|x|).
        return p * e + tl.maximum(x, 0.0)  # [L, BI]
    else:
        return tl.where(raw <= NO_TIME, 0.0, x)  # [L, BI]


@triton.jit
def fresh_penalty(starts_ptr, at, token, l, SEGMENTS: tl.constexpr):
    """A term for the exponent of a decay: minus infinity where a segment starts."""
    if SEGMENTS:
        start = tl.load(starts_ptr + at.row + token + l, mask=token + l < at.length, other=-1)  # [L]
        return tl.where(start == token + l, float("-inf"), 0.0)  # [L]
    else:
        return tl.zeros(l.shape, tl.float32)


@triton.jit
def decays_of(dt, rate, fresh, sizes):
    """The decays of one state at each token of a chunk, as rows."""
    # e^(dt A), with log2 e included in A; where a segment starts, the state before it is multiplied by 2^-inf = 0.
    exponent = dt * rate[None, :]  # [L, BI]
    if sizes.SEGMENTS:
        exponent += fresh[:, None]
    return split_rows(tl.exp2(exponent), sizes.BI, sizes.LEVELS)  # [BI] each
