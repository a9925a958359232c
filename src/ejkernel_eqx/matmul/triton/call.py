"""The facts that the launches of one call share: its configuration, its arrays, and the kernel of products."""

import dataclasses
from typing import Any

import jax
from jax import Array

from ...launch import Launcher
from ...launch.fields import Checked, Float32Dot
from ...launch.sizes import cdiv, padded
from ...quantised.format import BITS, QuantFormat, SCALES
from ..spec import GroupedArrays, GroupedSpec
from . import forward_kernel
from .hopper.call import products
from .tile_sizes import GroupedTile

OPERANDS = {"float32": 0, "float16": 1, "bfloat16": 2}
ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}

_PLAIN = dict.fromkeys(("GATHERED", "BIAS", "UP_BIAS", "SCALE", "ROW_SCALE", "SAVE"), False)
_PLAIN |= dict.fromkeys(("ELEMENT", "ROWS", "COLUMNS", "SCALES"), 0) | {"ZEROS": False, "FACTOR": False}
_PLAIN |= {"KIND": 0, "ACTIVATION": 0, "ALPHA": 1.0, "LIMIT": 0.0, "UP_SHIFT": 0.0}
"""The numbers of a product that nothing follows."""


@dataclasses.dataclass(frozen=True)
class TritonConfig(Checked):
    """Tiles of the result, of the gradient of the left side, and of that of right sides, whose `block_m` are rows of one turn; and for each of
    them which kernel."""

    forward: GroupedTile
    lhs: GroupedTile
    rhs: GroupedTile
    float32_dot: Float32Dot = "tf32x3"
    fast_sigmoid: bool = True
    """Whether the activation uses NVIDIA's approximate instructions (error 2e-7)."""


def grouped(
    launch: Launcher, tile: GroupedTile, outputs: dict[str, jax.ShapeDtypeStruct], **numbers: Any
) -> dict[str, Array]:
    """Launches the forward kernel: Hopper's, or Triton's with one program for every tile that there may be.
    `numbers`: the sizes, and what differs from a plain product."""
    numbers = _PLAIN | numbers
    batch, rows, width = outputs["out"].shape
    if tile.hopper_programs:
        return products(launch, tile, outputs, **numbers)
    count = int(launch.numbers["E"])
    # Rows past the last group are tiles too. Tiles of one row are never cut.
    most = rows // tile.block_m + (min(count + 1, rows) if tile.block_m > 1 else 0)
    programs = batch * most * cdiv(width, tile.block_n)
    return launch(forward_kernel.grouped_kernel, tile, outputs, programs, TILES=most, **numbers)


def kinds_of(form: QuantFormat) -> tuple[int, int]:
    """The element and the dtype of scales of a format, as kernels know them: by their places."""
    return 1 + [*BITS].index(form.element), [*SCALES].index(form.scale)


def stored_numbers(arrays: GroupedArrays, spec: GroupedSpec) -> dict[str, Any]:
    """The constants of how right sides are stored."""
    form = spec.form
    if form is None:
        return {}
    kinds = dict(zip(("ELEMENT", "SCALES"), kinds_of(form)))
    blocks = {"ROWS": form.block[0], "COLUMNS": form.block[1], "ZEROS": form.zeros}
    return kinds | blocks | {"FACTOR": arrays.factor is not None}


def launcher(arrays: GroupedArrays, config: TritonConfig) -> Launcher:
    """The facts that the kernels of one call share."""
    count = arrays.sizes.shape[-1]
    numbers = {
        "M": arrays.num_rows,
        "L": arrays.lhs.shape[1],
        "E": count,
        "MAPPED": arrays.right.ndim == 4,
        "FAST": config.fast_sigmoid,
        "OPERAND": OPERANDS[arrays.lhs.dtype.name],
        "PRECISION": config.float32_dot,
        "BLOCK_E": padded(count + 1),
    }
    named = arrays._asdict() | {"right": arrays.right, "up": arrays.up_right, "other_lhs": None}
    return Launcher("matmul", named, numbers, arrays.lhs)
