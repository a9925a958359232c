"""Configurations of the Triton platform: which tiles a problem prefers, and the shared memory that they take.

A whole walk over time needs one launch, in which every program streams the recurrent weight from the cache in each step. That is best for
small weights and many rows. With one launch per step the columns of the weight are distributed over programs, which suits large weights. Where all
programs run at the same time and their columns fit in shared memory, the persistent form needs one launch and loads the weight once.
"""

import dataclasses
from typing import Annotated

from ...dispatch import DeviceFacts, Problem
from ...launch.fields import Block, Checked, Count, Float32Dot, one_of, Warps, whole
from ...launch.sizes import cdiv, fitting, numbers_of, padded, rows_of, too_large
from ..spec import GATES


@dataclasses.dataclass(frozen=True)
class CellTile(Checked):
    """A program's tile: `block_m` rows by `block_n` hidden features (of every gate), in products over `block_k` features at a time."""

    block_m: Block
    block_n: Block
    block_k: Block
    num_warps: Warps
    num_stages: Count = 1
    form: Annotated[str, one_of("whole", "per_step", "persistent")] = "whole"
    """`"whole"`: one launch, whose programs process all features of their rows over all steps. The others have a program for every tile:
    `"per_step"` in a launch for each step, `"persistent"` in one launch, with the weight on the chip and a barrier between steps."""


@dataclasses.dataclass(frozen=True)
class TritonConfig(Checked):
    forward: CellTile
    backward: CellTile
    float32_dot: Float32Dot = "tf32x3"
    fast_sigmoid: bool = True
    """True if sigmoid and tanh use NVIDIA's approximate instructions (error 2e-7)."""
    concurrent_programs: Annotated[int, whole(0)] = 0
    """The number of programs that are certain to run at the same time: at most the device's multiprocessors. A launch of the persistent form with
    more of them, which must not wait for each other, becomes a launch for each step."""


KERNELS = ("forward", "backward")
WIDTH = 64
"""The least columns of a product in the persistent form: Hopper's products need as many."""
_SMALLEST = CellTile(16, 16, 16, 4)
_STREAMED = 512 * 1024
"""The largest weight in bytes that a program streams in every step by default."""

# Block sizes, warps and stages by form and kernel, the preferred first. The forward has a sum for every gate, the backward a single one.
_TILES = {
    "whole": {
        "forward": "16 256 32 8 3, 16 128 32 8 3, 16 128 64 8 2, 32 128 32 8 3, 32 64 64 8 3, 16 128 32 4 4",
        "backward": "16 256 64 8 4, 16 128 64 4 4, 16 256 32 8 6, 32 128 64 8 4, 32 64 64 4 4, 16 64 128 4 4",
    },
    "per_step": {
        "forward": "32 16 128 4 3, 64 16 128 4 3, 16 32 128 4 3, 32 32 64 4 4",
        "backward": "32 16 128 4 4, 64 16 128 4 4, 16 32 128 4 4, 32 32 128 4 4",
    },
}
# Rows, columns and warps; as deep and as early as memory allows.
_PERSISTENT = {
    "forward": "16 16 4, 16 32 8, 32 16 4, 16 64 8, 64 16 4, 32 32 8, 64 32 8",
    "backward": "16 16 4, 32 16 4, 16 32 4, 16 64 8, 64 16 4, 32 32 8, 64 64 8",
}
_DEPTHS = ((1024, 1), (512, 2), (256, 3), (256, 2), (128, 3), (128, 2), (64, 2), (32, 1))
"""Depths of blocks, and how many products early they are loaded."""
_EARLY = 256
"""The most numbers that a thread loads before the products that read them."""
_LARGEST, _WIDE = (64, 1024), (32, 64)
"""The most rows and the deepest blocks; and those in float32, whose products in three passes hold every operand twice: larger ones are spilled."""


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first: tiles of the preferred form, then of the others."""
    is_nvidia = device.vendor == "nvidia"
    precision = "tf32x3" if is_nvidia else "ieee"
    others = ["whole", "per_step"] if _weight_bytes(problem) <= _STREAMED else ["per_step", "whole"]
    columns = [[_tiles(kernel, form, problem, device) for kernel in KERNELS] for form in others]
    resident = [_persistent_tiles(kernel, problem, device) for kernel in KERNELS]
    pairs = [pair for form in columns for pair in rows_of(form)]
    if any(resident):
        waiting = rows_of([first or second for first, second in zip(resident, columns[0], strict=True)])
        # In float32 they have not been measured, so they are not the heuristic.
        pairs = [*pairs[:1], *waiting, *pairs] if _is_wide(problem) else [*waiting, *pairs]
    most = device.num_multiprocessors
    return [TritonConfig(first, second, precision, is_nvidia, most) for first, second in dict.fromkeys(pairs)]


def config_unsupported(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str | None:
    """The reason why tiles cannot fit the device's shared memory, by an upper estimate; the smallest tiles are left to the compiler. And why
    programs that wait for each other cannot all run at the same time."""
    for kernel in KERNELS:
        tile: CellTile = getattr(config, kernel)
        sizes = f"{tile.block_m}x{tile.block_n}x{tile.block_k}"
        if tile.form == "persistent":
            reason = _not_persistent(device)
            if reason is not None:
                return reason
            count = programs(kernel, _rows(problem), problem.dim("H"), tile)
            if count > min(config.concurrent_programs, device.num_multiprocessors):
                return (
                    f"{kernel} with {sizes} tiles has {count} programs that wait for each other; concurrent_programs is "
                    f"{config.concurrent_programs}, the device has {device.num_multiprocessors} multiprocessors"
                )
        reason = too_large(kernel, sizes, tile.num_stages, _memory(kernel, problem, tile), device)
        if reason is not None and dataclasses.replace(tile, form="whole") != _SMALLEST:
            return reason
    return None


def _not_persistent(device: DeviceFacts) -> str | None:
    """The reason why the persistent form is not offered: earlier products would hold the weight in registers, where it does not fit, and
    Blackwell's were not tried."""
    if device.vendor != "nvidia" or device.capability[0] != 9:
        return "the persistent form needs an NVIDIA GPU of compute capability 9.x"
    return None


