"""Many rows by quantised weights: by Hopper's kernel, which makes numbers in its tiles, or by XLA, of floats that a kernel makes before."""

import dataclasses
import math
from typing import Any

from jax import Array

from ....dispatch import DeviceFacts, Problem
from ....launch import gluon_unavailable, Launcher, result
from ....launch.sizes import cdiv, numbers_of
from ....quantised import QuantFormat
from ....quantised.format import form_of
from ...triton.call import kinds_of
from ...triton.floats_kernel import floats_kernel
from .. import xla
from ..spec import CODED, columns_of, MatmulArrays, MatmulSpec, RIGHTS
from .tile_sizes import RowsTile, unit_of

_FLOATS = RowsTile(1, 2, 1024, 4, 1)
"""The tile of the kernel that makes floats."""
_SWIZZLE = 8
"""Tiles of rows that follow one another and share rows of the weight in the cache."""


def constants_of(form: QuantFormat | None, features: int, unit: int) -> dict[str, Any]:
    """How right sides are stored, as the kernels' constants."""
    if form is None:
        return dict.fromkeys(("ELEMENT", "ROWS", "COLUMNS", "SCALE", "UNIT"), 0)
    element, scale = kinds_of(form)
    block = {"ROWS": form.block[0], "COLUMNS": _columns_alike(form, features)}
    return block | {"ELEMENT": element, "SCALE": scale, "UNIT": unit}


def _columns_alike(form: QuantFormat, features: int) -> int:
    """The features that share a scale; 0: all of a row."""
    columns = form.block[1]
    return 0 if columns >= features else columns


def multiply(arrays: MatmulArrays, spec: MatmulSpec, tile: RowsTile | None) -> dict[str, Array]:
    """The results by Hopper's kernel with a tile, or without one by floats. All that surrounds the products is XLA's."""
    if tile is None:
        return xla.apply(*with_floats(arrays, spec))
    return xla.apply(arrays, spec, lambda x: [_product(x, side, spec, tile) for side in _sides(arrays)])


def with_floats(arrays: MatmulArrays, spec: MatmulSpec) -> tuple[MatmulArrays, MatmulSpec]:
    """The call with floats for quantised right sides."""
    if spec.format is None:
        return arrays, spec
    floats = [_floats(side, spec, arrays.x) for side in _sides(arrays)]
    arrays = arrays._replace(**dict.fromkeys(sum(CODED, ())) | dict(zip(RIGHTS, floats)))
    return arrays, dataclasses.replace(spec, format=None)


def _sides(arrays: MatmulArrays) -> list[list[Any]]:
    return [[getattr(arrays, name) for name in names] for names in CODED[: len(arrays.rights)]]


def _launcher(x: Array, side: list[Any], spec: MatmulSpec, unit: int) -> Launcher:
    codes, scales, zeros, factor = side
    arrays = {"x": x, "codes": codes, "scales": scales, "zeros": zeros, "factor": factor}
    numbers = constants_of(spec.format, x.shape[-1], unit) | {"N": codes.shape[-2], "K": x.shape[-1]}
    numbers |= {"ZEROS": zeros is not None, "FACTOR": factor is not None}
    return Launcher("matmul", arrays, numbers, codes)


def _floats(side: list[Any], spec: MatmulSpec, x: Array) -> Array:
    """The numbers of a right side in the dtype of rows, rounded once."""
    assert spec.format is not None
    shape, unit = (*side[0].shape[:-1], x.shape[-1]), unit_of(spec.format, x.shape[-1], _FLOATS.block_k)
    rows = math.prod(shape[:-1])
    programs = cdiv(rows, _FLOATS.block_n) * cdiv(x.shape[-1], _FLOATS.block_k)
    launch = _launcher(x, side, spec, unit)
    return launch(floats_kernel, _FLOATS, {"out": result(*shape, dtype=x.dtype)}, programs, COUNT=rows)["out"]


def _product(x: Array, side: list[Any], spec: MatmulSpec, tile: RowsTile) -> Array:
    from ...triton.hopper.coded_kernel import hopper_coded_kernel

    assert spec.format is not None
    columns = _columns_alike(spec.format, x.shape[-1])
    launch = _launcher(x, side, spec, columns if 0 < columns < tile.block_k else tile.block_k)
    outputs = {"out": result(*x.shape[:-1], side[0].shape[0], dtype=x.dtype)}
    rows = math.prod(x.shape[:-1])
    constants = {"SWIZZLE": _SWIZZLE, "SHARED": tile.split_k == 2}
    return launch(hopper_coded_kernel, tile, outputs, tile.hopper_programs, M=rows, **constants)["out"]


