"""Preferred tiles of the Pallas kernels and the memory they take. None has run on a TPU: they are those whose steps the compiler makes shortest
(`benchmarks/tpu_static.py`)."""

from typing import Any

from ...dispatch import DeviceFacts, Problem
from ...launch.sizes import cdiv, tile_bytes, too_large_for_vmem
from .steps import MOST_TILES
from .tile import temporaries

KERNELS = ("forward", "key_gradient", "query_gradient")
Tile = tuple[int, int]
# Best first; between them those of a kernel; small ones last, for devices with little memory and for short calls.
_LARGE: tuple[Tile, ...] = ((1024, 512), (512, 1024), (512, 512))
_SMALL: tuple[Tile, ...] = ((256, 256), (128, 128))
_BETWEEN: dict[str, tuple[Tile, ...]] = {
    "forward": ((1024, 1024), (256, 1024), (256, 512)),
    "key_gradient": ((256, 512), (512, 256)),
    "query_gradient": ((256, 512),),
}
# By the beginning of a device's kind, what comes before these.
_SHORTEST: dict[str, dict[str, Tile]] = {
    "TPU v4": {"forward": (512, 1024), "key_gradient": (512, 1024), "query_gradient": (1024, 256)},
    "TPU v5": {"forward": (512, 512)},
}
_MOST_TABLE = 512 * 2**10  # bytes of scalar memory


def fitting(kernel: str, problem: Problem, device: DeviceFacts) -> list[Tile]:
    """The tiles that fit the problem and the device, best first; the smallest ones if none does."""
    queries, keys = (max(128, cdiv(problem.dim(name), 128) * 128) for name in "TS")
    shortest = [tiles for kind, tiles in _SHORTEST.items() if device.kind.startswith(kind)]
    first = [tiles[kernel] for tiles in shortest if kernel in tiles]
    known = (*first, *_LARGE, *_BETWEEN[kernel], *_SMALL)
    # A tile need not be longer than the call.
    tiles = list(dict.fromkeys((min(q, queries), min(k, keys)) for q, k in _within_blocks(problem, known)))
    return [tile for tile in tiles if tile_unsupported(kernel, problem, tile, device) is None] or [(128, 128)]


def _within_blocks(problem: Problem, tiles: tuple[Tile, ...]) -> list[Tile]:
    """First the tiles of which a block of the map consists: they are visible as a whole or not at all."""
    size: Any = problem.flag("block_size")
    return sorted(tiles, key=lambda tile: size is not None and bool(size[0] % tile[0] or size[1] % tile[1]))


def tile_unsupported(kernel: str, problem: Problem, tile: Tile, device: DeviceFacts) -> str | None:
    """The reason why a tile cannot run the problem, by an estimate."""
    sizes = f"{tile[0]}x{tile[1]}"
    tiles = [cdiv(problem.dim(name), size) for name, size in zip("TS", tile, strict=True)]
    if max(tiles) > MOST_TILES:
        return f"{kernel} with {sizes} tiles has {max(tiles)} of them along one side, a list of steps can name {MOST_TILES}"
    table = 4 * _rows_of_steps(problem) * tiles[0] * tiles[1]
    if table > _MOST_TABLE:
        return f"{kernel} with {sizes} tiles has a list of steps of {table} bytes, scalar memory has room for {_MOST_TABLE}"
    return too_large_for_vmem(kernel, sizes, vmem(kernel, problem, tile), device)


def _rows_of_steps(problem: Problem) -> int:
    """The number of lists of steps a call has, at most."""
    by_row = any(problem.flag(name) for name in ("rows", "segments", "tiles"))
    return (problem.dim("B") if by_row else 1) * (problem.dim("H") if problem.flag("tiles") else 1)


def vmem(kernel: str, problem: Problem, tile: Tile) -> int:
    """An estimate of the vector memory that a launch takes, in bytes."""
    queries, keys = tile
    dtype, dims = problem.dtype("qkv"), (problem.dim("D"), problem.dim("V"))
    shared = dict(problem.dims).get("Dr", 0)  # channels of a key that are in an array of their own
    of_queries = sum(tile_bytes((queries, dim), dtype) for dim in dims)
    of_heads = sum(tile_bytes((keys, dim), dtype) for dim in (dims[0] - shared, dims[1]))
    of_keys = of_heads + (tile_bytes((keys, shared), dtype) if shared else 0)
    over_scores = 0
    if problem.flag("bias"):
        over_scores += tile_bytes(tile, problem.dtype("bias"))
    over_scores += tile_bytes(tile, "int8") * sum(bool(problem.flag(name)) for name in ("mask", "tiles"))
    numbers = 4 * 128 * ((queries + keys) if problem.flag("rows") or problem.flag("segments") else 0)
    # Sums, which stay in scratch memory, and results.
    rows, widths, results = queries, (dims[1 if kernel == "forward" else 0], 128, 128), of_queries // 2
    if kernel == "key_gradient":
        rows, widths = keys, dims
        results = of_heads + (tile_bytes((shared, keys), "float32") if shared else 0)
    blocks = of_queries + of_keys + results + over_scores + numbers
    scratch = sum(tile_bytes((rows, width), "float32") for width in widths)
    return 2 * blocks + scratch + temporaries(kernel, queries, keys, 4 if dtype == "float32" else 2)
