"""Choice of Hopper's forward kernel and of its tiles, and reasons against it."""

from typing import Any, NamedTuple

import numpy as np

from ....dispatch import DeviceFacts, Problem
from ....launch import gluon_unavailable
from ....launch.sizes import cdiv, padded
from ...log_forget import CHUNK
from ..tile_sizes import is_wide

NARROWEST = 64
"""The least channels of a tile; fewer are padded."""
WIDEST = 512
UNTESTED = "was not tested on a GPU with such head dims: the tuner times both"
LEAST_QUERIES = 128
"""Queries from which on this kernel is used: fewer do not fill a tile."""
_MULTIPROCESSORS = 132
_MOST_SHARED = 232_448
_MOST_NUMBERS = 2**31 - 1
_REFUSED = {
    "bias": "takes no bias",
    "mask": "takes no mask of all scores",
    "alibi_slopes": "takes no ALiBi slopes",
    "dropout": "has no dropout",
    "score_mod": "takes no score_mod",
    "negative_scale": "takes positive scales",
    "extreme_cap": "takes soft caps from 0.01 to 1e9, and scales of 1e-18 to 1e6 times the cap",
}

Sizes = tuple[int, int, int]

# Queries, keys, stages by the padded head dim; of several, `_time_of` decides which comes first.
_TILES: dict[int, tuple[Sizes, ...]] = {
    64: ((192, 128, 2), (128, 128, 4), (192, 128, 4)),
    128: ((128, 128, 2),),
    192: ((128, 128, 2), (128, 64, 4)),
    256: ((128, 64, 2),),
    512: ((128, 64, 1), (128, 32, 2)),
}
# The same for lists of tiles, beside which queries take two places.
_LISTED: dict[int, tuple[Sizes, ...]] = {
    64: ((128, 128, 4), (128, 128, 2), (128, 64, 4)),
    128: ((128, 128, 2), (128, 64, 4)),
}
LISTS_PREFERRED: frozenset[int] = frozenset({128})
"""Padded head dims at which this kernel was measured to be faster with lists of patterns, too."""
# Thresholds of lazy rescaling by the padded head dim, where tiles of keys may be hidden and where none is: by how many units of log2 a row's maximum
# grows before sums are scaled to it. Weights and sums have room for as many. At other head dims sums are scaled at once.
_RESCALE_THRESHOLDS = {128: (8, 0), 256: (8, 8)}
# By the queries of a tile: how long a tile of 128 keys takes; how many of them a tile of queries costs besides, and a tile of keys that is partly
# hidden. From times of head dim 64 at 1,024 to 16,384 tokens; three groups of warps share each tile of keys, and more of theirs are partly hidden.
_COSTS = {128: (1.0, 0.55, 0.25), 192: (1.21, 0.85, 0.5)}
# By the padded head dim: how long programs must have work, in the same unit, for this kernel to be faster under a causal mask or a window. Smaller
# tiles share less work more evenly, and start sooner. Without a mask it was faster even with a tile for every second program.
_LEAST_TIME = {64: 24.0, 128: 10.0, 192: 10.0, 256: 10.0, 512: 0.0}
_POSSIBLE = {
    64: ((128, 64), (128, 128), (192, 64), (192, 128)),
    128: ((128, 64), (128, 128)),
    192: ((128, 64), (128, 128)),
    256: ((128, 64),),
    512: ((128, 32), (128, 64)),
}


def tiles(problem: Problem, device: DeviceFacts) -> list[tuple[int, ...]]:
    """Tiles worth timing, best first, as the fields of a configuration."""
    if too_short(problem) or unfit(problem, device):
        return []
    programs = multiprocessors(device)
    if _listed(problem):
        listed = _LISTED[padded_width(problem)]
        return [(q, k, 4, stages, 0, programs) for q, k, stages in listed if not _cuts_blocks(q, k, problem)]
    sizes = [
        size for size in _TILES[padded_width(problem)] if size[0] <= CHUNK or not problem.flag("log_forget")
    ]
    window: Any = problem.flag("window") or (None, None)
    if problem.flag("segments") or problem.flag("soft_cap") or window[0] is not None:
        # Beside segments three consumers would spill, beside the others they were measured to be slower.
        sizes.sort(key=lambda size: size[0])
    elif len(sizes) > 1:
        sizes.sort(key=lambda size: _time_of(size, problem, programs))
    return [(q, k, 4, stages, 0, programs) for q, k, stages in sizes]


