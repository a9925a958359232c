"""The host side of Hopper's kernels. They are in Gluon, which is imported when the first of them is launched."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....launch import Launcher, result_like
from ...spec import GroupedArrays
from ..tile_sizes import GroupedTile

_OTHERS = ("GATHERED", "SCALE", "ROW_SCALE", "ELEMENT", "ROWS", "COLUMNS", "SCALES", "ZEROS", "FACTOR")
"""What Triton's kernel can and this one cannot."""


def products(
    launch: Launcher, tile: GroupedTile, outputs: dict[str, jax.ShapeDtypeStruct], **numbers: Any
) -> dict[str, Array]:
    """Launches the kernel of the result and of the gradient of the left side, with the numbers of Triton's."""
    from .products_kernel import hopper_products_kernel

    assert not any(numbers[name] for name in _OTHERS), "left to Triton's kernel by `problem_unfit`"
    own = {name: value for name, value in numbers.items() if name not in _OTHERS}
    return launch(
        hopper_products_kernel, tile, outputs, tile.hopper_programs, B=outputs["out"].shape[0], **own
    )


def right_gradient(
    launch: Launcher, tile: GroupedTile, arrays: GroupedArrays, dz: Array, right: Array, transposed: bool
) -> Array:
    """The gradient of one right side, in its layout: of a transposed one, both factors change places."""
    from .right_kernel import hopper_right_kernel

    left, down, across = arrays.lhs, tile.block_k, tile.block_n
    if transposed:
        left, dz, down, across = dz, left, across, down
    steps, spans = work_of(arrays.sizes, left.shape[1], tile.block_m, right.ndim == 4)
    return launch(
        hopper_right_kernel,
        tile,
        {"dright": result_like(right)},
        tile.hopper_programs,
        {"lhs": left, "dz": dz, "steps": steps, "spans": spans},
        K=left.shape[2],
        N=dz.shape[2],
        DOWN=down,
        ACROSS=across,
        GROUPS=steps.shape[0],
        SPANS=spans.shape[1],
        name="right_kernel",
    )["dright"]


def work_of(sizes: Array, rows: int, block: int, mapped: bool) -> tuple[Array, Array]:
    """The rows that the sum of every matrix is over, the longest first: `[G, 2]`, the matrix and how many blocks of rows it takes, and `[G, S, 2]`,
    the first row and the number of rows of each of its spans. A matrix that leading axes share has a span in each of their `rows`; if they are
    `mapped`, each has matrices of its own."""
    batch, count = sizes.shape
    # Invalid sizes are clipped, so that no span leaves the rows.
    ends = jnp.minimum(jnp.cumsum(jnp.maximum(sizes, 0), -1), rows)  # [B, E]
    starts = jnp.pad(ends, ((0, 0), (1, 0)))[:, :-1]
    spans = jnp.stack([starts + rows * jnp.arange(batch)[:, None], ends - starts], -1)  # [B, E, 2]
    spans = spans.reshape(batch * count, 1, 2) if mapped else spans.swapaxes(0, 1)
    steps = ((spans[..., 1] + block - 1) // block).sum(-1)  # [G]
    # The longest sums begin first, so that no program ends long after the others.
    order = jnp.argsort(-steps, stable=True)
    return jnp.stack([order, steps[order]], -1).astype(jnp.int32), spans[order].astype(jnp.int32)
