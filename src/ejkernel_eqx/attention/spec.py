"""The description of an attention call once every mask, layout and default has been resolved.

Everything below the public operations (the reference, XLA, Triton, cuDNN) uses only these four types. Letters:
`B` batch, `T` queries, `S` keys, `H` query heads, `K` key/value heads, `D` key dim, `V` value dim.
"""

import dataclasses
from typing import NamedTuple

from jax import Array

from .masks.pattern import Pattern
from .score_mod import ScoreMod


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The static half of a call.

    The score of query `i` and key `j` is `s = scale * q_i . k_j`, then `cap * tanh(s / cap)`, then `+ bias`, then
    `+ slope * (j - position_i)` or, of forgetting attention, `+ c[position_i] - c[j]` with `c` the cumulative sum of
    `log_forget`, then the mask. Without `AttentionArrays.rows`, `position_i = i + offset` and query `i` sees
    `position_i - left <= j <= position_i + right` (`None`: unbounded). With `rows`, those arrays hold all of that, `left`
    and `right` are `None`, and `offset` is 0.
    """

    scale: float
    logits_soft_cap: float | None = None
    left: int | None = None
    right: int | None = None
    offset: int = 0
    dropout_rate: float = 0.0
    deterministic: bool = False
    return_lse: bool = False
    bias_run: int = 1
    mask_run: int = 1
    """Batch row `b` reads row `b // run % n` of a bias or mask of `n` rows; other than 1 only for opaque kernels."""
    bias_over: tuple[str, ...] = ()
    """Names of mapped axes that the gradient of the bias is summed over; for XLA kernels only."""
    same_segments: bool = False
    """Keys and queries share segment ids, so every query that is not padding sees at least the key at its own position."""
    pattern: Pattern | None = None
    """A function of head, query and key that also has to hold."""
    block_size: tuple[int, int] | None = None
    """Queries and keys of a block in the map of blocks; given iff `AttentionArrays.blocks` is."""
    score_mod: ScoreMod | None = None
    """A function of score, head, position and key, applied last, before the mask."""

    @property
    def listed(self) -> bool:
        """Returns whether lists of tiles say which of them run."""
        return self.pattern is not None or self.block_size is not None

    @property
    def ranged(self) -> bool:
        """Returns whether the static window hides anything by itself."""
        return self.left is not None or self.right is not None

    @property
    def sees_itself(self) -> bool:
        """Returns whether window and segments let every token that is not padding see itself."""
        return self.same_segments and all(x is None or x >= 0 for x in (self.left, self.right))

    def covers(self, queries: int, keys: int) -> bool:
        """Returns whether every query sees a key and every key is seen under the static window. The ranges move by one key per query, so the
        first and the last query decide."""
        left, right = [keys + queries if side is None else side for side in (self.left, self.right)]
        first, last = self.offset, self.offset + queries - 1
        sees = last - left < keys and first + right >= 0
        return sees and first - left <= 0 and last + right >= keys - 1


class RowRanges(NamedTuple):
    """Query `i` sees only keys `start_i <= j < end_i` (none if `start >= end`); `position_i` is its position among the keys,
    for ALiBi and dropout. Each int32 `[B or 1, T]`."""

    start: Array
    end: Array
    position: Array


class AttentionArrays(NamedTuple):
    """The arrays of a call. An axis whose size is given as "or 1" may be broadcast and is never materialised.

    Two kinds of entries may hold NaN: a key that no query may see (`kv_segments < 0`, or outside every row's range),
    and a query that sees no key. It must not reach a result or a gradient.
    """

    q: Array  # [B, T, H, D]
    k: Array  # [B, S, K, D]
    v: Array  # [B, S, K, V]
    bias: Array | None = None  # [B or its divisor, H or 1, T or 1, S or 1], any float dtype
    alibi_slopes: Array | None = None  # [B or 1, H] float32
    sinks: Array | None = None  # [B or 1, H] float32: one logit per head that joins the denominator
    mask: Array | None = None  # bool [B or its divisor, H or 1, T or 1, S or 1], True = visible
    q_segments: Array | None = None  # int32 [B or 1, T]; visible iff equal and >= 0
    kv_segments: Array | None = None  # int32 [B or 1, S]; given iff q_segments is
    rows: RowRanges | None = None
    seeds: Array | None = None
    """uint32 `[B, H, 2 or 3]`; given iff `dropout_rate > 0`. A third word is added to both positions in the counter."""
    blocks: Array | None = None
    """bool `[B or 1, H or 1, blocks of queries, blocks of keys]`; each visible as a whole or not at all."""
    heads: Array | None = None
    """int32 `[1, H]`: the number of each head, for a `score_mod` and for a pattern that differs between heads."""
    log_forget: Array | None = None
    """`[B or 1, S, H]`, any float dtype, finite: logarithms of forget gates, one per key and query head; not beside `alibi_slopes`."""


LEARNED = ("q", "k", "v", "bias", "alibi_slopes", "sinks", "log_forget")
"""The arrays that have gradients."""


class AttentionGrads(NamedTuple):
    """Cotangents of the differentiable arrays, each in its array's shape and dtype; `None` for absent arrays."""

    q: Array
    k: Array
    v: Array
    bias: Array | None = None
    alibi_slopes: Array | None = None
    sinks: Array | None = None
    log_forget: Array | None = None
