"""The description of a pooling once every option, default and layout has been resolved.

Everything below the public operation (the reference, XLA, Triton) uses only these types. Letters: `B` merged leading axes, `T` tokens,
`C` channels, `S` segments, each of which gives one row of the result.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from .._shapes import as_value
from ..core.letters import Letters

REDUCTIONS = ("mean", "sum", "max", "last")


@dataclasses.dataclass(frozen=True)
class PoolSpec:
    """The static half of a call."""

    reduction: str = "mean"
    chunk: int | None = None
    """The most tokens of a segment; `None` for all tokens of a row."""
    holes: bool = False
    """Whether tokens inside a segment may be left out."""
    normalize: bool = False
    eps: float = 1e-12


class PoolArrays(NamedTuple):
    """The arrays of a call; `*` are the leading axes, the same for all. All but `x` are int32.

    A row without `begin` is cut into segments of `spec.chunk` tokens. Otherwise its tokens have places, and a segment is a range of places;
    the ranges never decrease and do not overlap. Values of tokens that are in no segment are never used.
    """

    x: Array  # [*, T, C]
    segment: Array | None = (
        None  # [*, T]: the segment of each token, -1 for none; None: all tokens are in one
    )
    begin: Array | None = None  # [*, S]: the first place of each segment
    end: Array | None = None  # [*, S]: one past its last place
    order: Array | None = None  # [*, T]: the token at each place; None: places are tokens
    count: Array | None = None  # [*, S]: tokens of each segment, given with `segment`
    # [*, S]: the last token of each segment, -1 for none; given with `segment` for "last".
    last: Array | None = None


_AXES = {"x": "T C", **dict.fromkeys(("segment", "order"), "T")}
_AXES |= dict.fromkeys(("begin", "end", "count", "last"), "S")
_AXES |= dict.fromkeys(("out", "arg", "pooled"), "S C")
LETTERS = Letters.of(_AXES, heads="C")
WHOLE_ROWS = Letters.of(_AXES)
"""The same for normalised results, whose channels belong together."""
LEARNED = ("x",)
RESULTS = ("out",)  # [*, S, C], in the dtype of x
TABLES = ("segment", "begin", "end", "count")
"""What packed rows are given."""


def letters_of(spec: PoolSpec) -> Letters:
    return WHOLE_ROWS if spec.normalize else LETTERS


def num_segments(arrays: PoolArrays, spec: PoolSpec) -> Any:
    """`S`."""
    if arrays.begin is not None:
        return arrays.begin.shape[-1]
    length = arrays.x.shape[-2]
    return 1 if spec.chunk is None else -(-length // spec.chunk)


def longest(arrays: PoolArrays, spec: PoolSpec) -> Any:
    """The most tokens of a segment."""
    return arrays.x.shape[-2] if spec.chunk is None else spec.chunk


def counts(arrays: PoolArrays, spec: PoolSpec) -> Array:
    """The tokens of each segment, `[*, S]`, or `[S]` if all rows have the same."""
    if arrays.count is not None:
        return arrays.count
    return _ends(arrays, spec) - _begins(arrays, spec)


def last_tokens(arrays: PoolArrays, spec: PoolSpec) -> Array:
    """The last token of each segment, `[*, S]`, -1 for none; or `[S]` if all rows have the same."""
    return _ends(arrays, spec) - 1 if arrays.last is None else arrays.last


def _begins(arrays: PoolArrays, spec: PoolSpec) -> Array:
    return jnp.arange(num_segments(arrays, spec), dtype=jnp.int32) * as_value(longest(arrays, spec))


def _ends(arrays: PoolArrays, spec: PoolSpec) -> Array:
    length = as_value(arrays.x.shape[-2])
    return jnp.minimum(_begins(arrays, spec) + as_value(longest(arrays, spec)), length)
