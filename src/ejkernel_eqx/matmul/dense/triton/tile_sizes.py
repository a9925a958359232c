"""The tiles of the kernel of few rows, and which are worth timing."""

import dataclasses

import jax.numpy as jnp

from ....dispatch import DeviceFacts, Problem
from ....launch.fields import check_fields, Count, Power, Warps
from ....launch.sizes import cdiv, padded, shared_memory_of
from ..spec import columns_of, FEW_ROWS


@dataclasses.dataclass(frozen=True)
class RowsTile:
    """A program multiplies `block_m` rows by `block_n` rows of the weights, `block_k` features at a time. With less than 16 rows it multiplies
    without tensor cores."""

    block_m: Power
    block_n: Power
    block_k: Power
    num_warps: Warps
    num_stages: Count

    __post_init__ = check_fields


def tiles(problem: Problem, device: DeviceFacts) -> list[RowsTile]:
    """The heuristic's first."""
    rows, columns = problem.dim("B") * problem.dim("M"), sum(columns_of(problem))
    shapes = _ONE if rows <= 2 else _FEW if rows <= 16 else _MANY
    # As many programs as keep the memory busy: with few columns, each has fewer of them.
    by_size = sorted(shapes, key=lambda shape: abs(columns - shape[0]))
    block_m = min(padded(rows, 1 if rows <= 2 else 16), FEW_ROWS)
    width = 1 << (problem.dim("K").bit_length() - 1)
    made = [RowsTile(block_m, n, min(k, max(width, 16)), warps, stages) for _, n, k, warps, stages in by_size]
    fits = [tile for tile in made if shared_memory(tile, problem) <= shared_memory_of(device)]
    return list(dict.fromkeys(fits)) or [RowsTile(block_m, 16, 32, 4, 1)]


_ONE = ((1024, 2, 1024, 4, 1), (4096, 4, 512, 2, 1), (28672, 8, 512, 4, 2), (1024, 1, 1024, 2, 1))
_FEW = ((1024, 16, 256, 2, 4), (4096, 32, 128, 4, 5), (768, 8, 512, 2, 3), (28672, 32, 256, 4, 3))
_MANY = ((1024, 16, 256, 4, 3), (4096, 32, 128, 4, 4), (28672, 64, 128, 8, 3), (4096, 32, 64, 4, 6))
"""Columns for which a tile was the best on an H200, then rows of the weights, features, warps and stages; for up to 2, 16 and 64 rows."""


def shared_memory(tile: RowsTile, problem: Problem) -> int:
    """The bytes of shared memory of a program, about: the stages that wait for tensor cores."""
    if tile.block_m < 16:
        return 0
    rights = 2 if problem.flag("gated") else 1
    each = (tile.block_m + rights * tile.block_n) * tile.block_k * jnp.dtype(problem.dtype("x")).itemsize
    return each * max(1, tile.num_stages - 1)


def programs_of(rows: int, columns: list[int], tile: RowsTile) -> int:
    return cdiv(rows, tile.block_m) * sum(cdiv(n, tile.block_n) for n in columns)