def unfit(problem: Problem, tile: RowsTile) -> str | None:
    """The reason why Hopper's kernel cannot run the problem on any device, or cannot have the tile, as a clause without its subject."""
    word, features = problem.flag("weights"), problem.dim("K")
    if word is None or problem.dtype("x") != "bfloat16":
        return "takes bfloat16 rows and quantised weights"
    form = form_of(str(word))
    columns = _columns_alike(form, features)
    if features * form.bits % 128 or any(n % 8 for n in columns_of(problem)):
        return f"takes codes and results of whole 16 bytes, not {features} features and {columns_of(problem)} rows of weights"
    if columns and (tile.block_k % columns and columns % tile.block_k):
        return f"takes blocks whose columns divide {tile.block_k} or are a multiple of it, not {columns}"
    if max(problem.dim("B") * problem.dim("M"), *columns_of(problem)) > 2**30:
        return "takes up to 2**30 rows"
    fits = (tile.block_n, tile.split_k, tile.num_warps) in ((128, 1, 4), (64, 2, 4))
    if not fits or not 16 <= tile.block_m <= 256 or tile.block_k not in (64, 128, 256):
        words = (
            "4 warps, 16 to 256 rows, 64 to 256 features, and 128 rows of the weight, or 64 with split_k=2"
        )
        return f"has {words}, not {tile}"
    if tile.split_k == 2 and tile.num_stages % 2:
        return f"has an even number of stages with split_k=2, not {tile.num_stages}"
    if (needed := shared_memory_of_hopper(tile, form)) > 227 * 1024:
        return f"takes {needed} bytes of shared memory"
    return None


def is_checked(problem: Problem) -> bool:
    """Returns whether results of Hopper's kernel were checked on a GPU for the format."""
    form = form_of(str(problem.flag("weights")))
    return not form.zeros and form.element != "float8_e5m2"


def is_preferred(problem: Problem) -> bool:
    """Returns whether Hopper's kernel is preferred to Triton's for up to 64 rows: its tiles need many rows of the weight."""
    rows = problem.dim("B") * problem.dim("M")
    return rows > 16 and min(columns_of(problem)) >= 8192 and is_checked(problem)


TILES = numbers_of(
    "256 128 64 4 4 1 47, 128 128 128 4 4 1 30, 64 128 128 4 6 1 23, 16 128 128 4 8 1 23, 128 64 64 4 8 2 22, 64 64 128 4 6 2 13"
)
"""Rows, rows of the weight, features, warps, stages, parts of the features, and the microseconds of a tile of 4,096 features on an H200."""
_MORE = {"int8": 1.0, "uint4": 1.05, "float4_e2m1fn": 1.22}
"""How much longer a tile takes than one of int8, by the element; floats of 8 bits 1.08."""


def ranked(problem: Problem, device: DeviceFacts) -> list[RowsTile | None]:
    """Tiles of Hopper's kernel, and `None` for floats by a kernel, by the time that they are expected to take."""
    rows, columns, features = problem.dim("B") * problem.dim("M"), max(columns_of(problem)), problem.dim("K")
    form, programs = form_of(str(problem.flag("weights"))), device.num_multiprocessors or 132
    more = _MORE.get(form.element, 1.08) * features / 4096
    # Two launches, floats at the speed of memory, and 760 operations a picosecond.
    made = 0.8e-6 if form.bits == 8 else 0.7e-6
    costs: dict[RowsTile | None, float] = {None: 10 + columns * features * (made + rows / 380e6)}
    for *sizes, each in TILES if gluon_unavailable(device) is None else ():
        tile = RowsTile(*sizes, hopper_programs=programs)
        if unfit(problem, tile) is None:
            # The programs with most tiles end last.
            waves = cdiv(cdiv(rows, tile.block_m) * cdiv(columns, tile.block_n), programs)
            costs[tile] = waves * each * more
    order = sorted(costs, key=lambda tile: costs[tile])
    return order[:5] if is_checked(problem) else [None, *(tile for tile in order[:5] if tile)]


def shared_memory_of_hopper(tile: RowsTile, form: QuantFormat) -> int:
    """The bytes of shared memory of a program: stages of rows and codes, results, sums that are handed over, barriers."""
    rows, columns = tile.block_m, tile.block_n
    stages = tile.num_stages * tile.block_k * (2 * rows + columns * form.bits // 8)
    return stages + rows * columns * (2 + 4 if tile.split_k == 2 else 2) + 2048
