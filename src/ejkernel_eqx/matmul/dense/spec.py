"""The description of a matmul of rows once every option and layout is resolved.

Everything below the public operation uses only these types. Letters: `B` merged leading axes, `M` rows of each, `K` features of a row, `N0`, `N1`
and `N2` rows of the right sides, which are stored as an `equinox.nn.Linear` stores them, `[out, in]`."""

import dataclasses
import math
from typing import NamedTuple

from jax import Array

from ...core.letters import Letters
from ...dispatch import Problem

FEW_ROWS = 64
"""The largest number of rows for which the time of a call is that of reading the weights."""
RIGHTS: tuple[str, ...] = ("right", "right_1", "right_2")
BIASES: tuple[str, ...] = ("bias", "bias_1", "bias_2")
RESULTS = ("out", "out_1", "out_2")
LEARNED = ("x", *RIGHTS, *BIASES, "norm", "residual")
SHARED = frozenset({*RIGHTS, *BIASES, "norm"})


@dataclasses.dataclass(frozen=True)
class MatmulSpec:
    """The static half of a call.

    - `gated`: whether there are two right sides, of gate and up, and one result.
    - `eps`: of the norm of the rows; `None` without one.
    - `count`: the number of results.
    """

    activation: str | None = None
    gated: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_shift: float = 0.0
    eps: float | None = None
    count: int = 1


class MatmulArrays(NamedTuple):
    """The arrays of a call; `*` are the leading axes of `x` and the residual. The others have none (or, mapped by `jax.vmap`, all of them)."""

    x: Array  # [*, M, K]
    right: Array  # [N0, K], in the dtype of x, as are the other right sides
    right_1: Array | None = None  # [N1, K]
    right_2: Array | None = None  # [N2, K]
    bias: Array | None = None  # [N0], any float dtype, as are the others
    bias_1: Array | None = None
    bias_2: Array | None = None
    norm: Array | None = None  # [K], any float dtype
    residual: Array | None = None  # [*, M, N0], in the dtype of x

    @property
    def rights(self) -> list[Array]:
        return [x for x in (self.right, self.right_1, self.right_2) if x is not None]

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
    return letters_of(spec, is_partial(arrays, spec)).axes_of(arrays)


def columns_of(problem: Problem) -> list[int]:
    """The numbers of rows of the right sides."""
    return [size for name, size in problem.dims if name.startswith("N")]


def sizes_of(arrays: MatmulArrays) -> dict[str, int]:
    """The sizes `B`, `M`, `K`, and `N0`, `N1` and `N2` of the right sides."""
    *lead, rows, features = arrays.x.shape
    size = {"B": math.prod(lead), "M": rows, "K": features}
    return size | {f"N{i}": right.shape[-2] for i, right in enumerate(arrays.rights)}
