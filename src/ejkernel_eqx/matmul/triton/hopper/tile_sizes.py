"""The choice of Hopper's kernels: when they are used, with which tiles, and why not."""

from ....dispatch import DeviceFacts, Problem
from ....launch import gluon_unavailable
from ....launch.sizes import cdiv
from ...core import problem_of
from ...spec import GroupedArrays, GroupedSpec, HALVES, INTERLEAVED, PAIR
from ..tile_sizes import GroupedTile, narrow_unfit, waste

LEAST_ROWS = 64
"""Rows of a group, on average, from which on these kernels are preferred; fewer leave most of a tile empty."""
_MULTIPROCESSORS = 132
_MOST_ROWS, _MOST_TILES = 2**30, 2**31 - 1
_NUMBERS = 128 * 256
"""Sums that both consumers have registers for."""

Sizes = tuple[int, int, int, int, int, bool]

_MANY_ROWS, _SOME_ROWS = 1024, 512
"""Rows of a group, on average, from which on consumers that alternate, or wide tiles, are faster: few tiles are not full, and the end of a tile or
what it reads from L2 counts more. From `_SOME_ROWS` on consumers alternate if the contracted axis has `_DEEP` numbers."""
_DEEP, _DEEPEST = 4096, 8192
"""Numbers of the contracted axis from which on the end of a tile counts little beside what it reads: of `_DEEPEST`, wide tiles are faster still."""

# Rows, columns, contracted axis, stages, swizzle, whether consumers alternate; best first.
_WIDE: tuple[Sizes, ...] = (
    (128, 128, 64, 6, 4, True), (128, 256, 64, 4, 16, False),
    (128, 128, 64, 6, 8, True), (128, 256, 64, 4, 8, False),
)  # fmt: skip
_DEEP_WIDE = (_WIDE[1], _WIDE[3], _WIDE[0], _WIDE[2])
_ALTERNATING = (_WIDE[2], _WIDE[0])
_PRODUCTS: tuple[Sizes, ...] = (
    (128, 128, 64, 6, 8, False), (128, 256, 64, 4, 16, False),
    (128, 128, 64, 6, 16, False), (256, 128, 64, 4, 8, False),
)  # fmt: skip
_GATED: tuple[Sizes, ...] = (
    (128, 128, 64, 4, 8, False), (128, 128, 64, 4, 16, False),
    (128, 64, 64, 6, 8, True), (128, 64, 64, 6, 8, False),
)  # fmt: skip
_RIGHT: tuple[Sizes, ...] = (
    (64, 256, 128, 4, 16, False), (64, 128, 256, 4, 16, False), (64, 128, 128, 6, 16, False),
    (64, 128, 128, 6, 16, True), (64, 256, 128, 4, 8, False),
)  # fmt: skip


def tiles(kernel: str, problem: Problem, device: DeviceFacts) -> list[GroupedTile]:
    """Tiles worth timing, best first; none if Triton's kernel is preferred."""
    if not_chosen(kernel, problem, device):
        return []
    sizes = _RIGHT if kernel == "rhs" else _GATED if _is_double(kernel, problem) else _PRODUCTS
    if sizes is _PRODUCTS:
        sizes = tuple(dict.fromkeys(_preferred(kernel, problem) + _PRODUCTS))
    programs = device.num_multiprocessors or _MULTIPROCESSORS
    fitting = [
        GroupedTile(m, n, k, 4, stages, swizzle, programs, each) for m, n, k, stages, swizzle, each in sizes
    ]
    fitting = [tile for tile in fitting if tile_unfit(kernel, tile, problem) is None]
    # Waste counts in coarse steps, so tiles of similar waste keep their order.
    return sorted(fitting, key=lambda tile: int(16 * waste(kernel, tile, problem)))


def _preferred(kernel: str, problem: Problem) -> tuple[Sizes, ...]:
    """The tiles of many rows, by how many there are and how long the sums are."""
    rows = problem.dim("M") // max(problem.dim("E"), 1)
    depth = problem.dim("K" if kernel == "forward" else "N")
    if rows >= _MANY_ROWS:
        return _WIDE if depth < _DEEPEST else _DEEP_WIDE
    return _ALTERNATING if rows >= _SOME_ROWS and depth >= _DEEP else ()


def not_chosen(kernel: str, problem: Problem, device: DeviceFacts) -> str:
    """The reason why Triton's kernel is preferred, as a clause without its subject; empty if it is not."""
    if problem.dim("M") < LEAST_ROWS * problem.dim("E"):
        return f"is for groups of {LEAST_ROWS} rows or more on average"
    return unfit(kernel, problem, device) or ""


