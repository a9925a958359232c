"""The tiles of the float8 product, which of them are worth timing, and when Hopper's kernel is used."""

import dataclasses

from ....dispatch import DeviceFacts, Problem
from ....launch import gluon_unavailable
from ....launch.fields import Block, Checked, Count, Programs, Warps
from ....launch.sizes import cdiv, fitting
from ..spec import GROUP

LEAST_ROWS = 129
"""Rows from which on Hopper's kernel is preferred."""


@dataclasses.dataclass(frozen=True)
class ScaledTile(Checked):
    """Platform `"triton"`. A program multiplies `block_m` rows by `block_n` rows of the weight, 128 features at a time. `swizzle` tiles of rows
    that follow one another share rows of the weight in the cache.

    `hopper_programs`: how many programs of Hopper's kernel go from tile to tile, usually one for each multiprocessor; 0 for Triton's kernel, with
    a program for each tile. In Hopper's kernel `num_warps` are those of a consumer, always 4, and two consumers share the rows of a tile."""

    block_m: Block
    block_n: Block
    num_warps: Warps
    num_stages: Count
    swizzle: Count = 8
    hopper_programs: Programs = 0


SMALLEST = ScaledTile(16, 32, 4, 2)

# Rows from which on tiles are preferred; rows, rows of the weight, warps, stages and swizzle; best first.
_TILES: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = (
    (129, ((64, 128, 4, 4), (128, 128, 8, 4), (128, 128, 4, 4), (128, 128, 8, 3, 16))),
    (33, ((64, 128, 4, 4), (64, 64, 4, 5), (128, 128, 8, 4), (64, 128, 4, 3), (64, 256, 8, 3))),
    (0, ((16, 64, 4, 5), (16, 128, 4, 4), (16, 32, 4, 6), (32, 64, 4, 5), (16, 128, 8, 3))),
)  # fmt: skip
_HOPPER = ((256, 128, 4, 4, 8), (256, 128, 4, 4, 4), (128, 128, 4, 6, 8))


def tiles(problem: Problem, device: DeviceFacts) -> list[ScaledTile]:
    """The heuristic's first."""
    rows = _rows(problem)
    made = [ScaledTile(*sizes) for sizes in next(sizes for least, sizes in _TILES if rows >= least)]
    if not_chosen(problem, device) is None:
        programs = device.num_multiprocessors or 132
        hopper = [ScaledTile(*sizes, hopper_programs=programs) for sizes in _HOPPER]
        # Tiles of 256 rows where there are two of them, and more than half the programs have one.
        enough = 2 * cdiv(rows, 256) * cdiv(problem.dim("N"), 128) > programs
        made = (hopper if rows >= 512 and enough else hopper[2:]) + made
    return fitting(made, shared_memory, device) or [SMALLEST]


def not_chosen(problem: Problem, device: DeviceFacts) -> str | None:
    """The reason why Triton's kernel is preferred, as a clause without its subject; `None` if it is not."""
    if _rows(problem) < LEAST_ROWS:
        return f"is for {LEAST_ROWS} rows or more"
    return gluon_unavailable(device) or unfit(problem)


def _rows(problem: Problem) -> int:
    """Those of a weight, on average."""
    return problem.dim("B") * problem.dim("M") // max(dict(problem.dims).get("E", 0), 1)


def unfit(problem: Problem, tile: ScaledTile | None = None) -> str | None:
    """The reason why Hopper's kernel cannot run the problem on any device, or cannot have the tile."""
    size = {name: problem.dim(name) for name in "BMKN"}
    rows, columns = map(int, str(problem.flag("block")).split("x"))
    if columns and rows % GROUP:
        return f"takes scales per channel or for blocks of whole {GROUP} rows, not of {rows}x{columns}"
    if problem.dtype("out") == "float32":
        return "writes bfloat16 and float16, not float32"
    if size["K"] % 16 or size["N"] % 8:
        return f"takes rows of whole 16 bytes, not of {size['K']} codes and {size['N']} numbers"
    if size["B"] * size["M"] > 2**30 or size["N"] * max(dict(problem.dims).get("E", 0), 1) > 2**30:
        return "takes up to 2**30 rows"
    if tile and ((tile.block_n, tile.num_warps) != (128, 4) or tile.block_m not in (128, 256)):
        return f"has tiles of 128x128 and 256x128 with num_warps=4, not {tile.block_m}x{tile.block_n} with {tile.num_warps}"
    return None


def shared_memory(tile: ScaledTile) -> int:
    """The bytes of shared memory of a program, about: stages, and what Hopper's kernel stores at once."""
    stages = tile.num_stages * (tile.block_m + tile.block_n) * GROUP
    return stages + (2 * 16_384 + 512 if tile.hopper_programs else 0)
