"""Many rows by quantised weights: by Hopper's kernel, which makes numbers in its tiles, or by XLA, of floats that a kernel makes before."""

import dataclasses
from typing import Any

from jax import Array

from ....dispatch import DeviceFacts, Problem
from ....launch import gluon_unavailable, Launcher, result
from ....launch.sizes import cdiv
from ....quantised import QuantFormat
from ....quantised.format import BITS, form_of, SCALES
from ...triton.floats_kernel import floats_kernel
from .. import xla
from ..spec import CODED, columns_of, MatmulArrays, MatmulSpec, RIGHTS
from .tile_sizes import RowsTile

_FLOATS = RowsTile(1, 2, 1024, 4, 1)
"""The tile of the kernel that makes floats."""


def numbers_of(form: QuantFormat | None, features: int, unit: int) -> dict[str, Any]:
    """How right sides are stored, as the kernels' constants: elements and dtypes of scales by their places."""
    if form is None:
        return dict.fromkeys(("ELEMENT", "ROWS", "COLUMNS", "SCALE", "UNIT"), 0)
    rows, columns = form.block
    columns = 0 if columns >= features else columns
    places = {"ELEMENT": 1 + [*BITS].index(form.element), "SCALE": [*SCALES].index(form.scale)}
    return places | {"ROWS": rows, "COLUMNS": columns, "UNIT": unit}


def multiply(arrays: MatmulArrays, spec: MatmulSpec, tile: RowsTile | None) -> dict[str, Array]:
    """The results by Hopper's kernel with a tile, or without one by floats. All that surrounds the products is XLA's."""
    form, features = spec.format, arrays.x.shape[-1]
    assert form is not None
    sides = [[getattr(arrays, name) for name in names] for names in CODED[: len(arrays.rights)]]
    if tile is None:
        floats = [_floats(side, form, features, arrays.x.dtype) for side in sides]
        empty = dict.fromkeys(sum(CODED, ()))
        arrays = arrays._replace(**empty | dict(zip(RIGHTS, floats)))
        return xla.apply(arrays, dataclasses.replace(spec, format=None))
    return xla.apply(arrays, spec, lambda x: [_product(x, side, form, tile) for side in sides])


def _launcher(side: list[Any], form: QuantFormat, features: int, unit: int, x: Any = None) -> Launcher:
    codes, scales, zeros, factor = side
    arrays = {"x": x, "codes": codes, "scales": scales, "zeros": zeros, "factor": factor}
    numbers = numbers_of(form, features, unit) | {"N": codes.shape[0], "K": features}
    numbers |= {"ZEROS": zeros is not None, "FACTOR": factor is not None}
    return Launcher("matmul", arrays, numbers, codes)


def _floats(side: list[Any], form: QuantFormat, features: int, dtype: Any) -> Array:
    """The numbers of a right side, rounded once."""
    unit, rows = 128 // form.bits, side[0].shape[0]
    while form.block[1] % unit and form.block[1] < features:
        unit //= 2
    programs = cdiv(rows, _FLOATS.block_n) * cdiv(features, _FLOATS.block_k)
    outputs = {"out": result(rows, features, dtype=dtype)}
    launch = _launcher(side, form, features, unit)
    return launch(floats_kernel, _FLOATS, outputs, programs, COUNT=rows)["out"]


def _product(x: Array, side: list[Any], form: QuantFormat, tile: RowsTile) -> Array:
    from ...triton.hopper.coded_kernel import hopper_coded_kernel

    *lead, features = x.shape
    rows, columns = x.size // features, form.block[1]
    unit = columns if 0 < columns < tile.block_k else tile.block_k
    outputs = {"out": result(*lead, side[0].shape[0], dtype=x.dtype)}
    launch = _launcher(side, form, features, unit, x)
    return launch(hopper_coded_kernel, tile, outputs, tile.hopper_programs, M=rows)["out"]


def unfit(problem: Problem, tile: RowsTile) -> str | None:
    """The reason why Hopper's kernel cannot run the problem on any device, or cannot have the tile, as a clause without its subject."""
    word, features = problem.flag("weights"), problem.dim("K")
    if word is None or problem.dtype("x") != "bfloat16":
        return "takes bfloat16 rows and quantised weights"
    form, columns = form_of(str(word)), form_of(str(word)).block[1]
    if features * form.bits % 128 or any(n % 8 for n in columns_of(problem)):
        return f"takes codes and results of whole 16 bytes, not {features} features and {columns_of(problem)} rows of weights"
    if columns < features and columns and (tile.block_k % columns and columns % tile.block_k):
        return f"takes blocks whose columns divide {tile.block_k} or are a multiple of it, not {columns}"
    if max(problem.dim("B") * problem.dim("M"), *columns_of(problem)) > 2**30:
        return "takes up to 2**30 rows"
    if (tile.block_n, tile.num_warps, tile.split_k) != (128, 4, 1) or not 16 <= tile.block_m <= 256 or tile.block_k not in (64, 128):
        return f"has tiles of 16 to 256 rows, 128 rows of weights, 64 or 128 features and 4 warps, not {tile}"
    return None


def hopper_tiles(problem: Problem, device: DeviceFacts) -> list[RowsTile]:
    """Tiles of Hopper's kernel worth timing, the best first; none where it cannot run."""
    rows = problem.dim("B") * problem.dim("M")
    programs = device.num_multiprocessors or 132
    made = [RowsTile(*sizes, hopper_programs=programs) for sizes in _HOPPER if sizes[0] < 2 * rows]
    return [tile for tile in made if gluon_unavailable(device) is None and unfit(problem, tile) is None]


_HOPPER = ((256, 128, 64, 4, 4), (128, 128, 64, 4, 8), (64, 128, 128, 4, 6))
