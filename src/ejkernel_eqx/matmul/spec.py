"""The description of a grouped matmul once every option, default and layout has been resolved.

Everything below the public operation (the reference, XLA, Triton) uses only these types. Letters: `B` merged leading axes, `M` rows of the
result, `L` rows of the left side (`M`, unless rows are gathered), `K` the contracted axis, `E` groups, `N` columns of the result, `W` columns
of a right side: `N`, or `2 N` if it holds gate and up columns.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ..core.letters import Letters
from ..quantised import QuantFormat, QuantizedWeight

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
    form: QuantFormat | None = None
    """How quantised right sides are stored; they are `[E, N, K]`, so `transpose_rhs` is true."""

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
    # The arrays of an `ejx.QuantizedWeight`. Blocks are of all rows `W`, of one (`[E, W, S]`) or of several (`[E, R, S]`).
    codes: Array | None = None  # uint8 [E, W, C], C = K or K / 2
    scales: Array | None = None  # unsigned integers
    zeros: Array | None = None  # uint8, as scales
    factor: Array | None = None  # float32 [E]
    up_codes: Array | None = None
    up_scales: Array | None = None
    up_zeros: Array | None = None
    up_factor: Array | None = None

    @property
    def right(self) -> Any:  # shapes stand in for arrays where only a problem is made
        """The right side, its stored numbers, or its codes."""
        return next(x for x in (self.rhs, self.stored, self.codes) if x is not None)

    @property
    def up_right(self) -> Any | None:
        return next((x for x in (self.up, self.up_stored, self.up_codes) if x is not None), None)

    @property
    def num_rows(self) -> int:
        """Those of the result."""
        return self.lhs.shape[-2] if self.rows is None else self.rows.shape[-1]


MATRICES, PER_COLUMN = ("rhs", "up", "stored", "up_stored"), ("bias", "up_bias", "scale", "up_scale")
QUANTISED = {"codes": 3, "scales": 3, "zeros": 3, "factor": 1}
"""The arrays of a quantised right side, and their axes."""
CORES = (
    dict.fromkeys(MATRICES, 3)
    | dict.fromkeys(PER_COLUMN, 2)
    | QUANTISED
    | {f"up_{n}": k for n, k in QUANTISED.items()}
)
LEARNED = ("lhs", "rhs", "bias", "up", "up_bias")
SHARED = frozenset(CORES)
RESULTS = ("out",)  # [*, M, N]


def letters_of(spec: GroupedSpec, gathered: bool) -> Letters:
    """The letters of a call's arrays."""
    own = {"lhs": "L K" if gathered else "M K", "sizes": "E", "rows": "M", "out": "M N"}
    right = "E W K" if spec.transpose_rhs else "E K W"
    # Blocks of one row are split with the rows.
    blocks = "E R S" if has_blocks(spec) else "E W S"
    codes = {"codes": "E W C", "scales": blocks, "zeros": blocks, "factor": "E"}
    own |= codes | {f"up_{name}": axes for name, axes in codes.items()}
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
    if has_blocks(spec):
        split = {}
    split = split | ({"K": "bK"} if is_partial(arrays, spec) else {})
    letters = letters_of(spec, arrays.rows is not None).by_name
    return {name: tuple(split.get(letter, letter) for letter in axes) for name, axes in letters.items()}


def saved_axes(arrays: GroupedArrays, spec: GroupedSpec) -> dict[str, tuple[str, ...]]:
    """The axes of the residuals that kernels save for the backward."""
    width = arrays.right.shape[-2 if spec.transpose_rhs else -1]
    split = {HALVES: "N", INTERLEAVED: f"H{columns(width, spec)}"}
    letter = "N" if has_blocks(spec) else split.get(str(spec.gated), "bN")
    return dict.fromkeys(spec.saved, ("M", letter))


def has_blocks(spec: GroupedSpec) -> bool:
    """Returns whether columns of a right side share scales, so that no mesh may split them."""
    return spec.form is not None and spec.form.block[0] != 1


def right_of(arrays: GroupedArrays, spec: GroupedSpec, up: bool = False) -> Any:
    """The right side as an array or, if it is quantised, as a weight whose numbers are in the dtype of the left side."""
    if spec.form is None:
        return arrays.up_right if up else arrays.right
    codes, scales, zeros, factor = (getattr(arrays, f"up_{n}" if up else n) for n in QUANTISED)
    factor = None if factor is None else lax.bitcast_convert_type(factor, jnp.uint32)
    return QuantizedWeight(codes, scales, zeros, factor, spec.form, arrays.lhs.dtype)


def is_partial(arrays: GroupedArrays, spec: GroupedSpec) -> bool:
    """Returns whether the result is a sum over parts of the contracted axis: nothing is added to it or applied to it."""
    return spec.is_linear and arrays.bias is None and spec.form is None


def alike(arrays: GroupedArrays) -> GroupedArrays:
    """Right sides, biases and scales, all with a leading axis or all without."""
    named = {name: x for name in CORES if (x := getattr(arrays, name)) is not None}
    if all(x.ndim == CORES[name] for name, x in named.items()):
        return arrays
    batch = arrays.lhs.shape[0]
    whole = {n: x if x.ndim > CORES[n] else jnp.broadcast_to(x, (batch, *x.shape)) for n, x in named.items()}
    return arrays._replace(**whole)
