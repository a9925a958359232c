"""As `tile_sizes.py`, for keys whose second part all heads share (`latent/`)."""

from typing import Any

from ...dispatch import DeviceFacts, Problem
from ...launch.sizes import padded

Sizes = tuple[int, ...]  # block_q, block_k, num_warps, num_stages

# For 16-bit inputs, by the padded size of the widest part, best first; small ones last, for devices with little shared memory.
_HALF: dict[str, dict[int, tuple[Sizes, ...]]] = {
    "forward": {
        64: ((128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
        128: ((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 32, 8, 3), (64, 32, 4, 2), (64, 32, 4, 1)),
    },
    "key_gradient": {
        64: ((64, 64, 4, 3), (32, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 1)),
        128: ((32, 128, 8, 3), (32, 64, 4, 3), (32, 128, 8, 2), (32, 64, 8, 3), (64, 128, 8, 2), (32, 64, 4, 2), (32, 64, 4, 1), (32, 32, 4, 1)),
    },
    "query_gradient": {
        64: ((128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
        128: ((128, 64, 8, 2), (64, 32, 4, 3), (128, 32, 8, 3), (128, 64, 8, 1), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
    },
}  # fmt: skip
_BESIDE_RANGES: Sizes = (32, 64, 8, 3)  # of the gradient of the keys
_FLOAT32: dict[str, dict[int, tuple[Sizes, ...]]] = {
    "forward": {64: ((64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 1)), 128: ((64, 32, 4, 1), (32, 32, 4, 1), (32, 16, 4, 1))},
    "key_gradient": {64: ((32, 64, 4, 1), (32, 32, 4, 1)), 128: ((32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1))},
    "query_gradient": {64: ((32, 64, 4, 1), (32, 32, 4, 1)), 128: ((32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1))},
}  # fmt: skip


def dims(problem: Problem) -> tuple[int, int, int]:
    """The channels of a key without and with a rotation, and of a value."""
    rope = problem.dim("Dr")
    return problem.dim("D") - rope, rope, problem.dim("V")


def choices(kernel: str, problem: Problem, device: DeviceFacts) -> list[Sizes]:
    """Tiles worth timing, best first; those for devices with little shared memory last."""
    is_float32 = problem.dtype("qkv") == "float32"
    tiles = (_FLOAT32 if is_float32 else _HALF)[kernel][padded(max(dims(problem)), 64)]
    if _is_ragged(problem) and _BESIDE_RANGES in tiles:
        # What differs between queries takes registers, too; on an A100 more than larger tiles leave.
        first = tiles[-1] if device.capability < (9, 0) else _BESIDE_RANGES
        return list(dict.fromkeys([first, *tiles]))
    return list(tiles)


preferred = choices


def _is_ragged(problem: Problem) -> bool:
    return any(problem.flag(name) for name in ("rows", "segments", "bias", "mask", "tiles"))


def shared_memory(kernel: str, problem: Problem, device: DeviceFacts, tile: Any) -> int:
    """An upper estimate for one program, in bytes: the tiles it keeps, and the streamed ones once per stage."""
    block_q, block_k, num_stages = tile.block_q, tile.block_k, tile.num_stages
    nope, rope, values = map(padded, dims(problem))
    is_float32 = problem.dtype("qkv") == "float32"
    size, keys = 4 if is_float32 else 2, nope + rope
    resident, streamed = {
        "forward": (block_q * keys, block_k * (keys + values)),
        "key_gradient": (block_k * (keys + values), block_q * (keys + values)),
        "query_gradient": (block_q * (keys + values), block_k * (keys + values)),
    }[kernel]
    if kernel == "query_gradient" and device.capability < (9, 0) and _is_ragged(problem):
        streamed *= 2  # keys are kept twice, for two layouts
    matrices = size * (resident + num_stages * streamed)
    if is_float32:  # kept in two halves for the passes of a product, and once more for each kind of loop
        ragged = any(problem.flag(name) for name in ("rows", "segments", "window", "tiles"))
        matrices *= 3 if ragged else 2
    over_scores = 4 * bool(problem.flag("bias")) + bool(problem.flag("mask"))
    gradient = size if kernel != "forward" else 0
    return matrices + block_q * block_k * (gradient + num_stages * over_scores)
