"""Configurations of the Triton platform: which tiles a problem prefers, and the shared memory that they take.

A whole walk over time needs one launch, in which every program streams the recurrent weight from the cache in each step. That is best for
small weights and many rows. With one launch per step the columns of the weight are distributed over programs, which suits large weights.
"""

import dataclasses
from typing import Annotated

from ...dispatch import DeviceFacts, Problem
from ...launch.fields import Block, check_fields, Count, Float32Dot, one_of, Warps
from ...launch.sizes import fitting, padded, rows_of, too_large
from ..spec import GATES


@dataclasses.dataclass(frozen=True)
class CellTile:
    """A program's tile: `block_m` rows by `block_n` hidden features (of every gate), in products over `block_k` features at a time."""

    block_m: Block
    block_n: Block
    block_k: Block
    num_warps: Warps
    num_stages: Count = 1
    form: Annotated[str, one_of("whole", "per_step", "persistent")] = "whole"
    """`"whole"`: one launch, whose programs process all features of their rows over all steps. The others have a program for every tile:
    `"per_step"` in a launch for each step, `"persistent"` in one launch, with the weight on the chip and a barrier between steps."""

    __post_init__ = check_fields


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    forward: CellTile
    backward: CellTile
    float32_dot: Float32Dot = "tf32x3"
    fast_sigmoid: bool = True
    """Whether sigmoid and tanh use NVIDIA's approximate instructions (error 2e-7)."""
    grid_barrier: bool = True
    """Whether programs of the persistent form wait for each other; otherwise every step is a launch, as where programs do not run at the same time."""

    __post_init__ = check_fields


KERNELS = ("forward", "backward")
_SMALLEST = CellTile(16, 16, 16, 4)
_STREAMED = 512 * 1024
"""The largest weight in bytes that a program streams in every step by default."""

# Block sizes, warps and stages by kernel, the preferred first. The forward has a sum for every gate, the backward a single one.
_WHOLE = {
    "forward": (
        (16, 256, 32, 8, 3),
        (16, 128, 32, 8, 3),
        (16, 128, 64, 8, 2),
        (32, 128, 32, 8, 3),
        (32, 64, 64, 8, 3),
        (16, 128, 32, 4, 4),
    ),
    "backward": (
        (16, 256, 64, 8, 4),
        (16, 128, 64, 4, 4),
        (16, 256, 32, 8, 6),
        (32, 128, 64, 8, 4),
        (32, 64, 64, 4, 4),
        (16, 64, 128, 4, 4),
    ),
}
_PER_STEP = {
    "forward": ((32, 16, 128, 4, 3), (64, 16, 128, 4, 3), (16, 32, 128, 4, 3), (32, 32, 64, 4, 4)),
    "backward": ((32, 16, 128, 4, 4), (64, 16, 128, 4, 4), (16, 32, 128, 4, 4), (32, 32, 128, 4, 4)),
}
_TILES = {"whole": _WHOLE, "per_step": _PER_STEP}


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first: tiles of the preferred kind, then of the other."""
    is_nvidia = device.vendor == "nvidia"
    precision = "tf32x3" if is_nvidia else "ieee"
    forms = ["whole", "per_step"] if _weight_bytes(problem) <= _STREAMED else ["per_step", "whole"]
    found: list[TritonConfig] = []
    for form in forms:
        columns = [_tiles(kernel, form, problem, device) for kernel in KERNELS]
        pairs = rows_of(columns)
        found += [TritonConfig(first, second, precision, is_nvidia) for first, second in pairs]
    return list(dict.fromkeys(found))


def config_unsupported(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str | None:
    """Why tiles cannot fit the device's shared memory, by an upper estimate; the smallest tiles are left to the compiler."""
    for kernel in KERNELS:
        tile: CellTile = getattr(config, kernel)
        sizes = f"{tile.block_m}x{tile.block_n}x{tile.block_k}"
        reason = too_large(kernel, sizes, tile.num_stages, _memory(kernel, problem, tile), device)
        if reason is not None and dataclasses.replace(tile, form="whole") != _SMALLEST:
            return reason
    return None


def _tiles(kernel: str, form: str, problem: Problem, device: DeviceFacts) -> list[CellTile]:
    """The tiles that fit, narrowed to the rows and features that exist."""
    features, rows = padded(problem.dim("H")), padded(_rows(problem))
    depth = padded(_gates(problem) * problem.dim("H")) if kernel == "backward" else features
    tiles = [
        CellTile(min(m, rows), min(n, features), min(k, depth), warps, stages, form)
        for m, n, k, warps, stages in _TILES[form][kernel]
    ]
    # With fewer stages where a wider dtype, or a smaller shared memory, needs it.
    tiles += [dataclasses.replace(tile, num_stages=2) for tile in tiles]
    tiles += [dataclasses.replace(tile, block_k=16, num_stages=2) for tile in tiles]
    found = fitting(tiles, lambda tile: _memory(kernel, problem, tile), device)
    most = len(_TILES[form][kernel])
    return list(dict.fromkeys(found))[:most] or [dataclasses.replace(_SMALLEST, form=form)]


def _memory(kernel: str, problem: Problem, tile: CellTile) -> int:
    """An estimate of the shared memory of a program: the operands of all stages, or a sum that changes its layout. The instructions for fewer than
    64 rows hold one stage in registers."""
    size = {"float32": 4}.get(problem.dtype("x"), 2)
    weights = _gates(problem) if kernel == "forward" else 1
    stage = tile.block_k * (weights * tile.block_n + tile.block_m) * size
    stages = tile.num_stages if tile.block_m >= 64 else max(tile.num_stages - 1, 1)
    return max(stages * stage, 4 * tile.block_m * tile.block_n)


def _gates(problem: Problem) -> int:
    return GATES[str(problem.flag("cell"))]


def _weight_bytes(problem: Problem) -> int:
    size = {"float32": 4}.get(problem.dtype("x"), 2)
    return _gates(problem) * problem.dim("H") ** 2 * size


def _rows(problem: Problem) -> int:
    return problem.dim("B") * (problem.dim("S") if problem.flag("packed") == "offsets" else 1)
