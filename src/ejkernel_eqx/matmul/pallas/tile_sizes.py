"""The tiles that each kernel prefers on a TPU, by a model of its time, and what vector memory they take."""

import dataclasses
import itertools
from typing import Annotated, NamedTuple

from ...dispatch import DeviceFacts, Problem
from ...launch.fields import Checked, power_of_two
from ...launch.sizes import cdiv, padded
from ..spec import HALVES, INTERLEAVED, PAIR
from .products_kernel import CHUNK

Rows = Annotated[int, power_of_two(16)]
Lanes = Annotated[int, power_of_two(128)]
ITEMSIZE = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}
_LEAST_VMEM = 16 * 2**20  # bytes, of a device that does not report its size


@dataclasses.dataclass(frozen=True)
class TpuTile(Checked):
    """A tile: `block_m` rows by `block_n` columns, `block_k` of the contracted axis at a time. Of gradients of right sides: `block_k` by
    `block_n` columns, `block_m` rows at a time. Sides longer than an axis are as long as it."""

    block_m: Rows
    block_n: Lanes
    block_k: Lanes


SMALLEST = TpuTile(16, 128, 128)


class Product(NamedTuple):
    """The sizes of one kernel's work."""

    rows: int
    groups: int
    inner: int
    columns: int
    sides: int  # right sides that are multiplied by one left side
    sums: int  # products that are added
    left: int  # bytes of a number of the left side, and so on
    right: int
    out: int  # bytes of all results at one place
    turned: bool  # whether matrices of groups are stored with the columns first


def product_of(kernel: str, problem: Problem) -> Product:
    gated = problem.flag("gated")
    left, right, out = (ITEMSIZE[problem.dtype(name)] for name in ("lhs", "rhs", "out"))
    rows, groups = problem.dim("B") * problem.dim("M"), problem.dim("B") * problem.dim("E")
    inner, columns = problem.dim("K"), problem.dim("N")
    width = columns * (2 if gated in (HALVES, INTERLEAVED) else 1)
    turned = bool(problem.flag("transpose_rhs")) != (kernel == "lhs")
    if kernel == "lhs":
        return Product(rows, groups, width, inner, 1, 2 if gated == PAIR else 1, left, right, left, turned)
    product = Product(rows, groups, inner, width, 1, 1, left, left, left, turned)
    if kernel == "rhs":
        return product
    if gated == INTERLEAVED:
        return product._replace(right=right, out=4)
    sides = 1 if gated is None else 2
    saved = 0 if problem.flag("activation") is None and gated is None else sides
    return product._replace(columns=columns, sides=sides, right=right, out=out + saved * left)


def vmem(kernel: str, tile: TpuTile, p: Product) -> int:
    """An estimate of the bytes of vector memory: blocks that are loaded and stored while others are computed, sums, and what is being computed."""
    m, n, k = min(tile.block_m, p.rows), min(tile.block_n, p.columns), min(tile.block_k, p.inner)
    has_sums = k < p.inner or k > CHUNK
    matrix = (n, k) if p.turned else (k, n)
    if kernel == "rhs":
        moved = _stored(m, k, p.left) + _stored(m, n, p.right) + _stored(*matrix, p.out)
        return 2 * moved + _stored(*matrix, 4) + right_values(m, n, k)
    operands = p.sums * (_stored(m, k, p.left) + p.sides * _stored(*matrix, p.right))
    moved = operands + _stored(m, n, 2) // 2 * p.out
    sums = p.sides * _stored(m, n, 4) * has_sums
    return 2 * moved + sums + values(m, n, k, p.sides, p.sums, p.left, p.right)


def values(m: int, n: int, k: int, sides: int, sums: int, left: int, right: int) -> int:
    """The bytes of what a step computes before it is added or written: products, and parts of right sides that are converted."""
    part = min(k, CHUNK)
    converted = _stored(part, n, 4) + _stored(part, n, left) if right < left else 0
    return (1 + sides) * _stored(m, n, 4) + sides * sums * converted


def right_values(m: int, n: int, k: int) -> int:
    """The memory of a tile of the gradient of a right side: a product, and operands whose rows are masked."""
    return _stored(k, n, 4) + _stored(m, k, 4) + _stored(m, n, 4)


def _stored(rows: int, columns: int, size: int) -> int:
    """The bytes that a matrix of numbers of `size` bytes takes in vector memory: tiles of 8 words by 128 numbers."""
    return size * (cdiv(rows, 32 // size) * (32 // size)) * (cdiv(columns, 128) * 128)


_ROWS = (512, 256, 128, 64, 32, 16)
_COLUMNS = (1024, 512, 256, 128)
_INNER = (16384, 8192, 4096, 2048, 1024, 512, 128)
_ALL = _ROWS, _COLUMNS, _INNER
_SIZES = {"forward": _ALL, "lhs": _ALL, "rhs": ((512, 256, 128), _COLUMNS, _COLUMNS)}
MOST = 8


def tiles(kernel: str, problem: Problem, device: DeviceFacts) -> list[TpuTile]:
    """Tiles that fit, the quickest by the model first."""
    p, room = product_of(kernel, problem), (device.vmem or _LEAST_VMEM) * 4 // 5
    times: dict[TpuTile, float] = {}
    for sizes in itertools.product(*_SIZES[kernel]):
        tile = _within(TpuTile(*sizes), p)
        if tile not in times and vmem(kernel, tile, p) <= room:
            times[tile] = seconds(kernel, tile, p)
    return sorted(times, key=lambda tile: times[tile])[:MOST] or [SMALLEST]


def _within(tile: TpuTile, p: Product) -> TpuTile:
    """The tile with sides no longer than needed."""
    return TpuTile(
        min(tile.block_m, padded(p.rows)),
        min(tile.block_n, padded(p.columns, 128)),
        min(tile.block_k, padded(p.inner, 128)),
    )


# Of a TPU v6e, in bf16; the others differ in scale more than in proportion. A step of the grid costs about a third of a microsecond. Before rows
# are multiplied their matrix is loaded into the unit that multiplies, which takes as long as these many rows by the compiler's schedule.
_FLOPS, _BYTES, _STEP, _LOADING = 918e12, 1.6e12, 0.35e-6, 128


def seconds(kernel: str, tile: TpuTile, p: Product) -> float:
    """A model of the time of a launch: the longer of products and loads, and a start for each step of the grid. It knows what is loaded again, and
    the rows and columns that are computed in vain; it has not been compared with a TPU."""
    m, n, k = min(tile.block_m, p.rows), min(tile.block_n, p.columns), min(tile.block_k, p.inner)
    across, down = cdiv(p.columns, n), cdiv(p.inner, k)
    visits = cdiv(p.rows, m) + min(p.groups, p.rows) - 1
    padded_n, padded_k = cdiv(n, 128) * 128 * across, cdiv(k, 128) * 128 * down
    flops = 2.0 * visits * (m + _LOADING) * padded_n * padded_k * p.sides * p.sums * (p.left // 2) ** 2
    if kernel == "rhs":
        moved = visits * m * (p.inner * across * p.left + p.columns * down * p.right)
        moved += p.groups * p.inner * p.columns * p.out
    else:
        # A matrix stays where it is from one visit to the next unless there are several steps to it.
        loads = min(p.groups, p.rows) if down == 1 else visits
        moved = p.sums * p.inner * (visits * m * across * p.left + loads * p.columns * p.sides * p.right)
        moved += p.rows * p.columns * p.out
    return max(flops / _FLOPS, moved / _BYTES) + visits * across * down * _STEP
