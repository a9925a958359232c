"""The description of a matmul of rows once every option and layout is resolved.

Everything below the public operation uses only these types. Letters: `B` merged leading axes, `M` rows of each, `K` features of a row, `N0`, `N1`
and `N2` rows of the right sides, which are stored as an `equinox.nn.Linear` stores them, `[out, in]`."""

import dataclasses
import math
from typing import Any, NamedTuple

from jax import Array

from ...core.letters import Letters
from ...dispatch import Problem
from ...quantised import QuantFormat, QuantizedWeight

FEW_ROWS = 64
"""The largest number of rows for which a kernel reads weights at the speed of memory."""
RIGHTS: tuple[str, ...] = ("right", "right_1", "right_2")
BIASES: tuple[str, ...] = ("bias", "bias_1", "bias_2")
RESULTS = ("out", "out_1", "out_2")
CODED: tuple[tuple[str, ...], ...] = tuple(
    tuple(f"{name}{i}" for name in ("codes", "scales", "zeros", "factor")) for i in ("", "_1", "_2")
)
"""The arrays of quantised right sides."""
LEARNED = ("x", *RIGHTS, *BIASES, "norm", "residual")
SHARED = frozenset({*RIGHTS, *BIASES, "norm", *sum(CODED, ())})


@dataclasses.dataclass(frozen=True)
class MatmulSpec:
    """The static half of a call.

    - `gated`: whether there are two right sides, of gate and up, and one result.
    - `eps`: of the norm of the rows; `None` without one.
    - `count`: the number of results.
    - `format`: that of quantised right sides; `None` for arrays of floats.
    """

    activation: str | None = None
    gated: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_shift: float = 0.0
    eps: float | None = None
    count: int = 1
    format: QuantFormat | None = None


class MatmulArrays(NamedTuple):
    """The arrays of a call; `*` are the leading axes of `x` and the residual. The others have none (or, mapped by `jax.vmap`, all of them)."""

    x: Array  # [*, M, K]
    right: Array | None = None  # [N0, K], in the dtype of x, as are the other right sides
    right_1: Array | None = None  # [N1, K]
    right_2: Array | None = None  # [N2, K]
    bias: Array | None = None  # [N0], any float dtype, as are the others
    bias_1: Array | None = None
    bias_2: Array | None = None
    norm: Array | None = None  # [K], any float dtype
    residual: Array | None = None  # [*, M, N0], in the dtype of x
    # Instead of right sides, where they are quantised: the fields of their `QuantizedWeight`s.
    codes: Array | None = None  # [N0, K], or [N0, K / 2] with 4 bits
    codes_1: Array | None = None
    codes_2: Array | None = None
    scales: Array | None = None  # [blocks of N0, blocks of K]
    scales_1: Array | None = None
    scales_2: Array | None = None
    zeros: Array | None = None  # as scales
    zeros_1: Array | None = None
    zeros_2: Array | None = None
    factor: Array | None = None  # []
    factor_1: Array | None = None
    factor_2: Array | None = None

    @property
    def rights(self) -> list[Any]:
        """The right sides as they are stored, in floats or codes."""
        floats, codes = (self.right, self.right_1, self.right_2), (self.codes, self.codes_1, self.codes_2)
        return [x for x in (floats if self.codes is None else codes) if x is not None]

    def in_dtype(self, dtype: Any, spec: MatmulSpec) -> list[Array]:
        """The right sides as floats of a dtype."""
        if spec.format is None:
            return [right.astype(dtype) for right in self.rights]
        fields = [[getattr(self, name) for name in names] for names in CODED[: len(self.rights)]]
        return [QuantizedWeight(*each, format=spec.format, dtype=dtype).astype(dtype) for each in fields]

    @property
    def biases(self) -> list[Array | None]:
        return [self.bias, self.bias_1, self.bias_2]


def is_partial(arrays: MatmulArrays, spec: MatmulSpec) -> bool:
    """Returns whether the results are sums over parts of the contracted axis: nothing else is computed."""
    others = (*arrays.biases, arrays.norm, arrays.residual, spec.activation, spec.eps)
    return not spec.gated and all(x is None for x in others)


def letters_of(spec: MatmulSpec, partial: bool) -> Letters:
    """The letters of a call's arrays. A mesh splits axes whose letters begin with `b`: rows, and rows of the right sides."""
    inner = "bK" if partial else "K"
    outer = ("bN0", "bN0" if spec.gated else "bN1", "bN2")
    axes = {"x": f"bM {inner}", "norm": "K", "residual": "bM bN0"}
    axes |= {name: f"{n} {inner}" for name, n in zip(RIGHTS, outer)}
    axes |= dict(zip(BIASES, outer)) | {name: f"bM {n}" for name, n in zip(RESULTS, outer)}
    return Letters.of(axes)


def axes_of(arrays: MatmulArrays, spec: MatmulSpec) -> dict[str, tuple[str, ...]]:
    partial, form = is_partial(arrays, spec), spec.format
    axes = letters_of(spec, partial).axes_of(arrays)
    if form is None:
        return axes
    # Codes and scales are shorter than what they stand for. Axes of one group are split together, at the bounds of blocks.
    features, columns = arrays.x.shape[-1], form.block[1]
    inside = lambda n: f"H{n}" if partial and (not columns or features % columns == 0) else f"K{n}"
    # Of rows that share a scale with others, none are split.
    names = {f"bN{i}": f"N{i}" for i in range(3)} if form.block[0] > 1 else {}
    axes = {name: tuple(names.get(letter, letter) for letter in letters) for name, letters in axes.items()}
    axes["x"] = (*axes["x"][:-1], inside(features))
    for right, fields, stored in zip(RIGHTS, CODED, arrays.rights):
        codes, scales, zeros, factor = fields
        blocks = getattr(arrays, scales).shape[-1]
        rows = axes[right][0] if form.block[0] == 1 else f"R{right}"
        axes[codes] = (axes[right][0], inside(stored.shape[-1]) if partial else "P")
        axes[scales] = axes[zeros] = (rows, inside(blocks) if partial else "G")
        axes[factor] = ()
    return axes


def columns_of(problem: Problem) -> list[int]:
    """The numbers of rows of the right sides."""
    return [size for name, size in problem.dims if name.startswith("N")]


def is_of_many(problem: Problem) -> bool:
    """Returns whether many rows are multiplied by quantised weights."""
    return problem.flag("weights") is not None and problem.dim("B") * problem.dim("M") > FEW_ROWS


def sizes_of(arrays: MatmulArrays) -> dict[str, int]:
    """The sizes `B`, `M`, `K`, and `N0`, `N1` and `N2` of the right sides."""
    *lead, rows, features = arrays.x.shape
    size = {"B": math.prod(lead), "M": rows, "K": features}
    return size | {f"N{i}": right.shape[-2] for i, right in enumerate(arrays.rights)}
