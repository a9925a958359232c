"""Configurations of the Triton platform: which tiles a problem prefers, and the shared memory that they take.

A whole walk over time needs one launch, in which every program streams the recurrent weight from the cache in each step. That is best for
small weights and many rows. With one launch per step the columns of the weight are distributed over programs, which suits large weights. Where all
programs run at the same time and their columns fit in shared memory, the persistent form needs one launch and loads the weight once.
"""

import dataclasses
from typing import Annotated

from ...dispatch import DeviceFacts, Problem
from ...launch.fields import Block, check_fields, Count, Float32Dot, one_of, Warps, whole
from ...launch.sizes import cdiv, fitting, padded, rows_of, too_large
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
    concurrent_programs: Annotated[int, whole(0)] = 0
    """The number of programs that are certain to run at the same time: at most the device's multiprocessors. A launch of the persistent form with
    more of them, which must not wait for each other, becomes a launch for each step."""

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
# Block sizes and warps; as deep and as early as memory allows.
_PERSISTENT = {
    "forward": ((32, 16, 8), (16, 64, 8), (64, 16, 8), (16, 32, 8), (32, 32, 8), (32, 16, 4), (64, 32, 8)),
    "backward": ((32, 16, 8), (16, 32, 8), (16, 64, 8), (64, 16, 8), (32, 64, 8), (64, 32, 8), (64, 64, 8)),
}
_DEPTHS = ((1024, 1), (512, 2), (256, 3), (256, 2), (128, 3), (128, 2), (64, 2), (32, 1))
"""Depths of blocks, and how many products early they are loaded."""
_EARLY = 256
"""The most numbers that a thread loads before the products that read them."""
_TILES = {"whole": _WHOLE, "per_step": _PER_STEP}


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first: tiles of the preferred form, then of the others."""
    is_nvidia = device.vendor == "nvidia"
    precision = "tf32x3" if is_nvidia else "ieee"
    others = ["whole", "per_step"] if _weight_bytes(problem) <= _STREAMED else ["per_step", "whole"]
    columns = [[_tiles(kernel, form, problem, device) for kernel in KERNELS] for form in others]
    resident = [_persistent_tiles(kernel, problem, device) for kernel in KERNELS]
    if any(resident):
        columns.insert(0, [first or second for first, second in zip(resident, columns[0], strict=True)])
    pairs = [pair for form in columns for pair in rows_of(form)]
    programs = device.num_multiprocessors
    return [
        TritonConfig(first, second, precision, is_nvidia, programs) for first, second in dict.fromkeys(pairs)
    ]


def config_unsupported(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str | None:
    """Why tiles cannot fit the device's shared memory, by an upper estimate; the smallest tiles are left to the compiler. And why programs that
    wait for each other cannot all run at the same time."""
    for kernel in KERNELS:
        tile: CellTile = getattr(config, kernel)
        sizes = f"{tile.block_m}x{tile.block_n}x{tile.block_k}"
        if tile.form == "persistent":
            reason = _not_persistent(problem, device)
            if reason is not None:
                return reason
            programs = _programs(problem, tile)
            if programs > min(config.concurrent_programs, device.num_multiprocessors):
                return (
                    f"{kernel} with {sizes} tiles has {programs} programs that wait for each other; concurrent_programs is "
                    f"{config.concurrent_programs}, the device has {device.num_multiprocessors} multiprocessors"
                )
        reason = too_large(kernel, sizes, tile.num_stages, _memory(kernel, problem, tile), device)
        if reason is not None and dataclasses.replace(tile, form="whole") != _SMALLEST:
            return reason
    return None


def _not_persistent(problem: Problem, device: DeviceFacts) -> str | None:
    """Why the persistent form is not offered: earlier products would hold the weight in registers, where it does not fit, and Blackwell's were
    not tried; those of float32 in three passes need every operand twice."""
    if device.vendor != "nvidia" or device.capability[0] != 9:
        return "the persistent form needs an NVIDIA GPU of compute capability 9.x"
    return "the persistent form takes float16 and bfloat16" if problem.dtype("x") == "float32" else None


def _programs(problem: Problem, tile: CellTile) -> int:
    return cdiv(_rows(problem), tile.block_m) * cdiv(problem.dim("H"), tile.block_n)


def _persistent_tiles(kernel: str, problem: Problem, device: DeviceFacts) -> list[CellTile]:
    """The tiles of the persistent form whose programs run at the same time, each with the deepest blocks that fit."""
    if _not_persistent(problem, device) is not None:
        return []
    features, rows = padded(problem.dim("H")), padded(_rows(problem))
    found: list[CellTile] = []
    for m, n, warps in _PERSISTENT[kernel]:
        blocks = [(min(k, padded(_depth(kernel, problem))), ahead) for k, ahead in _DEPTHS]
        tiles = [
            CellTile(min(m, rows), min(n, features), k, warps, ahead, "persistent") for k, ahead in blocks
        ]
        tiles = [tile for tile in tiles if m * tile.block_k * tile.num_stages <= _EARLY * 32 * warps]
        tiles = fitting(tiles, lambda tile: _memory(kernel, problem, tile), device)
        found += [tile for tile in tiles[:1] if _programs(problem, tile) <= device.num_multiprocessors]
    return list(dict.fromkeys(found))


def _tiles(kernel: str, form: str, problem: Problem, device: DeviceFacts) -> list[CellTile]:
    """The tiles that fit, narrowed to the rows and features that exist."""
    features, rows = padded(problem.dim("H")), padded(_rows(problem))
    depth = padded(_depth(kernel, problem))
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
    64 rows hold one stage in registers. In the persistent form, the weight and all blocks that are loaded early."""
    size = {"float32": 4}.get(problem.dtype("x"), 2)
    if tile.form == "persistent":
        outputs = tile.block_n * (4 if kernel == "forward" and _gates(problem) > 1 else 1)
        blocks = cdiv(_depth(kernel, problem), tile.block_k)
        loaded = min(blocks, tile.num_stages + 1) * tile.block_m * tile.block_k * size
        return blocks * tile.block_k * outputs * size + max(loaded, 4 * tile.block_m * outputs)
    weights = _gates(problem) if kernel == "forward" else 1
    stage = tile.block_k * (weights * tile.block_n + tile.block_m) * size
    stages = tile.num_stages if tile.block_m >= 64 else max(tile.num_stages - 1, 1)
    return max(stages * stage, 4 * tile.block_m * tile.block_n)


def _depth(kernel: str, problem: Problem) -> int:
    """The number of features that products sum over."""
    return problem.dim("H") * (_gates(problem) if kernel == "backward" else 1)


def _gates(problem: Problem) -> int:
    return GATES[str(problem.flag("cell"))]


def _weight_bytes(problem: Problem) -> int:
    size = {"float32": 4}.get(problem.dtype("x"), 2)
    return _gates(problem) * problem.dim("H") ** 2 * size


def _rows(problem: Problem) -> int:
    return problem.dim("B") * (problem.dim("S") if problem.flag("packed") == "offsets" else 1)
