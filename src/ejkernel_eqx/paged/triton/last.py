"""The merge of the splits of a sequence by whichever of their programs ends last, in the launch that computed them.

The one atomic operation counts programs. Which of them is last depends on the device; what it computes does not: splits are added in their order.
No program waits for another, so none has to run at the same time.
"""

from collections import namedtuple

import triton
import triton.language as tl

from ...launch.constants import LN2, LOG2E
from .tile import query_rows

MOST_MERGED = 4096
"""Numbers of partial results added in one step."""


Partials = namedtuple("Partials", "QUERIES SPLITS ROWS BLOCK_S STEP")
"""Queries and splits of a sequence, and the rows and splits that are merged at once; constants."""


@triton.jit
def is_last(count_ptr, programs):
    """Reports whether `programs` programs have come here, this one included. If so, it sees all that they have stored. Counts start at 0."""
    tl.debug_barrier()  # of all threads, on behalf of which one counts
    return tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1


@triton.jit
def merge_splits(row, kv_head, n, used, queries, start, T, sink_ptr, parts_ptr, part_lse_ptr, out_ptr, lse_ptr, parts: Partials,
                 H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, SINKS: tl.constexpr):  # fmt: skip
    """Stores `out` and `lse` of the `ROWS` rows from `row` on: sums of the results of `used` splits, each weighted by exp(its lse). `start` is the
    sequence's first token."""
    t, h = query_rows(row, kv_head, H, K, parts.ROWS)  # [ROWS] each  # pyright: ignore[reportGeneralTypeIssues]
    token = start + t  # [ROWS]
    inside = (t < queries) & (token >= 0) & (token < T)  # [ROWS]
    at = ((n * parts.QUERIES + t) * H + h) * parts.SPLITS  # [ROWS]
    c = tl.arange(0, BLOCK_V)  # [BLOCK_V]

    # Their weights, exp(lse - top), and the sum of all weights including the sink's.
    s = tl.arange(0, parts.BLOCK_S)  # [BLOCK_S]
    there = (s < used)[:, None] & inside[None, :]  # [BLOCK_S, ROWS]
    place = at[None, :] + s[:, None]  # [BLOCK_S, ROWS]
    lse = tl.load(part_lse_ptr + place, mask=there, other=float("-inf"))  # [BLOCK_S, ROWS]
    if parts.STEP == parts.BLOCK_S:
        part = tl.load(parts_ptr + (place * V)[:, :, None] + c[None, None, :],
                       mask=there[:, :, None] & (c < V)[None, None, :], other=0.0)  # [BLOCK_S, ROWS, BLOCK_V]  # fmt: skip
    top = tl.max(lse, axis=0)  # [ROWS]
    if SINKS:
        sink = tl.load(sink_ptr + h) * LOG2E  # [ROWS]
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(lse - top[None, :])  # [BLOCK_S, ROWS]
    total = tl.sum(weights, axis=0)  # [ROWS]
    if SINKS:
        total += tl.exp2(sink - top)
    # out = sum of weight * part, `STEP` splits at a time.
    if parts.STEP == parts.BLOCK_S:
        acc = tl.sum(weights[:, :, None] * part, axis=0)  # [ROWS, BLOCK_V]
    else:
        acc = tl.zeros([parts.ROWS, BLOCK_V], tl.float32)  # [ROWS, BLOCK_V]
        for begin in tl.range(0, used, parts.STEP):
            r = begin + tl.arange(0, parts.STEP)  # [STEP]
            here = (r < used)[:, None] & inside[None, :]  # [STEP, ROWS]
            spot = at[None, :] + r[:, None]  # [STEP, ROWS]
            weight = tl.load(part_lse_ptr + spot, mask=here, other=float("-inf"))  # [STEP, ROWS]
            weight = tl.exp2(weight - top[None, :])
            part = tl.load(parts_ptr + (spot * V)[:, :, None] + c[None, None, :],
                           mask=here[:, :, None] & (c < V)[None, None, :], other=0.0)  # [STEP, ROWS, BLOCK_V]  # fmt: skip
            acc += tl.sum(weight[:, :, None] * part, axis=0)  # [ROWS, BLOCK_V]
    # Results of the whole sequence: in natural units, and 0 and minus infinity where no split has a key.
    some = total != 0  # [ROWS]
    total = tl.where(some, total, 1.0)  # [ROWS]
    target = token.to(tl.int64) * H + h  # [ROWS]
    tl.store(out_ptr + (target * V)[:, None] + c[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty),
             mask=inside[:, None] & (c < V)[None, :])  # fmt: skip
    tl.store(lse_ptr + target, tl.where(some, (top + tl.log2(total)) * LN2, float("-inf")), mask=inside)
