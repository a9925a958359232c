"""The tiles of the norms' kernels, and which are worth timing."""

import dataclasses

from ...dispatch import DeviceFacts
from ...launch.fields import check_fields, Count, Power, Warps
from ...launch.sizes import cdiv, padded, shared_memory_of


@dataclasses.dataclass(frozen=True)
class NormTile:
    """A program processes `block_m` rows (a power of two); in the backward, `turns` times, with `num_stages` turns loaded at once."""

    block_m: Power
    num_warps: Warps
    turns: Count = 1
    num_stages: Count = 1

    __post_init__ = check_fields


# Forward: elements per program and per thread. Backward: elements per thread (and per program, if rows are narrow), the number of turns
# loaded ahead, and programs per multiprocessor. Best first, as measured on an H200.
_NARROW = (
    (4096, 32, 512, 16, 2, 16),
    (2048, 16, 512, 16, 3, 16),
    (4096, 16, 1024, 16, 1, 8),
    (8192, 32, 512, 8, 3, 16),
)
_WIDE = (
    (4096, 32, 4096, 8, 4, 2),
    (8192, 32, 4096, 8, 3, 4),
    (4096, 16, 4096, 16, 3, 4),
    (8192, 16, 4096, 32, 2, 4),
)
DEEP = (4096, 32, 512, 16, 3, 4)
"""Fewer programs with more turns each, and so fewer parts of the weight's gradient to sum: 80 µs for 84 with 16,384 rows and three readers."""


def tile_pairs(
    device: DeviceFacts,
    rows: int,
    longest: int,
    features: int,
    item: int,
    first: tuple[tuple[int, ...], ...] = (),
) -> list[tuple[NormTile, NormTile]]:
    """Tiles of the forward and of the backward, the heuristic's first, for `rows` in all of `features` with `item` bytes each; `longest` of them
    have the same leading axes, and so a gradient of the weight of their own. `first`: sizes as those below, to be tried before them."""
    return [
        _pair(device, rows, longest, features, item, *size)
        for size in (*first, *(_NARROW if features <= 1024 else _WIDE))
    ]


def _pair(
    device: DeviceFacts,
    rows: int,
    longest: int,
    features: int,
    item: int,
    forward: int,
    ahead: int,
    backward: int,
    each: int,
    stages: int,
    programs: int,
) -> tuple[NormTile, NormTile]:
    width = padded(features, 1)
    first, second = (max(1, elements // width) for elements in (forward, backward))
    turns = rows // (second * programs * max(device.num_multiprocessors, 1))
    turns = max(1, min(turns, cdiv(longest, second)))
    # Data loaded ahead of its turn waits in shared memory, in at most two fifths of it.
    loads = 3 * second * width * item
    ahead_of = min(stages, turns, 1 + 2 * shared_memory_of(device) // (5 * loads))
    return (
        NormTile(first, _warps(first * width, ahead)),
        NormTile(second, _warps(second * width, each), turns, max(1, ahead_of)),
    )


def _warps(elements: int, each: int) -> int:
    return max(1, min(16, elements // (32 * each)))
