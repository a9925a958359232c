"""The tiles that each kernel prefers, and what shared memory they take."""

import dataclasses
from typing import Any

from ...dispatch import DeviceFacts, Problem
from ...launch.fields import Block, Checked, Count, Power, Programs, Warps
from ...launch.sizes import cdiv, padded, shared_memory_of
from ...quantised.format import BITS, form_of
from ..spec import HALVES, INTERLEAVED, PAIR

Sizes = tuple[Any, ...]
"""The fields of a tile up to its stages or its swizzle."""
_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2} | dict.fromkeys(BITS, 1)


@dataclasses.dataclass(frozen=True)
class GroupedTile(Checked):
    """A tile: `block_m` rows by `block_n` columns, `block_k` of the contracted axis at a time, and `swizzle` rows of tiles that share
    columns in the cache. Of gradients of right sides: `block_k` by `block_n` columns, `block_m` rows at a time; Triton's kernel has no `swizzle`.

    With `block_m` 1, which quantised right sides have in the forward, a program multiplies one row without tensor cores.

    `hopper_programs`: how many programs of Hopper's kernel go from tile to tile, usually one for each multiprocessor; 0 for Triton's kernel,
    with a program for each tile. In Hopper's kernel `num_warps` are those of a consumer, always 4. Both consumers have half of every tile's
    rows or, `alternating`, every other tile of the program, which one stores while the other multiplies."""

    block_m: Power
    block_n: Power
    block_k: Block
    num_warps: Warps
    num_stages: Count
    swizzle: Count = 8
    hopper_programs: Programs = 0
    alternating: bool = False


SMALLEST = GroupedTile(16, 16, 16, 4, 2, 8)

