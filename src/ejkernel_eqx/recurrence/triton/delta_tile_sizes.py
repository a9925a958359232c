"""Configurations of the delta rules and of transitions of rank one on Triton: the heuristic choice and those worth timing.

Chosen by measurements on an H200; on other devices the first that fits in shared memory.
"""

from ...dispatch import DeviceFacts, Problem
from ...launch.sizes import fitting, numbers_of, padded
from ..spec import KEY
from .tile_sizes import multiprocessors, narrowed, programs_of, splits_of, Tile, TritonConfig, variants

_LEAST_SPLIT, _FEWEST = 2048, 4  # tokens of a sequence's part, and parts
# 64 rows (values) of a state per program of 4 warps, where products have 64 rows, so that they stay in a warp's registers from one product
# to the next. Devices before Hopper do not have that many registers.
_SERIAL = "128 64 4 3, 128 64 4 2, 128 32 4 2, 128 32 4 1, 128 16 4 1"
_OLDER = "128 32 4 2, 128 32 4 1, 128 16 4 1"
_HALF = {
    "scores": "64 64 4 1",
    "wy": "64 128 4 1, 64 64 4 2, 64 64 4 1, 64 32 4 1",
    "states": _SERIAL,
    "out": _SERIAL,
    "dstates": _SERIAL,
    "gradients": "64 64 4 2, 64 64 4 1, 32 64 4 2, 32 64 4 1, 32 32 4 1",
}
# With two stages a program would have a multiprocessor for itself: 144 for 95 microseconds at 12 heads of 64.
_NARROW_GRADIENTS = "64 64 4 1, 32 64 4 1, 32 32 4 1"
_KEY_GRADIENTS = "32 64 4 2, 32 64 4 1, 32 32 4 1"
# Without spills (64 channels have 280 bytes a thread on Hopper), which an H200 does not reward: 365 for 343 microseconds.
_KEY_SCORES = "32 64 4 1"
_FLOAT32 = {
    **dict.fromkeys(("scores", "wy"), "32 32 4 1"),
    **dict.fromkeys(("states", "out", "dstates"), "128 16 4 1"),
    "gradients": "64 32 8 1, 32 32 4 1",
}
# Transitions of rank one: what differs in bfloat16.
_RANK_ONE = {
    "scores": "64 64 8 1",
    "wy": "64 128 8 1, 64 64 8 1, 32 32 4 1",
    "gradients": "32 128 4 2, 32 64 4 1, 32 32 4 1",
}
# Before Hopper: what spills least (compiled, not measured).
_RANK_ONE_OLDER = {
    "scores": "64 64 8 1",
    "wy": "64 64 8 1, 32 32 4 1",
    "gradients": "32 64 8 1, 32 32 4 1",
}
_OTHERS = {
    "states": "128 64 4 2, 128 32 4 3, 128 128 8 3",
    "out": "128 64 4 2, 128 32 4 3, 128 128 8 3",
    "dstates": "128 64 4 2, 128 32 4 3, 128 128 8 2",
    "wy": "64 64 4 2, 64 32 4 3",
    "gradients": "64 128 4 1, 64 32 4 3, 32 64 4 2, 32 32 4 3",
}


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    chunk, rows = 64, _HALF
    if problem.dtype("qkv") != "bfloat16":  # float16 operands become float32
        chunk, rows = 32, _FLOAT32
    elif problem.flag("decay") == KEY:
        rows = _HALF | {"gradients": _KEY_GRADIENTS}
    elif problem.dim("D") <= 64:
        rows = _HALF | {"gradients": _NARROW_GRADIENTS}
    if problem.flag("rank_one") and problem.dtype("qkv") == "bfloat16":
        rows = rows | _RANK_ONE
        # With narrow keys four warps are faster, although they spill.
        rows |= {"scores": "64 64 4 1"} if problem.dim("D") <= 64 else {}
    if problem.dtype("qkv") == "bfloat16" and device.capability < (9, 0):
        rows = rows | dict.fromkeys(("states", "out", "dstates"), _OLDER)
        rows = rows | (_RANK_ONE_OLDER if problem.flag("rank_one") else {})
    if problem.dim("D") > 128:
        chunk = 32
    tiles = {name: _fitting(name, rows[name], chunk, problem, device)[0] for name in rows}
    precision = "tf32x3" if device.vendor == "nvidia" else "ieee"
    programs, splits = programs_of(problem, tiles["out"].block_v), 1
    if not problem.flag("step"):
        # As many parts of each sequence as have programs that run on the device at once. A few do not pay for the first launch, which computes the
        # effect of each part on a zero state and on the identity.
        splits = splits_of(problem, _LEAST_SPLIT, multiprocessors(device) // programs)
    splits = splits if splits >= _FEWEST else 1
    return TritonConfig(chunk, **tiles, float32_dot=precision, single=False, splits=splits)


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first; each differs from it in one tile."""
    first = default_config(problem, device)
    if problem.dtype("qkv") != "bfloat16":
        return [first]
    tried = _OTHERS | ({"scores": _KEY_SCORES} if problem.flag("decay") == KEY else {})
    fit = [(name, _fitting(name, rows, first.chunk_size, problem, device)) for name, rows in tried.items()]
    return variants(first, fit, (1, 2 * first.splits))


def _fitting(name: str, rows: str, chunk: int, problem: Problem, device: DeviceFacts) -> list[Tile]:
    """The tiles that fit in shared memory, else the last; none is wider than the channels."""
    tiles = [narrowed(row, problem) for row in numbers_of(rows)]
    return fitting(tiles, lambda tile: _shared_memory(name, tile, chunk, problem), device) or tiles[-1:]


def _shared_memory(name: str, tile: Tile, chunk: int, problem: Problem) -> int:
    """An upper bound for one program, in bytes: what a step of its loop loads, per stage, plus what it keeps."""
    dim, keyed = padded(problem.dim("D")), problem.flag("decay") == KEY
    narrow, square = chunk * tile.block_v, chunk * chunk
    if problem.flag("rank_one"):
        loaded, kept = {
            "scores": (0, 4 * chunk * tile.block_k + 3 * square),
            "wy": (4 * narrow + 2 * square + (chunk + tile.block_v) * tile.block_k, 0),
            "states": (3 * chunk * dim + narrow + square, 0),
            "out": (4 * chunk * dim + narrow + 3 * square, 0),
            "dstates": (3 * chunk * dim + narrow + square, 0),
            "gradients": (4 * narrow + 2 * tile.block_v * tile.block_k, 4 * chunk * tile.block_k + square),
        }[name]
        return _bytes(loaded, kept, tile, problem)
    loaded, kept = {
        "scores": (0, 2 * chunk * tile.block_k + 3 * square),
        "wy": (4 * narrow, 0),
        "states": ((1 + keyed) * chunk * dim + narrow + square, square),
        "out": ((2 + keyed) * chunk * dim + narrow + 2 * square, square),
        "dstates": ((2 + keyed) * chunk * dim + narrow + 2 * square, 0 if keyed else square),
        "gradients": (3 * narrow + 2 * tile.block_v * tile.block_k, 2 * chunk * tile.block_k),
    }[name]
    return _bytes(loaded, kept, tile, problem)


def _bytes(loaded: int, kept: int, tile: Tile, problem: Problem) -> int:
    size = 2 if problem.dtype("qkv") == "bfloat16" else 4
    return size * (tile.num_stages * loaded + kept) + 10 * 1024
