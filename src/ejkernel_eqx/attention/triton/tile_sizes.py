"""Preferred tiles of the Triton kernels and the shared memory they take, measured on an H200 (see `benchmarks/LOG.md`)."""

from typing import Any

from ...dispatch import DeviceFacts, Problem
from ...launch import limits_registers, register_limits_measured
from ...launch.sizes import padded

KERNELS = ("forward", "key_gradient", "query_gradient")
MAX_HEAD_DIM = 256
"""Of the kernels, but for Hopper's forward."""
# block_q, block_k, num_warps, num_stages, and max_registers where the compiler is limited
Sizes = tuple[int, ...]

# By kernel and padded head dim, best first.
_Table = dict[tuple[str, int], tuple[Sizes, ...]]


def _parsed(table: dict[tuple[str, int], str]) -> _Table:
    """A table whose tiles are written as `64x32x4x2`."""
    return {
        key: tuple(tuple(map(int, tile.split("x"))) for tile in row.split()) for key, row in table.items()
    }


# Tiles by default; small ones last, for devices with little shared memory.
_HALF = _parsed({
    ("forward", 64): "64x64x4x3 128x64x8x3 128x64x4x3 64x64x4x2 64x32x4x2",
    ("forward", 128): "64x64x4x3 128x128x8x3 128x64x8x3 64x64x4x2 64x32x4x2 64x32x4x1",
    ("forward", 256): "128x64x8x2 128x32x8x3 64x32x4x2 64x32x4x1 32x16x4x1",
    ("key_gradient", 64): "64x64x4x3 32x64x4x3 64x64x4x2 32x64x4x2 32x32x4x1",
    ("key_gradient", 128): "32x64x4x3 64x128x8x3 32x64x4x2 32x64x4x1 32x32x4x1",
    ("key_gradient", 256): "32x64x8x3 32x64x8x2 32x32x4x2 16x32x4x1 16x16x4x1",
    ("query_gradient", 64): "128x64x4x3 64x64x4x3 64x64x4x2 64x32x4x2 32x32x4x1",
    ("query_gradient", 128): "128x64x8x3 64x64x4x2 64x32x4x2 64x32x4x1 32x32x4x1",
    ("query_gradient", 256): "128x32x8x3 128x32x8x2 64x32x8x2 32x16x4x1 16x16x4x1",
})  # fmt: skip
_FLOAT32 = _parsed({
    ("forward", 64): "64x32x4x2 64x32x4x1 32x32x4x1",
    ("forward", 128): "64x32x4x2 32x32x4x1 32x16x4x1",
    ("forward", 256): "32x32x4x1 16x16x4x1",
    ("key_gradient", 64): "32x64x4x1 32x32x4x1",
    ("key_gradient", 128): "32x32x4x1 16x32x4x1 16x16x4x1",
    ("key_gradient", 256): "16x32x4x1 16x16x4x1",
    ("query_gradient", 64): "32x64x4x1 32x32x4x1",  # 64 queries do not compile for Blackwell
    ("query_gradient", 128): "32x32x4x1 32x16x4x1 16x16x4x1",
    ("query_gradient", 256): "32x16x4x1 16x16x4x1",
})  # fmt: skip
# Other tiles worth timing; most keep all their values in registers.
_HALF_MORE = _parsed({
    ("forward", 64): "128x128x8x3 64x128x4x3 128x64x4x2 64x64x4x4 128x64x8x2 128x32x4x3 64x128x4x2",
    ("forward", 128): "128x64x8x2 128x128x8x2 64x128x4x2 64x128x8x2 64x32x4x3 128x32x4x3",
    ("forward", 256): "64x64x8x2 128x32x8x2 64x32x4x3 64x64x8x3 128x16x8x3 64x32x8x3 64x16x4x3",
    ("key_gradient", 64): "64x128x8x3 64x64x8x3 32x64x4x4 64x128x8x2 32x128x8x3 64x32x4x3 32x128x4x3",
    ("key_gradient", 128): "32x128x8x3 64x64x8x3 64x128x8x2 32x128x8x2 64x64x8x2 16x64x4x3 32x64x8x3",
    ("key_gradient", 256): "16x64x8x3 32x32x8x3 16x64x8x2 32x32x8x2 32x32x4x3 16x32x4x3 16x32x4x2",
    ("query_gradient", 64): "128x64x8x3 128x32x4x3 128x128x8x2 128x64x4x2 64x32x4x3 64x128x4x2 128x64x8x2",
    ("query_gradient", 128): "128x64x8x2 128x32x8x3 64x64x4x3 64x32x4x3 64x64x8x2 64x64x8x3 128x32x8x2",
    ("query_gradient", 256): "64x32x8x3 64x64x8x2 128x16x8x3 64x16x4x3 64x16x8x3 32x32x4x2 32x32x4x3",
})  # fmt: skip
_FLOAT32_MORE = _parsed({
    ("forward", 64): "64x32x8x2 64x64x8x1 128x32x8x1 32x32x4x2 32x64x4x1",
    ("forward", 128): "64x32x8x2 64x16x4x2 64x32x4x1 32x32x4x2",
    ("forward", 256): "32x32x8x1 32x16x4x1 16x32x4x1",
    ("key_gradient", 64): "32x64x8x1 16x64x4x1 32x32x4x2 64x32x4x1",
    ("key_gradient", 128): "32x32x8x1 16x64x8x1 16x64x4x1 32x16x4x1",
    ("key_gradient", 256): "16x32x8x1 32x16x4x1",
    ("query_gradient", 64): "32x64x8x1 64x32x8x1 32x32x4x2 64x16x4x1",
    ("query_gradient", 128): "32x32x8x1 64x16x8x1 64x16x4x1 16x32x4x1",
    ("query_gradient", 256): "32x16x8x1 16x32x4x1",
})  # fmt: skip
SIDE_BY_SIDE: Sizes = (128, 64, 8, 2, 128)
# For 16-bit inputs where the tiles above spill hundreds of bytes per thread (compiled, not measured): with a mask, in the forward with a
# bias, and always on Blackwell. By major compute capability, 0 for all others.
_Sparing = dict[tuple[int, str, int], Sizes]
_SPARING_BESIDE_MASKS: _Sparing = {
    (0, "forward", 128): (64, 32, 8, 3),
    (0, "forward", 256): (64, 32, 8, 3),
    (0, "key_gradient", 64): (32, 64, 8, 3),
    (0, "key_gradient", 128): (32, 64, 8, 3),
    (0, "key_gradient", 256): (32, 32, 8, 3),
    (0, "query_gradient", 128): (64, 32, 8, 2),
    (0, "query_gradient", 256): (32, 32, 8, 2),
    (8, "key_gradient", 64): (32, 32, 4, 2),
    (9, "key_gradient", 256): (16, 64, 8, 3),
    (10, "key_gradient", 128): (16, 64, 8, 3),
}
_SPARING: _Sparing = {
    (10, "forward", 256): (128, 32, 8, 3),
    (10, "key_gradient", 64): (64, 64, 8, 3),
    (10, "key_gradient", 128): (32, 64, 8, 3),
    (10, "key_gradient", 256): (32, 32, 8, 3),
}


