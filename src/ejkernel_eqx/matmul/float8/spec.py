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
    - `turned`: whether rows lie as `[K, M]`, and a weight of floats as `[K, N]`; rows only together with the weight.
    """

    out_dtype: str
    columns: int
    turned: tuple[bool, bool] = (False, False)


class ScaledArrays(NamedTuple):
    """The arrays of a call; `*` are the leading axes of `x`. The others have none (or, mapped by `jax.vmap`, all of them)."""

    x: Array  # [*, M, K]
    codes: Array | None = None  # [N, R, K] or [E, N, R, K], uint8, the bits of float8_e4m3fn
    scales: Array | None = None  # [N, G] or [E, N, G], float32
    x_scale: Array | None = None  # [], float32: of all rows, instead of one per row and group
    sizes: Array | None = None  # int32 [*, E]: rows of each group
    floats: Array | None = None  # [N, K]: instead of codes and scales, to round by blocks of GROUP x GROUP


LETTERS = Letters.of({"x": "bM K", "codes": "bN R K", "scales": "bN G", "x_scale": "", "out": "bM bN R"})
"""A mesh splits rows, and blocks of rows of the weight: the axes whose letters begin with `b`."""
GROUPED_LETTERS = Letters.of(
    {"x": "M K", "codes": "E bN R K", "scales": "E bN G", "x_scale": "", "sizes": "E", "out": "M bN R"}
)
"""With groups, a mesh splits blocks of rows of the weights only."""
SHARED = frozenset({"codes", "scales", "x_scale", "floats"})


def letters_of(is_grouped: bool) -> Letters:
    return GROUPED_LETTERS if is_grouped else LETTERS


def letters_by(arrays: ScaledArrays, spec: ScaledSpec) -> Letters:
    """The letters of a call. Devices have whole floats; if both sides are turned, as in the gradient of a weight, each has some of the rows that
    are summed over."""
    if arrays.floats is None:
        return letters_of(arrays.sizes is not None)
    if all(spec.turned):
        return Letters.of({"x": "bK M", "floats": "bK N", "out": "M N"})
    return Letters.of({"x": "bM K", "floats": "K N" if spec.turned[1] else "N K", "out": "bM N"})


def is_partial(arrays: ScaledArrays, spec: ScaledSpec) -> bool:
    """Whether a mesh may split the summed axis."""
    return arrays.floats is not None and all(spec.turned)


def rows_of_block(rows: int) -> int:
    """The rows `R` of a weight of floats that are said to share a scale: those of a block, if blocks divide the rows."""
    return 1 if rows % GROUP else GROUP


def blocks_of(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """The rows `R` of a weight `[out, in]` that share a scale, 1 if blocks do not divide them, and `columns`, by the blocks of its format."""
    rows, columns = (0 if n >= size else n for n, size in zip(block, shape))
    rows = rows or shape[0]
    return (1 if shape[0] % rows else rows), columns
