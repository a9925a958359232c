"""The launches of both kernels."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...core import Named
from ...launch.pallas import run, TpuLaunch
from ...launch.sizes import cdiv, padded
from ..spec import GroupedSpec
from . import products_kernel, right_kernel
from .products_kernel import CHUNK, Form, INPUTS, SCRATCH
from .right_kernel import RightForm
from .tile_sizes import right_values, TpuTile, values
from .visits import group_visits, row_visits, Visits


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """The groups of a call: `sizes [B, E]`, the rows of each leading axis, and whether every leading axis has matrices of its own."""

    sizes: Array
    rows: int
    mapped: bool

    @property
    def matrices(self) -> int:
        return self.sizes.shape[1] * (self.sizes.shape[0] if self.mapped else 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Products:
    """One launch of the kernel of products, on `B M` rows.

    - `operands`: its arrays by the names of `products_kernel.INPUTS`: `x` and `y [B M, K]`, `w` and `u` `[G,
        K, W]` or, transposed, `[G, W, K]`, and per column `[G, W]`, per contracted row `[G, K]`.
    - `columns`: those of the result, `N`; `shift`: where those of the up side begin in its matrix.
    - `outputs`: the dtypes of the results by the names of `OUTPUTS`.
    """

    operands: Named
    columns: int
    outputs: dict[str, Any]
    spec: GroupedSpec
    shift: int = 0
    operand: str = ""


def products(label: str, work: Products, groups: Groups, tile: TpuTile) -> Named:
    """The results `[B M, N]` by name."""
    operands = {name: work.operands[name] for name in INPUTS if name in work.operands}
    total, inner = operands["x"].shape
    m, n, k = _within(tile, total, work.columns, inner)
    across, down = cdiv(work.columns, n), cdiv(inner, k)
    visits, count = row_visits(groups.sizes, groups.rows, m, groups.mapped)
    # Sums are kept in scratch only if they are made in several steps.
    scratch = SCRATCH[: 1 + _is_gated(operands)] if down > 1 or k > CHUNK else ()
    form = Form((*operands, *work.outputs, *scratch), work.spec, work.operand, m, k, inner)
    transposed = work.spec.transpose_rhs
    at = _index_maps(work.shift // n, transposed)
    matrix = (n, k) if transposed else (k, n)
    shapes = dict.fromkeys(("x", "y"), (m, k)) | dict.fromkeys(("w", "u"), (None, *matrix))
    blocks = {name: (None, 1, k if "row_scale" in name else n) for name in operands} | shapes
    specs = [pl.BlockSpec(blocks[name], at[name]) for name in operands]
    # One row of each group is a block of its own.
    flat = [x[:, None] if x.ndim == 2 and name not in ("x", "y") else x for name, x in operands.items()]
    results = [jax.ShapeDtypeStruct((total, work.columns), dtype) for dtype in work.outputs.values()]
    itemsizes = (operands[name].dtype.itemsize for name in ("x", "w"))
    launch = TpuLaunch(
        kernel=functools.partial(products_kernel.kernel, form),
        name=f"matmul.{label}",
        grid=(across, count, down),
        scalars=len(Visits._fields),
        in_specs=specs,
        out_specs=[pl.BlockSpec((m, n), at["out"])] * len(results),
        outputs=results,
        scratch=[pltpu.VMEM((m, n), jnp.float32)] * len(scratch),
        parallel=(0,),
        temporaries=values(m, n, k, 1 + _is_gated(operands), 1 + ("y" in operands), *itemsizes),
        flops=2 * total * work.columns * inner * (2 if "u" in operands else 1),
        bytes_accessed=_bytes([*flat, *results]),
    )
    return dict(zip(work.outputs, run(launch, [*visits, *flat]), strict=True))


def right_gradient(
    label: str,
    x: Array,
    dz: Array,
    groups: Groups,
    tile: TpuTile,
    operand: str,
    transposed: bool,
    dtype: Any,
) -> Array:
    """`x_g^T dz_g [G, K, W]`, or its transpose, of `x [B M, K]` and `dz [B M, W]` for every matrix."""
    (total, inner), width = x.shape, dz.shape[1]
    m, n, k = _within(tile, total, width, inner)
    visits, count = group_visits(groups.sizes, groups.rows, m, groups.mapped)
    block, shape = ((n, k), (width, inner)) if transposed else ((k, n), (inner, width))
    result = jax.ShapeDtypeStruct((groups.matrices, *shape), dtype)
    launch = TpuLaunch(
        kernel=functools.partial(right_kernel.kernel, RightForm(operand, transposed, m)),
        name=f"matmul.{label}",
        grid=(cdiv(width, n), cdiv(inner, k), count),
        scalars=len(Visits._fields),
        in_specs=[
            pl.BlockSpec((m, k), lambda n, k, v, tile, *_: (tile[v], k)),
            pl.BlockSpec((m, n), lambda n, k, v, tile, *_: (tile[v], n)),
        ],
        out_specs=[
            pl.BlockSpec(
                (None, *block),
                lambda n, k, v, tile, matrix, *_: (matrix[v], n, k) if transposed else (matrix[v], k, n),
            )
        ],
        outputs=[result],
        scratch=[pltpu.VMEM(block, jnp.float32)],
        parallel=(0, 1),
        temporaries=right_values(m, n, k),
        flops=2 * total * width * inner,
        bytes_accessed=_bytes([x, dz, result]),
    )
    return run(launch, [*visits, x, dz])[0]


def _index_maps(shift: int, transposed: bool) -> dict[str, Callable[..., tuple[Any, ...]]]:
    """The index maps of blocks by name: of a column tile, a visit and a step along the contracted axis,
    followed by the table of visits."""
    rows = lambda n, v, k, tile, *_: (tile[v], k)
    matrix = lambda n, v, k, tile, own, *_: (own[v], n, k) if transposed else (own[v], k, n)
    row = lambda n, v, k, tile, own, *_: (own[v], 0, k)
    column = lambda n, v, k, tile, own, *_: (own[v], 0, n)
    shifted = lambda index_map: lambda n, *rest: index_map(n + shift, *rest)
    maps = {"x": rows, "y": rows, "w": matrix, "u": shifted(matrix), "row_scale": row, "other_row_scale": row}
    maps |= {"scale": column, "bias": column, "out": lambda n, v, k, tile, *_: (tile[v], n)}
    return maps | dict.fromkeys(("up_scale", "up_bias"), shifted(column))


MAX_TILES = 8192
"""Tiles of rows in one launch: the table of their visits is in scalar memory, a megabyte."""


def _within(tile: TpuTile, rows: int, columns: int, inner: int) -> tuple[int, int, int]:
    """The sides of tiles, no longer than the axes. So many rows that their tiles are too many for the table share larger ones."""
    block = max(tile.block_m, padded(cdiv(rows, MAX_TILES)))
    return min(block, rows), min(tile.block_n, columns), min(tile.block_k, inner)


def _is_gated(operands: Named) -> bool:
    """Returns whether a step has two products that are kept apart."""
    return "u" in operands and "y" not in operands


def _bytes(arrays: Any) -> int:
    return sum(x.size * jnp.dtype(x.dtype).itemsize for x in arrays)
