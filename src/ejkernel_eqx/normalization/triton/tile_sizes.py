"""The tiles of the norms' kernels, and which are worth timing."""

import dataclasses
import math

import jax.numpy as jnp

from ...dispatch import DeviceFacts, Problem
from ...launch.fields import Checked, Count, Power, Warps
from ...launch.sizes import cdiv, padded, shared_memory_of


@dataclasses.dataclass(frozen=True)
class NormTile(Checked):
    """A program processes `block_m` rows (a power of two); in the backward, `turns` times, with `num_stages` turns loaded at once."""

    block_m: Power
    num_warps: Warps
    turns: Count = 1
    num_stages: Count = 1


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
_DEEP = (4096, 32, 512, 16, 3, 4)
"""Fewer programs with more turns each, and so fewer parts of the weight's gradient to sum: in the norm of a
sum 80 µs for 84 with 16,384 rows and three readers."""


def tile_pairs(problem: Problem, device: DeviceFacts) -> list[tuple[NormTile, NormTile]]:
    """Tiles of the forward and of the backward, the heuristic's first."""
    features, is_sum = problem.dim("F"), "G" not in dict(problem.dims)
    sizes = _NARROW if features <= 1024 else _WIDE
    if is_sum and padded(features, 1) == 1024:
        sizes = (_DEEP, *sizes)
    return [_pair(problem, device, size) for size in sizes]


def _pair(problem: Problem, device: DeviceFacts, size: tuple[int, ...]) -> tuple[NormTile, NormTile]:
    forward, ahead, backward, each, stages, programs = size
    width, item = padded(problem.dim("F"), 1), jnp.dtype(problem.dtype("x")).itemsize
    rows = math.prod(dict(problem.dims).values()) // problem.dim("F")
    first, second = (max(1, elements // width) for elements in (forward, backward))
    turns = rows // (second * programs * max(device.num_multiprocessors, 1))
    # Rows of other leading axes or groups have a gradient of the weight of their own.
    turns = max(1, min(turns, cdiv(problem.dim("M"), second)))
    # Data loaded ahead of its turn waits in shared memory, in at most two fifths of it.
    loads = 3 * second * width * item
    ahead_of = min(stages, turns, 1 + 2 * shared_memory_of(device) // (5 * loads))
    return (
        NormTile(first, _warps(first * width, ahead)),
        NormTile(second, _warps(second * width, each), turns, max(1, ahead_of)),
    )


def _warps(elements: int, each: int) -> int:
    return max(1, min(16, elements // (32 * each)))