def unfit(kernel: str, problem: Problem, device: DeviceFacts) -> str | None:
    """The reason why the kernel cannot run the problem on the device, as a clause without its subject; `None` if it can."""
    return gluon_unavailable(device) or problem_unfit(kernel, problem)


def problem_unfit(kernel: str, problem: Problem) -> str | None:
    """The reason why the kernel cannot run the problem on any device."""
    dtypes = dict(problem.dtypes)
    size = {name: problem.dim(name) for name in "BMKNE"}
    width = size["N"] * (2 if problem.flag("gated") in (HALVES, INTERLEAVED) else 1)
    if dtypes["lhs"] not in ("bfloat16", "float16") or dtypes["rhs"] != dtypes["lhs"]:
        return f"takes bfloat16 and float16 on both sides, not {dtypes['lhs']} and {dtypes['rhs']}"
    wider = kernel != "forward" and dtypes["out"] == "float32"  # a gradient, which is rounded before
    if dtypes["out"] != dtypes["lhs"] and not wider:
        return f"writes the dtype of the left side, {dtypes['lhs']}, not {dtypes['out']}"
    if kernel != "lhs" and problem.flag("gathered"):
        return "does not gather rows"
    if kernel == "forward" and problem.flag("gated") == INTERLEAVED:
        return "does not take interleaved columns apart"
    columns = (size["K"], width, size["N"]) if kernel == "forward" else (size["K"], width)
    if any(number % 8 for number in columns):
        return (
            f"takes rows of whole 16 bytes, not of {' and '.join(map(str, dict.fromkeys(columns)))} numbers"
        )
    if max(size["B"] * size["M"], size["B"] * size["E"] * max(size["K"], width)) > _MOST_ROWS:
        return "takes up to 2**30 rows"
    return None


def tile_unfit(kernel: str, tile: GroupedTile, problem: Problem) -> str | None:
    """The reason why the kernel cannot have the tile, as a clause without its subject; shared memory is not checked."""
    down, across, depth = _sides(kernel, tile, problem)
    if tile.num_warps != 4:
        return f"has num_warps=4, not {tile.num_warps}"
    numbers = down * across * (2 if _is_double(kernel, problem) else 1) * (2 if tile.alternating else 1)
    if down not in (128, 256) or not 64 <= across <= 256 or depth not in (64, 128) or numbers > _NUMBERS:
        form = "alternating tiles" if tile.alternating else "tiles"
        return f"does not have {form} of {down}x{across}x{depth}"
    size = {name: problem.dim(name) for name in "BMKNE"}
    rows = cdiv(size["B"] * size["M"], down) + size["B"] * (size["E"] + 1)
    if kernel == "rhs":
        rows = size["B"] * size["E"] * cdiv(2 * max(size["K"], size["N"]), down)
    if rows * cdiv(2 * max(size["K"], size["N"]), across) > _MOST_TILES:
        return "has up to 2**31 tiles"
    return None


def shared_memory(kernel: str, tile: GroupedTile, problem: Problem) -> int:
    """The bytes that a program takes: stages, what is stored at once, barriers."""
    down, across, depth = _sides(kernel, tile, problem)
    stage = (down + across * (2 if _is_double(kernel, problem) else 1)) * depth * 2
    return tile.num_stages * stage + min(down * across * 2, 2 * 16_384) + 512


def check(kernels: tuple[str, ...], config: object, arrays: GroupedArrays, spec: GroupedSpec) -> None:
    """`ValueError` if a configuration has Hopper's kernels, or narrow tiles, for a call that they cannot run."""
    problem = problem_of("grouped_matmul", arrays, spec)
    for kernel in kernels:
        tile = getattr(config, kernel)
        if (reason := narrow_unfit(kernel, tile, problem)) is not None:
            raise ValueError(f"config: expected wider tiles in {kernel}, received {tile}, which {reason}.")
        if tile.hopper_programs:
            reason = problem_unfit(kernel, problem) or tile_unfit(kernel, tile, problem)
            if reason is not None:
                raise ValueError(
                    f"config: expected hopper_programs=0 in {kernel}, received {tile.hopper_programs}: Hopper's kernel {reason}."
                )


def _is_double(kernel: str, problem: Problem) -> bool:
    """Returns whether a tile has two sums."""
    return kernel == "forward" and problem.flag("gated") in (PAIR, HALVES)


def _sides(kernel: str, tile: GroupedTile, problem: Problem) -> tuple[int, int, int]:
    """Rows and columns of a tile as the kernel stores it, and the contracted axis."""
    if kernel != "rhs":
        return tile.block_m, tile.block_n, tile.block_k
    down, across = tile.block_k, tile.block_n
    return (across, down, tile.block_m) if problem.flag("transpose_rhs") else (down, across, tile.block_m)
