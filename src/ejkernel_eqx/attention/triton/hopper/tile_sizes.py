"""When Hopper's forward kernel is used, with which tiles, and why not."""

from typing import Any

from ....dispatch import DeviceFacts, Problem
from ....launch import gluon_unavailable
from ....launch.sizes import padded

NARROWEST = 64
"""The least channels of a tile; fewer are padded."""
LEAST_QUERIES = 256
"""Queries from which on this kernel is worth timing: fewer leave most of its programs without work."""
_MULTIPROCESSORS = 132
_MOST_SHARED = 232_448
_MOST_NUMBERS = 2**31 - 1
_REFUSED = {
    "bias": "takes no bias",
    "mask": "takes no mask of all scores",
    "alibi_slopes": "takes no ALiBi slopes",
    "dropout": "has no dropout",
    "tiles": "takes no lists of tiles",
    "block_size": "takes no lists of tiles",
    "score_mod": "takes no score_mod",
    "negative_scale": "takes positive scales",
}

Sizes = tuple[int, int, int]

# Queries, keys, stages by the padded head dim; best first.
_TILES: dict[int, tuple[Sizes, ...]] = {
    64: ((192, 128, 2), (192, 128, 4), (128, 128, 4)),
    128: ((128, 128, 2),),
    256: ((128, 64, 2),),
}
PREFERRED: frozenset[int] = frozenset()
"""Padded head dims at which this kernel is the default, because it was measured to be faster; at others the tuner times it."""
_POSSIBLE = {
    64: ((128, 64), (128, 128), (192, 64), (192, 128)),
    128: ((128, 64), (128, 128)),
    256: ((128, 64),),
}


def tiles(problem: Problem, device: DeviceFacts) -> list[tuple[int, ...]]:
    """Tiles worth timing, best first, as the fields of a configuration."""
    if problem.dim("T") < LEAST_QUERIES or unfit(problem, device):
        return []
    programs = device.num_multiprocessors or _MULTIPROCESSORS
    sizes = list(_TILES[_width(problem)])
    if problem.flag("segments"):  # beside which three consumers would spill
        sizes.sort(key=lambda size: size[0])
    return [(q, k, 4, stages, 0, programs) for q, k, stages in sizes]


def not_chosen(problem: Problem, device: DeviceFacts) -> str:
    """Why Triton's kernel is the default, as a clause without its subject; empty if it is not."""
    if problem.dim("T") < LEAST_QUERIES:
        return f"is for {LEAST_QUERIES} queries or more"
    if (reason := unfit(problem, device)) is not None:
        return reason
    return "" if _width(problem) in PREFERRED else "was not measured to be faster: the tuner times both"


def unfit(problem: Problem, device: DeviceFacts) -> str | None:
    """Why the kernel cannot run the problem on the device, as a clause without its subject; `None` if it can."""
    return gluon_unavailable(device) or problem_unfit(problem)


def problem_unfit(problem: Problem) -> str | None:
    """The same for any device."""
    for flag, reason in _REFUSED.items():
        if problem.flag(flag):
            return reason
    if problem.dtype("qkv") not in ("bfloat16", "float16"):
        return f"takes bfloat16 and float16, not {problem.dtype('qkv')}"
    dim, values = problem.dim("D"), problem.dim("V")
    if padded(dim, NARROWEST) != padded(values, NARROWEST):
        return f"takes head dims of keys and values that are padded to one size, not {dim} and {values}"
    if dim % 8 or values % 8:
        return f"takes head dims of whole 16 bytes, not of {' and '.join(map(str, dict.fromkeys((dim, values))))} numbers"
    if problem.dim("B") * problem.dim("H") * problem.dim("T") > _MOST_NUMBERS:
        return "takes up to 2**31 queries of all heads"
    return None


def config_unfit(kernel: str, tile: Any, problem: Problem, device: DeviceFacts) -> str | None:
    """Why a configuration cannot have the tile for the kernel, as a clause without its subject; shared memory is not checked."""
    if kernel != "forward":
        return "has no kernel of its own"
    return unfit(problem, device) or tile_unfit(tile, problem)


def tile_unfit(tile: Any, problem: Problem) -> str | None:
    """The same for a tile on any device."""
    if tile.num_warps != 4:
        return f"has num_warps=4, not {tile.num_warps}"
    if (tile.block_q, tile.block_k) not in _POSSIBLE[_width(problem)]:
        return f"does not have tiles of {tile.block_q}x{tile.block_k} at head dims of {_width(problem)}"
    return None


def shared_memory(tile: Any, problem: Problem) -> int:
    """The bytes that a program takes: queries, stages of keys and values, the output if it has its own place, barriers."""
    width = _width(problem)
    queries = tile.block_q * width * 2
    return (queries if stores_in_place(tile, width) else 2 * queries) + _streamed(tile, width)


def stores_in_place(tile: Any, width: int) -> bool:
    """Whether the output takes the place of the queries, whose successors then wait for it."""
    return 2 * tile.block_q * width * 2 + _streamed(tile, width) > _MOST_SHARED


def _streamed(tile: Any, width: int) -> int:
    return 2 * tile.num_stages * tile.block_k * width * 2 + 1024


def check(tile: Any, problem: Problem, second_part: bool) -> None:
    """`ValueError` if a configuration has Hopper's kernel for a call that it cannot run; `second_part`: whether keys have one."""
    reason = problem_unfit(problem) or tile_unfit(tile, problem)
    if second_part:
        reason = "takes no keys with a second part"
    if reason is not None:
        raise ValueError(
            f"config: expected hopper_programs=0 in forward, received {tile.hopper_programs}: Hopper's kernel {reason}."
        )


def _width(problem: Problem) -> int:
    return padded(problem.dim("D"), NARROWEST)