def choices(kernel: str, problem: Problem, device: DeviceFacts) -> list[Sizes]:
    """Tiles worth timing, best first; those for devices with little shared memory last."""
    best = preferred(kernel, problem, device)
    is_float32, width = problem.dtype("qkv") == "float32", _width(problem)
    more = list((_FLOAT32_MORE if is_float32 else _HALF_MORE)[kernel, width])
    if limits_registers(device) and (kernel, width, is_float32) == ("forward", 128, False):
        more.insert(0, SIDE_BY_SIDE)
    return list(dict.fromkeys([*best[:-2], *more, *best[-2:]]))


def is_wide(problem: Problem) -> bool:
    """Tells whether heads are too wide for Triton's kernels: on Hopper the forward is Hopper's, and the backward XLA's."""
    return max(problem.dim("D"), problem.dim("V")) > MAX_HEAD_DIM


def preferred(kernel: str, problem: Problem, device: DeviceFacts) -> list[Sizes]:
    """Tiles to try, best first."""
    width, is_float32 = _width(problem), problem.dtype("qkv") == "float32"
    tiles = (_FLOAT32 if is_float32 else _HALF)[kernel, width]
    if is_float32:
        return _within_blocks(problem, tiles)
    favourite: tuple[Sizes, ...] = ()
    if width == 64:
        favourite = _favourite_64(kernel, problem)
    elif width == 128:
        favourite = _favourite_128(kernel, problem, device)
    return _within_blocks(
        problem, tuple(dict.fromkeys([*_sparing(kernel, problem, device), *favourite, *tiles]))
    )


