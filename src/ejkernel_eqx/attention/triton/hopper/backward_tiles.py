"""Choice of one of Hopper's backward kernels and of its tiles, and reasons against it."""

from typing import Any

from ....dispatch import DeviceFacts, Problem
from ....launch import gluon_unavailable
from ....launch.sizes import cdiv
from ..tile_sizes import is_wide, MAX_HEAD_DIM
from . import tile_sizes

NARROWEST, WIDEST = 64, 128
"""Channels up to which there is a kernel for narrow heads, and from which on there is one for wide ones."""
PROGRAMS = 132
"""Programs that are started: one for each multiprocessor of the largest Hopper. Where there are fewer, the last ones find nothing left to do."""
_CACHED_BYTES = 32 * 2**20
_APART = {64: 32, 128: 32, 192: 32, 256: 16}  # by the padded head dim
_LEAST_LENGTH = 1024
"""Queries, and keys in a window, from which on this kernel is the default."""
_LEAST_PROGRAMS = 2
"""Programs for each multiprocessor from which on this kernel is the default: with fewer, what they wait for one another counts."""

# Queries, keys, stages by the padded head dim; best first.
_TILES: dict[int, tuple[tuple[int, int, int], ...]] = {
    64: ((64, 128, 3),),
    128: ((64, 128, 2),),
    192: ((64, 128, 2),),
    256: ((64, 64, 1),),
}


def tiles(problem: Problem, device: DeviceFacts) -> list[tuple[int, ...]]:
    """Tiles worth timing, best first, as the fields of a configuration."""
    if tile_sizes.too_short(problem) or unfit(problem, device):
        return []
    return [(q, k, 4, stages, 0, 1) for q, k, stages in _TILES[tile_sizes.padded_width(problem)]]


def not_chosen(problem: Problem, device: DeviceFacts) -> str:
    """Says why Triton's kernels are the default, as a clause without its subject; empty if they are not."""
    if (reason := tile_sizes.too_short(problem) or unfit(problem, device)) is not None:
        return reason
    if tile_sizes.is_untested(problem):
        return tile_sizes.UNTESTED
    if problem.flag("segments") or problem.flag("rows") or problem.flag("soft_cap"):
        return "was measured without segments, lengths and a soft cap: the tuner times both"
    if problem.dim("T") < _LEAST_LENGTH or _narrow(problem):
        return f"was measured to be faster from {_LEAST_LENGTH} queries and keys on: the tuner times both"
    block_k = _TILES[tile_sizes.padded_width(problem)][0][1]
    programs = cdiv(problem.dim("S"), block_k) * problem.dim("B") * problem.dim("K")
    least = _LEAST_PROGRAMS * tile_sizes.multiprocessors(device)
    return "" if programs >= least else f"is the default for {least} tiles of keys or more"


def _narrow(problem: Problem) -> bool:
    """Tells whether a static window leaves a query few keys."""
    window: Any = problem.flag("window")
    left, right = window or (None, None)
    return left is not None and right is not None and left + right + 1 < _LEAST_LENGTH


def unfit(problem: Problem, device: DeviceFacts) -> str | None:
    """Says why the kernel cannot run the problem on the device, as a clause without its subject; `None` if it can."""
    return gluon_unavailable(device) or problem_unfit(problem)


def problem_unfit(problem: Problem) -> str | None:
    """Says the same for any device."""
    if (reason := tile_sizes.problem_unfit(problem)) is not None:
        return reason
    gated = problem.flag("log_forget")
    if gated and (tile_sizes.padded_width(problem) != WIDEST or problem.dim("K") != problem.dim("H")):
        return f"takes log_forget at head dims from {NARROWEST + 1} to {WIDEST}, with keys of each head"
    if problem.flag("tiles") or problem.flag("block_size"):
        return "takes no lists of tiles"
    if is_wide(problem):
        return f"takes head dims up to {MAX_HEAD_DIM}"
    if problem.flag("soft_cap") and tile_sizes.padded_width(problem) > WIDEST:
        return f"takes a soft cap at head dims up to {WIDEST}"
    return None


def config_unfit(tile: Any, problem: Problem, device: DeviceFacts) -> str | None:
    """Says why a configuration cannot have the tile, as a clause without its subject; shared memory is not checked."""
    return unfit(problem, device) or tile_unfit(tile, problem)


def tile_unfit(tile: Any, problem: Problem) -> str | None:
    """Says the same for a tile on any device."""
    width = tile_sizes.padded_width(problem)
    if tile.num_warps != 4:
        return f"has num_warps=4, not {tile.num_warps}"
    if (tile.block_q, tile.block_k) not in {size[:2] for size in _TILES[width]}:
        return f"does not have tiles of {tile.block_q}x{tile.block_k} at head dims of {width}"
    if (tile.num_stages == 1) != (width == 256):
        return f"does not have {tile.num_stages} stages at head dims of {width}"
    return None


def shared_memory(tile: Any, problem: Problem) -> int:
    """The bytes that a program takes: keys and values, stages of queries and cotangents with their terms, gradients of the scores twice, parts of
    `dq`, barriers."""
    _, width, rope, _, _ = tile_sizes.widths_of(problem)
    keys = 2 * tile.block_k * (2 * width + rope)
    streamed = 2 * tile.num_stages * tile.block_q * (2 * width + 4 + rope)
    scores, parts = 2 * tile.block_k * tile.block_q * 2, 65536
    if rope:  # score gradients and `dq` once
        scores, parts = scores // 2, tile.block_q * (width + rope) * 4
    if width > WIDEST:  # and the weights
        scores *= 2
    if width <= NARROWEST:  # keys twice, and their gradients; a part for each of three writers
        keys, parts = 3 * keys, 3 * tile.block_q * width * 4
    return keys + streamed + scores + parts + 1024


def together(queries: int, heads: int, width: int, are_alike: bool) -> int:
    """The number of key heads of batch rows that run together: those whose queries, cotangents and float32 gradients fit the L2 cache. If tiles of
    keys differ, more of them, so that few of one head begin together: each that does begins an addition later than the one before, and shorter ones
    lose what they would be ahead. What they read is read again soon, so it need not fit whole."""
    most = max(1, _CACHED_BYTES // (max(queries, 1) * heads * width * 8))
    together = 1 << min(most.bit_length() - 1, 6)
    return together if are_alike else max(together, _APART[width])
