"""The description of a float8 product once every argument is resolved.

Letters: `B` merged leading axes, `M` rows of each, `K` features of a row; `N` blocks of `R` rows of the weight that share scales, `G` scales of a
row of the weight. With groups, `E` of them, each with a weight of its own."""

import dataclasses
from typing import NamedTuple

from jax import Array

from ...core.letters import Letters

GROUP = 128
"""Features of a row that share a scale, and products that are summed before their sum is scaled."""
LARGEST = 448.0
"""The largest number of float8_e4m3fn."""


@dataclasses.dataclass(frozen=True)
class ScaledSpec:
    """The static half of a call.

    - `out_dtype`: of the result.
    - `columns`: of the weight, that share a scale, a multiple of `GROUP`; 0 for all.
    """

    out_dtype: str
    columns: int


class ScaledArrays(NamedTuple):
    """The arrays of a call; `*` are the leading axes of `x`. The others have none (or, mapped by `jax.vmap`, all of them)."""

    x: Array  # [*, M, K]
    codes: Array  # [N, R, K] or [E, N, R, K], uint8, the bits of float8_e4m3fn
    scales: Array  # [N, G] or [E, N, G], float32
    x_scale: Array | None = None  # [], float32: of all rows, instead of one per row and group
    sizes: Array | None = None  # int32 [*, E]: rows of each group


LETTERS = Letters.of({"x": "bM K", "codes": "bN R K", "scales": "bN G", "x_scale": "", "out": "bM bN R"})
"""A mesh splits rows, and blocks of rows of the weight: the axes whose letters begin with `b`."""
GROUPED_LETTERS = Letters.of(
    {"x": "M K", "codes": "E bN R K", "scales": "E bN G", "x_scale": "", "sizes": "E", "out": "M bN R"}
)
"""With groups, a mesh splits blocks of rows of the weights only."""
SHARED = frozenset({"codes", "scales", "x_scale"})


def letters_of(is_grouped: bool) -> Letters:
    return GROUPED_LETTERS if is_grouped else LETTERS


def blocks_of(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """The rows `R` of a weight `[out, in]` that share a scale, 1 if blocks do not divide them, and `columns`, by the blocks of its format."""
    rows, columns = (0 if n >= size else n for n, size in zip(block, shape))
    rows = rows or shape[0]
    return (1 if shape[0] % rows else rows), columns