def _within_blocks(problem: Problem, tiles: tuple[Sizes, ...]) -> list[Sizes]:
    """First the tiles of which a block of the map consists: they are visible as a whole or not at all."""
    size: Any = problem.flag("block_size")
    return sorted(tiles, key=lambda tile: size is not None and bool(size[0] % tile[0] or size[1] % tile[1]))


def _sparing(kernel: str, problem: Problem, device: DeviceFacts) -> tuple[Sizes, ...]:
    """Tiles that need fewer registers, for problems where the usual ones exceed what is available."""
    if device.vendor != "nvidia":
        return ()
    major, width = device.capability[0], _width(problem)
    if kernel == "forward":
        beside_masks = problem.flag("mask") or problem.flag("bias")
    else:  # on an H200 the usual tiles are faster although they spill, except with a bias
        beside_masks = problem.flag("mask") and (major != 9 or problem.flag("bias"))
    tables = [_SPARING_BESIDE_MASKS] if beside_masks else []
    sizes = (table.get((of, kernel, width)) for table in (*tables, _SPARING) for of in (major, 0))
    return tuple(filter(None, sizes))


def _favourite_64(kernel: str, problem: Problem) -> tuple[Sizes, ...]:
    if kernel == "forward" and _windowed(problem):
        return ((64, 64, 4, 2),)
    if kernel == "query_gradient":
        short_rows = _windowed(problem) or problem.flag("segments")
        return ((64, 32, 4, 3),) if short_rows else ((64, 64, 4, 3),) if problem.flag("causal") else ()
    return ()


def _favourite_128(kernel: str, problem: Problem, device: DeviceFacts) -> tuple[Sizes, ...]:
    packed, queries = problem.flag("rows") or problem.flag("segments"), problem.dim("T")
    if kernel == "forward":
        if problem.flag("tiles") or not _ragged(problem):
            # All tiles alike: wide ones pay off, best with two programs per multiprocessor, which requires a register limit.
            limited = limits_registers(device) and register_limits_measured(device)
            widest = (128, 64, 8, 3) if device.capability[0] == 10 else (128, 128, 8, 3)
            return (*((SIDE_BY_SIDE,) if limited else ()), widest)
        if problem.flag("log_forget") and device.capability[0] == 9 and not packed:
            return ((128, 128, 8, 3),)
        return ((64, 32, 4, 3),) if problem.flag("segments") else ()
    if kernel == "key_gradient":
        plain = problem.flag("causal") and not (packed or _windowed(problem) or problem.flag("soft_cap"))
        return ((64, 128, 8, 3),) if plain and queries >= 4096 else ()
    if _windowed(problem):
        return ((64, 64, 4, 2),)
    if problem.flag("segments") or problem.flag("soft_cap"):
        return ((64, 32, 4, 2 if problem.flag("segments") else 3),)
    return ((128, 32, 8, 3),) if queries <= 2048 else ()


def _windowed(problem: Problem) -> bool:
    """Tells whether the static window hides keys on the left."""
    window: Any = problem.flag("window")
    return window is not None and window[0] is not None


def shared_memory(kernel: str, problem: Problem, device: DeviceFacts, tile: Any) -> int:
    """An upper estimate for one program, in bytes: the tiles it keeps, and the streamed ones once per stage; the same on every device."""
    block_q, block_k, num_stages = tile.block_q, tile.block_k, tile.num_stages
    is_float32 = problem.dtype("qkv") == "float32"
    size = 4 if is_float32 else 2
    over_scores = 4 * bool(problem.flag("bias")) + bool(problem.flag("mask"))
    resident, streamed = {
        "forward": (block_q, block_k),
        "key_gradient": (2 * block_k, block_q),
        "query_gradient": (2 * block_q, block_k),
    }[kernel]
    matrices = _width(problem) * size * (resident + 2 * num_stages * streamed)
    if is_float32:  # kept in two halves for the passes of a product, and once more for each kind of loop
        matrices *= 3 if _ragged(problem) else 2
    gradient = size if kernel != "forward" else 0
    return matrices + block_q * block_k * (gradient + num_stages * over_scores)


def _ragged(problem: Problem) -> bool:
    """Tells whether visibility differs between rows, so that kernels have loops with and without a mask on either side."""
    return any(problem.flag(name) for name in ("rows", "segments", "window", "tiles"))


def _width(problem: Problem) -> int:
    """The head dims padded to a power of two, as a kernel holds them."""
    return padded(max(problem.dim("D"), problem.dim("V")), 64)
