"""Configurations of the Triton recurrences: their fields, the heuristic choice, and those worth timing."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from ...dispatch import DeviceFacts, Problem
from ...launch import register_limits_measured
from ...launch.fields import Block, Checked, Count, Float32Dot, one_of, Registers, Warps
from ...launch.sizes import cdiv, padded
from ..spec import CONSTANT, KEY, NONE
from .hopper import tile_sizes as hopper


@dataclasses.dataclass(frozen=True)
class Tile(Checked):
    """One kernel's tile of key channels (`block_k`) by value channels (`block_v`), powers of two from 16, and compiler options.

    `hopper`: whether it is Hopper's kernel, in Gluon, instead of Triton's; only the single one has that form.
    """

    block_k: Block
    block_v: Block
    num_warps: Warps
    num_stages: Count
    hopper: bool = False
    max_registers: Registers = 0


CHUNK_SIZES = (16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class TritonConfig(Checked):
    """The chunk size and the tile of every phase. A member without a phase ignores its tile."""

    chunk_size: Annotated[int, one_of(*CHUNK_SIZES)]
    """Number of tokens whose scores form one matrix, and between two stored states."""
    scores: Tile
    wy: Tile
    states: Tile
    out: Tile
    dstates: Tile
    gradients: Tile
    float32_dot: Float32Dot = "tf32x3"
    single: bool = False
    """True if the forward pass of a linear member without a decay per key is a single kernel, with the value channels of `out`."""
    splits: Count = 1
    """The number of parts of each sequence that have programs of their own."""


_LARGE, _SOME = 160 * 1024, 96 * 1024  # shared memory of one program, in bytes
_LEAST_SPLIT = 512  # tokens of a sequence's part
_KERNELS = ("scores", "wy", "states", "out", "dstates", "gradients")
Row = tuple[int, ...]
# For each kernel in turn: tiles for devices with a lot of shared memory, with some, and with little.
_HALF: tuple[tuple[Row, ...], ...] = (
    ((64, 64, 4, 1), (32, 128, 4, 3), (64, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 1)),
    ((64, 64, 4, 1), (32, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 1)),
    ((32, 32, 4, 1),) * 6,
)
_FLOAT32: tuple[tuple[Row, ...], ...] = (
    ((32, 32, 4, 1), (32, 32, 4, 1), (64, 32, 4, 1), (64, 32, 4, 1), (64, 32, 4, 1), (64, 32, 8, 1)),
    ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 8, 1)),
    ((16, 16, 4, 1),) * 6,
)
# For state heads that share queries and keys, with a lot of shared memory. Tiles of wide values are held for one step of a loop only. Of 168
# registers a thread, three programs share a multiprocessor: 387 for 443 microseconds.
_SHARED: dict[str, Row] = {"wy": (128, 64, 4, 2, 168), "gradients": (64, 64, 4, 3)}
_SHARED_WIDE: dict[str, Row] = {"wy": (64, 64, 4, 1), "gradients": (64, 64, 4, 1)}
# For linear members with a decay per key channel, with a lot of shared memory. Of 128 registers, four programs for three: 90 for 100 microseconds.
_KEY: dict[str, Row] = {"wy": (64, 128, 4, 1), "out": (64, 128, 4, 2, 128), "gradients": (32, 128, 4, 1)}


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    key = problem.flag("decay") == KEY and not problem.flag("delta")
    half, shared = problem.dtype("qkv") == "bfloat16", _shared(problem)
    room = 0 if device.shared_memory >= _LARGE else 1 if device.shared_memory >= _SOME else 2
    rows = dict(zip(_KERNELS, (_HALF if half else _FLOAT32)[room], strict=True))
    ample, count = half and room == 0, multiprocessors(device)
    single = ample and _is_single(problem, device)
    splits = 1 if problem.flag("step") or problem.flag("delta") else _splits(problem, device)
    programs = splits * programs_of(problem, 64)
    if single and programs <= count and problem.flag("decay") == CONSTANT:
        # Two programs per multiprocessor instead of one; measured for constant decays only.
        rows["out"] = (128, 32, 4, 3)
    elif single:
        rows["out"] = (128, 64, 4, 2 if 2 * programs >= 3 * count else 3)
    if ample and shared:
        rows |= _SHARED if problem.dim("V") <= 64 else _SHARED_WIDE
        if problem.dim("D") > 128:  # shared memory is for one program anyway
            rows["wy"] = rows["wy"][:4]
        if problem.dim("V") <= 64 < problem.dim("D") and not key:
            rows["states"] = (128, 64, 8, 3)
        if device.capability >= (10, 0) and problem.dim("D") > 128:
            # Values of half the width take all of Blackwell's tensor memory (compiled, not measured).
            rows["wy"] = (128, 32, 4, 1)
    if ample and device.capability < (9, 0):
        # Larger tiles spill up to 5 KiB per thread (compiled, not measured).
        rows["gradients"] = (32, 64, 4, 1) if shared else (64, 32, 4, 1)
    if ample and key:
        rows |= _KEY
    if not half and (key or shared):
        rows["gradients"] = rows["scores"]
    chunk_size = 64 if room < 2 else 32
    if not half and device.capability >= (10, 0) and shared and problem.dim("D") > 64:
        # Three passes over chunks of 64 would take more tensor memory than Blackwell has.
        chunk_size = 32
    limits = slice(None if register_limits_measured(device) else 4)
    tiles = {name: narrowed(row[limits], problem) for name, row in rows.items()}
    if single and problem.dim("T") >= splits * hopper.LEAST_TOKENS:
        tiles["out"] = next(iter(_hopper_tiles(problem, splits, device)), tiles["out"])
    precision = "tf32x3" if device.vendor == "nvidia" else "ieee"
    return TritonConfig(chunk_size, **tiles, single=single, float32_dot=precision, splits=splits)


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first."""
    first = default_config(problem, device)
    if device.shared_memory < _LARGE or problem.dtype("qkv") != "bfloat16":
        return [first]
    key, shared = problem.flag("decay") == KEY and not problem.flag("delta"), _shared(problem)
    tiles = lambda *rows: [narrowed(row, problem) for row in rows]
    outs = tiles((128, 128, 4, 2), (64, 64, 4, 3))
    if first.single:
        outs = tiles((128, 32, 4, 3), (128, 64, 4, 3)) + _hopper_tiles(problem, first.splits, device)
    tried = [("states dstates", tiles((64, 128, 4, 3), (128, 64, 8, 3), (128, 32, 4, 3))), ("out", outs)]
    if key:
        tried.append(("gradients", tiles((32, 64, 4, 1))))
    elif shared:
        tried.append(("wy", tiles((128, 64, 4, 1))))
        tried.append(("gradients", tiles((64, 64, 4, 2), (128, 64, 8, 2), (32, 64, 4, 3))))
    else:
        rows = ((128, 32, 4, 1), (128, 32, 4, 2), (128, 64, 4, 1), (128, 64, 8, 2))
        tried.append(("gradients", tiles(*rows)))
    return variants(first, tried, (first.splits // 2, 2 * first.splits))


def variants(
    first: TritonConfig, tried: Iterable[tuple[str, Iterable[Tile]]], splits: Iterable[int]
) -> list[TritonConfig]:
    """A configuration, and those that differ from it in one tile of the named kernels or, if it splits sequences, in the number of splits."""
    changes: list[dict[str, Any]] = [dict.fromkeys(names.split(), t) for names, tiles in tried for t in tiles]
    changes += [{"splits": count} for count in splits if first.splits > 1]
    return list(dict.fromkeys([first, *(dataclasses.replace(first, **change) for change in changes)]))


def config_unsupported(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str | None:
    if config.single and (problem.flag("delta") or problem.flag("decay") == KEY):
        return "single=True is for members without a delta rule and without a decay per key channel"
    if config.out.hopper:
        reason = hopper.unfit(config.out.block_v, config.splits, problem, device)
        reason = reason or hopper.config_unfit(config, problem)
        return reason and f"out with hopper=True {reason}"
    return None


def _is_single(problem: Problem, device: DeviceFacts) -> bool:
    """True if a single kernel computes the outputs: if there are enough programs, and keys fit along with the state."""
    plain = not problem.flag("step") and not problem.flag("delta") and problem.flag("decay") != KEY
    # Except on Hopper, where it was measured, the state of wide keys spills with a decay per token.
    widest = 128 if device.capability[0] == 9 or problem.flag("decay") in (NONE, CONSTANT) else 64
    if not plain or problem.dim("D") > widest:
        return False
    return _is_enough(_splits(problem, device) * programs_of(problem, 64), device)


def _is_enough(programs: int, device: DeviceFacts) -> bool:
    return 4 * programs >= 3 * multiprocessors(device)


def _splits(problem: Problem, device: DeviceFacts) -> int:
    """The number of parts of each sequence that make two programs for every multiprocessor; one if there are enough without."""
    programs = programs_of(problem, 64)
    if _is_enough(programs, device):
        return 1
    return splits_of(problem, _LEAST_SPLIT, 2 * multiprocessors(device) // programs)


def splits_of(problem: Problem, least: int, most: int) -> int:
    """The largest power of two, up to `most`, of parts of each sequence that have at least as many tokens."""
    each = problem.dim("N") if problem.flag("packed") == "offsets" else 1
    return 1 << max(1, min(most, problem.dim("T") // (each * least))).bit_length() - 1


def programs_of(problem: Problem, block_v: int) -> int:
    """The number of programs that have a sequence, a head and a tile of value channels."""
    sequences = problem.dim("B") * (problem.dim("N") if problem.flag("packed") == "offsets" else 1)
    return sequences * problem.dim("R") * cdiv(problem.dim("V"), block_v)


def _hopper_tiles(problem: Problem, splits: int, device: DeviceFacts) -> list[Tile]:
    dim = padded(problem.dim("D"))
    return [Tile(dim, block_v, 4, stages, True) for block_v, stages in hopper.tiles(problem, splits, device)]


def multiprocessors(device: DeviceFacts) -> int:
    return device.num_multiprocessors or 108


def _shared(problem: Problem) -> bool:
    """True if enough state heads share a query and a key head for a program to process several."""
    return problem.dim("R") // max(problem.dim("Hq"), problem.dim("Hk")) > 8


def narrowed(row: Sequence[int], problem: Problem) -> Tile:
    """The tile, limited to the width of the channels."""
    block_k, block_v, num_warps, num_stages, *limit = row
    dim, values = padded(problem.dim("D")), padded(problem.dim("V"))
    return Tile(min(block_k, dim), min(block_v, values), num_warps, num_stages, False, *limit)
