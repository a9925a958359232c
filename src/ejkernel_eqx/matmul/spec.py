"""The description of a grouped matmul once every option, default and layout has been resolved.

Everything below the public operation (the reference, XLA, Triton) uses only these types. Letters: `B` merged leading axes, `M` rows of the
result, `L` rows of the left side (`M`, unless rows are gathered), `K` the contracted axis, `E` groups, `N` columns of the result, `W` columns
of a right side: `N`, or `2 N` if it holds gate and up columns.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ..core.letters import Letters

ACTIVATIONS = (None, "silu", "gelu", "gelu_tanh", "relu")
PAIR, HALVES, INTERLEAVED = "pair", "halves", "interleaved"
GATED = (None, PAIR, HALVES, INTERLEAVED)
STORED_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class GroupedSpec:
    """The static half of a call."""

    out_dtype: str
    activation: str | None = None
    gated: str | None = None
    """Where the columns of gate and up are: None for a single product, in a `"pair"` of right sides, or in one, as `"halves"` or `"interleaved"`."""
    transpose_rhs: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_shift: float = 0.0

    @property
    def is_linear(self) -> bool:
        """Returns whether the result is the product itself."""
        return self.activation is None and self.gated is None

    @property
    def saved(self) -> tuple[str, ...]:
        """The products before the activation, which kernels save for the backward."""
        return () if self.is_linear else ("gate", "up_z")[: 2 if self.gated else 1]


class GroupedArrays(NamedTuple):
    """The arrays of a call; `*` are the leading axes, the same for `lhs`, `sizes` and `rows`. The others have none (or, mapped by `jax.vmap`,
    all of them). Of `rhs` and `stored` exactly one is given, likewise of their up sides. Groups are within the rows: sizes are not negative, and
    their sum is at most `M`."""

    lhs: Array  # [*, L, K]
    sizes: Array  # int32 [*, E]
    rhs: Array | None = None  # [E, K, W], or [E, W, K] if transposed, in the dtype of lhs
    bias: Array | None = None  # [E, W], any float dtype
    up: Array | None = None  # as rhs
    up_bias: Array | None = None  # as bias
    # int32 [*, M], the row of lhs at each row of the result; arbitrary past the last group.
    rows: Array | None = None
    stored: Array | None = None  # as rhs, of int8 or float8: a stored number stands for `scale * number`
    scale: Array | None = None  # float32 [E, W]
    up_stored: Array | None = None
    up_scale: Array | None = None

    @property
    def right(self) -> Any:  # shapes stand in for arrays where only a problem is made
        """The right side, stored in 8 bits or not."""
        right = self.rhs if self.stored is None else self.stored
        assert right is not None
        return right

    @property
    def up_right(self) -> Any | None:
        return self.up if self.up_stored is None else self.up_stored

    @property
    def num_rows(self) -> int:
        """Those of the result."""
        return self.lhs.shape[-2] if self.rows is None else self.rows.shape[-1]


MATRICES, PER_COLUMN = ("rhs", "up", "stored", "up_stored"), ("bias", "up_bias", "scale", "up_scale")
LEARNED = ("lhs", "rhs", "bias", "up", "up_bias")
SHARED = frozenset(MATRICES + PER_COLUMN)
RESULTS = ("out",)  # [*, M, N]


def letters_of(spec: GroupedSpec, gathered: bool) -> Letters:
    """The letters of a call's arrays."""
    own = {"lhs": "L K" if gathered else "M K", "sizes": "E", "rows": "M", "out": "M N"}
    right = "E W K" if spec.transpose_rhs else "E K W"
    return Letters.of(own | dict.fromkeys(MATRICES, right) | dict.fromkeys(PER_COLUMN, "E W"))


def sizes_of(arrays: GroupedArrays, spec: GroupedSpec) -> dict[str, int]:
    """The size of every letter."""
    size = letters_of(spec, arrays.rows is not None).sizes(arrays)
    return size | {"N": columns(size["W"], spec), "M": arrays.num_rows}


def columns(width: int, spec: GroupedSpec) -> int:
    """The columns of the result for right sides with this many."""
    return width // 2 if spec.gated in (HALVES, INTERLEAVED) else width


def axes_of(arrays: GroupedArrays, spec: GroupedSpec) -> Mapping[str, tuple[str, ...]]:
    """The axes of all arrays and results in the format of `parallel.opaque`: a mesh may split columns, and the contracted axis of a
    plain product."""
    size = sizes_of(arrays, spec)
    # An interleaved pair of columns stays together, as heads that go with others do.
    together = {"W": f"H{size['W']}", "N": f"H{size['N']}"}
    split = {HALVES: {}, INTERLEAVED: together}.get(str(spec.gated), {"W": "bN", "N": "bN"})
    split = split | ({"K": "bK"} if is_partial(arrays, spec) else {})
    letters = letters_of(spec, arrays.rows is not None).by_name
    return {name: tuple(split.get(letter, letter) for letter in axes) for name, axes in letters.items()}


def saved_axes(arrays: GroupedArrays, spec: GroupedSpec) -> dict[str, tuple[str, ...]]:
    """The axes of the residuals that kernels save for the backward."""
    width = arrays.right.shape[-2 if spec.transpose_rhs else -1]
    split = {HALVES: "N", INTERLEAVED: f"H{columns(width, spec)}"}
    return dict.fromkeys(spec.saved, ("M", split.get(str(spec.gated), "bN")))


def is_partial(arrays: GroupedArrays, spec: GroupedSpec) -> bool:
    """Returns whether the result is a sum over parts of the contracted axis: nothing is added to it or applied to it."""
    return spec.is_linear and arrays.bias is None


def alike(arrays: GroupedArrays) -> GroupedArrays:
    """Right sides, biases and scales, all with a leading axis or all without."""
    named = {name: x for name in (*MATRICES, *PER_COLUMN) if (x := getattr(arrays, name)) is not None}
    cores = {name: 3 if name in MATRICES else 2 for name in named}
    if all(x.ndim == cores[name] for name, x in named.items()):
        return arrays
    batch = arrays.lhs.shape[0]
    whole = {n: x if x.ndim > cores[n] else jnp.broadcast_to(x, (batch, *x.shape)) for n, x in named.items()}
    return arrays._replace(**whole)
