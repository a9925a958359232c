"""The tiles of the kernel of few rows, and which are worth timing."""

import dataclasses

import jax.numpy as jnp

from ....dispatch import DeviceFacts, Problem
from ....launch.fields import Checked, Count, Power, Programs, Warps
from ....launch.sizes import cdiv, numbers_of, padded, shared_memory_of
from ....quantised import QuantFormat
from ....quantised.format import form_of
from ..spec import columns_of, FEW_ROWS


@dataclasses.dataclass(frozen=True)
class RowsTile(Checked):
    """A program multiplies `block_m` rows by `block_n` rows of the weights, `block_k` features at a time. With less than 16 rows it multiplies
    without tensor cores. Of quantised weights, `split_k` groups of warps share the features of a tile.

    `hopper_programs`: how many programs of Hopper's kernel of many rows by quantised weights go from tile to tile; 0 for Triton's kernel, with a
    program for each tile."""

    block_m: Power
    block_n: Power
    block_k: Power
    num_warps: Warps
    num_stages: Count
    split_k: Power = 1
    hopper_programs: Programs = 0


def tiles(problem: Problem, device: DeviceFacts) -> list[RowsTile]:
    """The heuristic's first."""
    if problem.flag("weights") is not None:
        return _coded_tiles(problem, device)
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


def _coded_tiles(problem: Problem, device: DeviceFacts) -> list[RowsTile]:
    """Tiles for quantised weights, the heuristic's first."""
    rows, columns = problem.dim("B") * problem.dim("M"), sum(columns_of(problem))
    form, features = form_of(str(problem.flag("weights"))), problem.dim("K")
    # More rows take tensor cores, for any number up to 16 in the same time.
    few = rows <= (4 if form.bits == 4 else 2)
    shapes = _CODED_ONE if few else _CODED_FEW if rows <= 16 else _CODED_MANY
    if few and (form.bits == 4 or rows > 1):  # more work for each byte
        columns = _CODED_ONE[1 if rows <= 2 else 2][0]
    by_size = sorted(shapes, key=lambda shape: abs(columns - shape[0]))
    block_m = min(padded(rows, 1 if few else 16), FEW_ROWS)
    made = []
    for _, n, k, warps, stages, split in by_size:
        k = min(k * 4 // form.bits if few else k, padded(features, 64))
        while k > 1024 and features % k:
            k //= 2
        # Without tensor cores the numbers of a tile are in registers.
        made.append(RowsTile(block_m, min(n, 32 // block_m) if few else n, k, warps, stages, split))
    fits = [tile for tile in made if shared_memory(tile, problem) <= shared_memory_of(device)]
    return list(dict.fromkeys(fits)) or [RowsTile(16, 16, 64, 4, 1)]


_CODED_ONE = numbers_of("4096 4 4096 4 1 1, 14336 8 2048 2 1 1, 65536 4 1024 1 1 1")
_CODED_FEW = numbers_of("4096 16 128 4 3 4, 14336 64 256 4 3 1, 4096 32 128 4 3 4, 14336 64 128 4 3 1")
_CODED_MANY = numbers_of("4096 32 256 4 3 1, 14336 64 128 4 4 1, 65536 128 128 8 3 1")
"""Columns, then rows of the weights, features (of 4 bits, where rows are few), warps, stages and parts of the features, for up to 4, 16 and 64
rows. In order of times on an H200."""


def unit_of(form: QuantFormat, features: int, block_k: int) -> int:
    """The number of features that a thread sums before it scales them: up to 16 bytes of codes that share a scale."""
    unit, columns = 128 // form.bits, form.block[1]
    while unit > block_k or (0 < columns < features and columns % unit):
        unit //= 2
    return unit


def shared_memory(tile: RowsTile, problem: Problem) -> int:
    """The bytes of shared memory of a program, about: the stages that wait for tensor cores."""
    if tile.block_m < 16:
        return 0
    word = problem.flag("weights")
    if word is not None:
        # Rows and codes in stages, and a tile of numbers.
        size, rows = jnp.dtype(problem.dtype("x")).itemsize, tile.block_m * tile.num_stages
        codes = tile.block_n * tile.num_stages * form_of(str(word)).bits // 8
        return tile.split_k * tile.block_k * (rows * size + codes + tile.block_n * size)
    rights = 2 if problem.flag("gated") else 1
    each = (tile.block_m + rights * tile.block_n) * tile.block_k * jnp.dtype(problem.dtype("x")).itemsize
    return each * max(1, tile.num_stages - 1)


def programs_of(rows: int, columns: list[int], tile: RowsTile) -> int:
    return cdiv(rows, tile.block_m) * sum(cdiv(n, tile.block_n) for n in columns)