def _time_of(size: Sizes, problem: Problem, programs: int) -> float:
    """The end of the last program, in times of a tile of 128 queries by 128 keys. Keys that only the device knows to be hidden count as visible."""
    (block_q, block_k, _), queries, keys = size, problem.dim("T"), problem.dim("S")
    rate, fixed, hidden = _COSTS[block_q]
    window: Any = problem.flag("window")
    left, right = window or (None, None)
    first = np.arange(0, queries, block_q) + (0 if problem.flag("top_left") else keys - queries)
    last = np.minimum(first + block_q, first[0] + queries) - 1

    def tiles_until(key: Any) -> Any:
        return np.clip(-(-key // block_k), 0, -(-keys // block_k))

    high = np.zeros_like(first) + tiles_until(keys if right is None else last + right + 1)
    low = 0 if left is None else tiles_until(first - left + 1 - block_k)
    partly = 0 if right is None else high - tiles_until(first + right + 2 - block_k)
    partly = partly + (0 if left is None else tiles_until(last - left) - low)
    seen = np.maximum(high - low, 1)
    costs = seen + fixed + hidden * np.minimum(partly, seen)
    rows, costs = max(problem.dim("B") * problem.dim("H"), 1), np.sort(rate * costs)[::-1]
    # If there are more than `n` tiles for each program, one program has `n + 1`, none shorter than the shortest of those that come first.
    rounds = costs[np.arange(0, len(costs) * rows, programs) // rows]
    return max(float(costs.sum()) * rows / programs, float((rounds * np.arange(1, len(rounds) + 1)).max()))


def not_chosen(problem: Problem, device: DeviceFacts) -> str:
    """Says why Triton's kernel is the default, as a clause without its subject; empty if it is not."""
    if (reason := too_short(problem) or unfit(problem, device)) is not None:
        return reason
    if _listed(problem):
        return _lists_not_chosen(problem, device)
    if is_untested(problem):
        return UNTESTED
    if is_wide(problem):
        return ""  # Triton has none
    width, is_masked = padded_width(problem), problem.flag("window") is not None
    if width == 64 and is_masked and problem.flag("soft_cap"):
        return "was measured to be slower with a mask and a soft cap at head dims up to 64"
    if is_masked and _time_of((128, 128, 1), problem, multiprocessors(device)) < _LEAST_TIME[width]:
        return "was measured to be slower with so few tiles"
    return ""


def _lists_not_chosen(problem: Problem, device: DeviceFacts) -> str:
    if padded_width(problem) not in LISTS_PREFERRED or problem.flag("block_size"):
        return "was not measured to be faster with such lists of tiles: the tuner times both"
    count = problem.dim("B") * problem.dim("H") * cdiv(problem.dim("T"), 128)
    return "" if count >= multiprocessors(device) else "is for lists of more tiles"


def is_untested(problem: Problem) -> bool:
    """Tells whether keys of a head's own are in two parts up to 256 channels."""
    width = widths_of(problem)
    return 0 < width.R < 256 and not rotary(problem)


def multiprocessors(device: DeviceFacts) -> int:
    return device.num_multiprocessors or _MULTIPROCESSORS


def too_short(problem: Problem) -> str | None:
    """Says that a call has too few queries, which do not fill a tile."""
    return f"is for {LEAST_QUERIES} queries or more" if problem.dim("T") < LEAST_QUERIES else None


def unfit(problem: Problem, device: DeviceFacts) -> str | None:
    """Says why the kernel cannot run the problem on the device, as a clause without its subject; `None` if it can."""
    return gluon_unavailable(device) or problem_unfit(problem)


def problem_unfit(problem: Problem) -> str | None:
    """Says the same for any device."""
    for flag, reason in _REFUSED.items():
        if problem.flag(flag):
            return reason
    if problem.dtype("qkv") not in ("bfloat16", "float16"):
        return f"takes bfloat16 and float16, not {problem.dtype('qkv')}"
    dim, values, width = problem.dim("D"), problem.dim("V"), widths_of(problem)
    if problem.flag("log_forget") and (
        problem.flag("soft_cap") or _listed(problem) or width.R or is_wide(problem)
    ):
        return "takes no soft cap, no lists of tiles and no head dims above 256 or of two parts beside log_forget"
    if rotary(problem) and (width.first % 8 or (width.D, width.R) != (128, 64)):
        return "takes keys in two parts of 65 to 128 and of up to 64 channels, of whole 16 bytes"
    if width.D != width.V or max(dim, values) > WIDEST:
        return (
            f"takes head dims up to {WIDEST}, of keys and values padded to one size, not {dim} and {values}"
        )
    if dim % 8 or values % 8:
        return f"takes head dims of whole 16 bytes, not of {' and '.join(map(str, dict.fromkeys((dim, values))))} numbers"
    if _listed(problem) and (reason := _lists_unfit(problem)) is not None:
        return reason
    if problem.dim("B") * problem.dim("H") * problem.dim("T") > _MOST_NUMBERS:
        return "takes up to 2**31 queries of all heads"
    return None


def _lists_unfit(problem: Problem) -> str | None:
    """Values of keys that no query sees are cleared before the kernel: which ones has to be known."""
    if padded_width(problem) not in _LISTED:
        return f"takes lists of tiles at head dims up to {max(_LISTED)}"
    if problem.flag("rows") or problem.flag("segments") or problem.flag("unseen"):
        return "takes no lists of tiles beside ranges and segments in arrays"
    if problem.flag("block_size") and problem.flag("tiles") != "any":
        return "takes no map of blocks in an array beside a pattern"
    if all(_cuts_blocks(*size[:2], problem) for size in _LISTED[padded_width(problem)]):
        return "takes maps in arrays whose blocks consist of its tiles"
    return None


def _listed(problem: Problem) -> bool:
    """Tells whether lists say which tiles run."""
    return problem.flag("tiles") is not None


def _cuts_blocks(block_q: int, block_k: int, problem: Problem) -> bool:
    """Tells whether a map of blocks leaves parts of such tiles visible: of a pattern, bits say which; of an array, nothing would."""
    size: Any = problem.flag("block_size")
    return size is not None and bool(size[0] % block_q or size[1] % block_k)


def config_unfit(tile: Any, problem: Problem, device: DeviceFacts) -> str | None:
    """Says why a configuration cannot have the tile, as a clause without its subject; shared memory is not checked."""
    return too_short(problem) or unfit(problem, device) or tile_unfit(tile, problem)


def tile_unfit(tile: Any, problem: Problem) -> str | None:
    """Says the same for a tile on any device."""
    if tile.num_warps != 4:
        return f"has num_warps=4, not {tile.num_warps}"
    sizes, width, lists = (tile.block_q, tile.block_k), padded_width(problem), _listed(problem)
    if sizes in _POSSIBLE[width] and not (lists and (tile.block_q > 128 or _cuts_blocks(*sizes, problem))):
        return None
    return f"does not have tiles of {tile.block_q}x{tile.block_k} at head dims of {width}{' for these lists' if lists else ''}"


def rescale_threshold(width: int, soft_cap: float | None, hides: bool) -> int:
    """The threshold of lazy rescaling; `hides`: whether tiles of keys may be hidden, wholly or partly. A soft cap bounds the weights anyway."""
    hiding, plain = _RESCALE_THRESHOLDS.get(width, (0, 0))
    return 0 if soft_cap else hiding if hides else plain


def shared_memory(tile: Any, problem: Problem) -> int:
    """The bytes that a program takes: queries, stages of keys and values, the output if it has its own place, barriers."""
    width = widths_of(problem)
    places = 3  # with lists: two tiles of queries, and the output
    if not _listed(problem):
        places = 1 if stores_in_place(tile, width) else 2
    return places * tile.block_q * width.D * 2 + _others(tile, width)


class Widths(NamedTuple):
    """Channels of the first part of a key, and those of tiles: of both parts of queries and keys, and of `PARTS` parts of values."""

    first: int
    D: int
    R: int
    V: int
    PARTS: int


def widths(dim: int, values: int, rotary: int = 0) -> Widths:
    """Keys are in two parts if heads share the last channels, and at sizes that one part would pad too far or that no tile of it holds."""
    first = dim - rotary if rotary else min(dim, 128 if dim <= 192 and values <= 128 else 256)
    second, parts = dim - first, cdiv(values, 256)
    rope = 0 if second == 0 else 256 if first == 256 else padded(second, NARROWEST)
    return Widths(first, padded(first, NARROWEST), rope, padded(min(values, 256), NARROWEST), parts)


def widths_of(problem: Problem) -> Widths:
    return widths(problem.dim("D"), problem.dim("V"), rotary(problem))


def stores_in_place(tile: Any, width: Widths) -> bool:
    """Tells whether the output takes the place of the queries, whose successors then wait for it."""
    return 2 * tile.block_q * width.D * 2 + _others(tile, width) > _MOST_SHARED


def _others(tile: Any, width: Widths) -> int:
    """Stages of keys and values, second parts of queries, and barriers."""
    return 2 * (tile.num_stages * tile.block_k * (2 * width.D + width.R) + tile.block_q * width.R) + 1024


def rotary(problem: Problem) -> int:
    """The channels of keys that all heads share, in latent attention."""
    return dict(problem.dims).get("Dr", 0)


def padded_width(problem: Problem) -> int:
    """Channels of a tile of keys."""
    width = widths_of(problem)
    return width.D + width.R