# Rows of a group, from which on the tiles are preferred; best first.
_ROWS: tuple[tuple[int, tuple[Sizes, ...]], ...] = (
    (96, ((128, 256, 64, 8, 4), (128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (128, 128, 64, 8, 4, 16),
          (256, 128, 64, 8, 4, 4), (128, 256, 32, 8, 4), (128, 128, 128, 8, 3), (128, 128, 32, 4, 4))),
    (40, ((64, 256, 64, 4, 4), (64, 128, 64, 4, 4), (64, 256, 64, 8, 4), (128, 128, 64, 8, 4),
          (64, 128, 128, 4, 3), (64, 64, 64, 4, 4))),
    (20, ((32, 128, 128, 4, 4), (32, 256, 64, 4, 4), (64, 128, 64, 4, 4), (32, 64, 128, 4, 4),
          (32, 128, 64, 4, 4))),
    (0, ((16, 128, 128, 4, 4), (16, 64, 128, 4, 5), (16, 64, 256, 4, 3), (16, 128, 64, 4, 5),
         (16, 256, 64, 4, 4), (16, 32, 256, 4, 4), (32, 128, 64, 4, 4))),
)  # fmt: skip
_RIGHT: tuple[Sizes, ...] = (
    (64, 256, 128, 8, 3), (64, 256, 128, 8, 4), (64, 128, 128, 8, 4), (64, 128, 128, 4, 4),
    (64, 128, 256, 8, 3), (32, 256, 128, 8, 4), (32, 128, 128, 4, 4), (32, 64, 64, 4, 3),
)  # fmt: skip


_ONE_ROW: tuple[Sizes, ...] = (
    (1, 16, 1024, 2, 1), (1, 32, 1024, 4, 1), (1, 8, 1024, 1, 1), (1, 8, 2048, 2, 1),
)  # fmt: skip
"""For few groups of more than one row: columns, and twice as much of the contracted axis as with 8 bits. In order of times on an H200."""


def tiles(problem: Problem, device: DeviceFacts) -> dict[str, list[GroupedTile]]:
    """Tiles of Triton's kernels, best first, fitted to the problem and to shared memory."""
    each = problem.dim("M") / max(problem.dim("E"), 1)
    sizes = next(sizes for least, sizes in _ROWS if each >= least)
    if problem.flag("format"):  # a thread has the numbers of a tile in registers
        sizes = tuple(size for size in sizes if size[1] <= 32 * size[3])
    lists = {"forward": sizes, "lhs": sizes, "rhs": _RIGHT}
    fitted = {kernel: _fitted(kernel, sizes, problem, device) for kernel, sizes in lists.items()}
    if each <= 1 and problem.flag("format"):
        fitted["forward"] = _one_row(problem) + fitted["forward"]
    return fitted


def _one_row(problem: Problem) -> list[GroupedTile]:
    """Tiles of one row, those first that have little work on columns that do not exist."""
    inner, bits = problem.dim("K"), BITS[problem.dtype("rhs")]
    sizes = [(m, n, min(k * 4 // bits, padded(inner)), *rest) for m, n, k, *rest in _ONE_ROW]
    made = [GroupedTile(*size) for size in dict.fromkeys(sizes)]
    fitting = [tile for tile in made if narrow_unfit("forward", tile, problem) is None]
    return sorted(fitting, key=lambda tile: 8 * cdiv(inner, tile.block_k) * tile.block_k // inner)


def blocks_unfit(problem: Problem) -> str | None:
    """The reason why kernels cannot read quantised right sides."""
    word = problem.flag("format")
    if not word:
        return None
    form = form_of(str(word))
    columns, each = form.block[1], 32 // form.bits
    if columns & (columns - 1):
        return f"takes blocks of a power of two of columns, not {columns}"
    if problem.dim("K") % each or columns % each:
        return f"reads words of {each} codes, not K = {problem.dim('K')} in blocks of {columns or 'all'}"
    return None


def narrow_unfit(kernel: str, tile: GroupedTile, problem: Problem) -> str | None:
    """The reason why a tile cannot be narrower than those of tensor cores; `None` if it can, or is not."""
    word = problem.flag("format")
    if min(tile.block_m, tile.block_n) >= 16:
        return None
    if kernel != "forward" or tile.block_m != 1 or not word:
        return "has sides from 16 on, but for one row of the forward with a quantised right side"
    form = form_of(str(word))
    columns = form.block[1]
    run = 32 if form.bits == 4 and columns != 16 else 16
    if problem.dim("K") % run or columns % run:
        return f"multiplies one row by runs of {run} columns, not K = {problem.dim('K')} in blocks of {columns or 'all'}"
    return None


def _fitted(
    kernel: str, sizes: tuple[Sizes, ...], problem: Problem, device: DeviceFacts
) -> list[GroupedTile]:
    distinct = {}
    for size in sizes:
        tile = _within(kernel, GroupedTile(*size), problem)
        while shared_memory(kernel, tile, problem, device) > shared_memory_of(device) and tile != SMALLEST:
            tile = _smaller(tile)
        distinct.setdefault(tile, None)
    return sorted(distinct, key=lambda tile: int(8 * waste(kernel, tile, problem)))


def waste(kernel: str, tile: GroupedTile, problem: Problem) -> float:
    """The work of a row of tiles on columns that do not exist, over that on those that do."""
    inner, columns = problem.dim("K"), problem.dim("N")
    across = inner if kernel == "lhs" else columns
    down = cdiv(inner, tile.block_k) * tile.block_k / inner if kernel == "rhs" else 1.0
    return cdiv(across, tile.block_n) * tile.block_n / across * down - 1.0


def _smaller(tile: GroupedTile) -> GroupedTile:
    """The tile with fewer stages, then less of the contracted axis, then smaller sides."""
    if tile.num_stages > 2:
        return dataclasses.replace(tile, num_stages=tile.num_stages - 1)
    longest = max(("block_k", "block_n", "block_m"), key=lambda name: getattr(tile, name))
    if getattr(tile, longest) == 16:
        return SMALLEST
    return dataclasses.replace(tile, **{longest: getattr(tile, longest) // 2})


def _within(kernel: str, tile: GroupedTile, problem: Problem) -> GroupedTile:
    """The tile with sides no longer than the arrays' and, in float32, half as much of the contracted axis and half as many columns. A program with
    two products takes half as many columns of each."""
    inner, columns = problem.dim("K"), problem.dim("N")
    if kernel == "lhs":
        inner, columns = columns, inner
    wide, is_right = problem.dtype("lhs") == "float32", kernel == "rhs"
    has_half = wide or (kernel == "forward" and is_double(problem))
    half = lambda size, is_halved: max(16, size // 2) if is_halved else size
    return dataclasses.replace(
        tile,
        block_m=half(min(tile.block_m, padded(problem.dim("M"))), wide and is_right),
        block_n=min(half(tile.block_n, has_half), padded(columns)),
        block_k=half(min(tile.block_k, padded(inner)), wide and not is_right),
    )


def is_double(problem: Problem) -> bool:
    """Returns whether a program of the forward kernel has two accumulators."""
    return problem.flag("gated") in (PAIR, HALVES, INTERLEAVED)


def shared_memory(kernel: str, tile: GroupedTile, problem: Problem, device: DeviceFacts) -> int:
    """An estimate of the bytes that a program takes: the tiles loaded ahead, and one tile of converted numbers."""
    left, right = _ITEMSIZE[problem.dtype("lhs")], _ITEMSIZE[problem.dtype("rhs")]
    sides = 2 if kernel == "forward" and is_double(problem) else 1
    if kernel == "rhs":
        moved = tile.block_m * (tile.block_n + tile.block_k) * left
        # From Blackwell on, the sum for a bias reads a copy of its own.
        is_twice = problem.flag("bias") and device.vendor == "nvidia" and device.capability >= (10, 0)
        return tile.num_stages * moved * (2 if is_twice else 1)
    moved = tile.block_k * (tile.block_m * left + sides * tile.block_n * right)
    converted = tile.block_k * tile.block_n * left if right < left else 0
    return tile.num_stages * moved + converted