def sharing(tile: CellTile) -> int:
    """The number of programs of the persistent backward that share columns, and divide the features that products sum over: a column has one gate's
    gradient where the forward has four, so there are fewer columns than products need."""
    return max(WIDTH // tile.block_n, 1)


def programs(kernel: str, rows: int, features: int, tile: CellTile) -> int:
    """The number of programs of a launch."""
    shared = sharing(tile) if kernel == "backward" and tile.form == "persistent" else 1
    columns = 1 if tile.form == "whole" else cdiv(features, shared * tile.block_n) * shared
    return cdiv(rows, tile.block_m) * columns


def _persistent_tiles(kernel: str, problem: Problem, device: DeviceFacts) -> list[CellTile]:
    """The tiles of the persistent form whose programs run at the same time, each with the deepest blocks that fit."""
    if _not_persistent(device) is not None:
        return []
    H, rows = problem.dim("H"), _rows(problem)
    results: list[CellTile] = []
    most, deepest = _WIDE if _is_wide(problem) else _LARGEST
    for m, n, warps in numbers_of(_PERSISTENT[kernel]):
        if m > most:
            continue
        n = min(n, padded(H))
        # The columns of one gate are fewer than products need; and where all features are no more than these, nothing is left to share.
        if _gates(problem) == 1 if kernel == "forward" else H <= WIDTH:
            n, warps = max(n, WIDTH), 8
        tiles: list[CellTile] = []
        for k, ahead in [depth for depth in _DEPTHS if depth[0] <= deepest]:
            k = min(k, padded(_depth(kernel, problem)))
            tile = CellTile(min(m, padded(rows)), n, k, warps, ahead, "persistent")
            tile = dataclasses.replace(tile, num_stages=min(ahead, _blocks(kernel, problem, tile)))
            at_once = programs(kernel, rows, H, tile) <= device.num_multiprocessors
            if at_once and m * k * tile.num_stages <= _EARLY * 32 * warps:
                tiles.append(tile)
        tiles = fitting(tiles, lambda tile: _memory(kernel, problem, tile), device)
        # Of the blocks that exceed the features the least, the deepest.
        results += sorted(tiles, key=lambda tile: _blocks(kernel, problem, tile) * tile.block_k)[:1]
    return list(dict.fromkeys(results))


def _tiles(kernel: str, form: str, problem: Problem, device: DeviceFacts) -> list[CellTile]:
    """The tiles that fit, narrowed to the rows and features that exist."""
    features, rows = padded(problem.dim("H")), padded(_rows(problem))
    depth, preferred = padded(_depth(kernel, problem)), numbers_of(_TILES[form][kernel])
    tiles = [
        CellTile(min(m, rows), min(n, features), min(k, depth), warps, stages, form)
        for m, n, k, warps, stages in preferred
    ]
    # With fewer stages where a wider dtype, or a smaller shared memory, needs it.
    tiles += [dataclasses.replace(tile, num_stages=2) for tile in tiles]
    tiles += [dataclasses.replace(tile, block_k=16, num_stages=2) for tile in tiles]
    results = dict.fromkeys(fitting(tiles, lambda tile: _memory(kernel, problem, tile), device))
    return list(results)[: len(preferred)] or [dataclasses.replace(_SMALLEST, form=form)]


def _memory(kernel: str, problem: Problem, tile: CellTile) -> int:
    """An estimate of the shared memory of a program: the operands of all stages, or a sum that changes its layout. The instructions for fewer than
    64 rows hold one stage in registers. In the persistent form, the weight and all blocks that are loaded early."""
    size = 4 if _is_wide(problem) else 2
    if tile.form == "persistent":
        size *= 2 if _is_wide(problem) else 1  # the parts of three passes
        outputs = tile.block_n * (sharing(tile) if kernel == "backward" else 4 if _gates(problem) > 1 else 1)
        depth = _blocks(kernel, problem, tile) * tile.block_k
        loaded = min(depth, (tile.num_stages + 1) * tile.block_k) * tile.block_m * size
        return depth * outputs * size + max(loaded, 4 * tile.block_m * outputs)
    weights = _gates(problem) if kernel == "forward" else 1
    stage = tile.block_k * (weights * tile.block_n + tile.block_m) * size
    stages = tile.num_stages if tile.block_m >= 64 else max(tile.num_stages - 1, 1)
    return max(stages * stage, 4 * tile.block_m * tile.block_n)


def _depth(kernel: str, problem: Problem) -> int:
    """The number of features that products sum over."""
    return problem.dim("H") * (_gates(problem) if kernel == "backward" else 1)


def _blocks(kernel: str, problem: Problem, tile: CellTile) -> int:
    """The number of blocks of features in the part of the weight that a program of the persistent form keeps."""
    return cdiv(_depth(kernel, problem), (sharing(tile) if kernel == "backward" else 1) * tile.block_k)


def _gates(problem: Problem) -> int:
    return GATES[str(problem.flag("cell"))]


def _weight_bytes(problem: Problem) -> int:
    return _gates(problem) * problem.dim("H") ** 2 * (4 if _is_wide(problem) else 2)


def _is_wide(problem: Problem) -> bool:
    return problem.dtype("x") == "float32"


def _rows(problem: Problem) -> int:
    return problem.dim("B") * (problem.dim("S") if problem.flag("packed") == "offsets" else 1)
