"""The choice of blocks of pages and tiles of queries, by their bytes of vector memory."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from ...dispatch import DeviceFacts, Problem
from ...launch.sizes import rows_of, tile_bytes, too_large_for_vmem
from ..flat import part_of
from ..spec import page_dtypes
from .call import block_pages, LANES, PallasConfig, row_tile

_TWO_CORES = ("TPU v4", "TPU v5", "TPU v5p")
"""Kinds of devices whose two cores share one memory and one program."""
_BLOCK = 512 * 2**10
"""Bytes of one kind of pages in a block: enough for the memory to stream, and little to compute when a sequence ends early."""
_SCORES = 2**20
"""Bytes of a tile of scores."""
_ROWS = 128
"""Rows of queries and heads that a tile of keys is multiplied with in the time that it takes to load."""
_ROWS_WITH_BIAS = 512
"""A bias for pairs of queries is for drafts and trees of them, which this kernel alone takes."""
_KEYS = (1024, 512, 256, 128, 64, 32, 16)
_BY_HEAD = ((128, 256), (64, 256), (64, 512), (128, 128), (32, 256), (32, 128), (16, 128), (16, 64), (16, 16))
_TOGETHER = ((512, 512), (256, 512), (512, 256), (256, 256), (1024, 256), (128, 256), (128, 128), (16, 16))
"""Queries by keys with several key heads, and queries times heads by keys with one; best first."""
_MOST_CANDIDATES = 6


def dtypes(problem: Problem) -> dict[str, str]:
    """The dtype of every kind of pages."""
    first, second = page_dtypes(problem)
    return {"key": first, "rope" if problem.flag("latent") else "value": second}


def page_of(problem: Problem) -> int:
    """The keys of a page, as kernels see it: a sequence's only page is split if it is large."""
    return part_of(problem.dim("p")) if problem.dim("M") == 1 else problem.dim("p")


def candidates(problem: Problem, device: DeviceFacts) -> list[PallasConfig]:
    """Configurations worth timing, the heuristic first: the blocks that fit."""
    cores = _cores(problem, device)
    most, keys = few(problem), problem.dim("M") * problem.dim("p")
    # One size for each block of whole pages that sizes stand for.
    blocks = {_columns(problem, min(size, max(keys, 16))): min(size, max(keys, 16)) for size in _KEYS}
    decode = sorted(blocks.values(), key=lambda size: _strain(problem, most, size))
    decode = [size for size in decode if _fits(decode_bytes(problem, most, size), device)]
    prefill = [tile for tile in _tiles(problem) if _fits(prefill_bytes(problem, *tile), device)]
    if not decode or not prefill:
        return [smallest(problem, device)]
    # The second kernel is not launched then, so one of its tiles is enough.
    if problem.dim("Q") <= most:
        prefill = prefill[:1]
    columns: list[list[Any]] = [decode, prefill]
    configs = [PallasConfig(most, keys, q, k, cores) for keys, (q, k) in rows_of(columns)]
    return list(dict.fromkeys(configs))[:_MOST_CANDIDATES]


def few(problem: Problem) -> int:
    """The most queries that are computed with all heads at once."""
    rows = _ROWS_WITH_BIAS if problem.flag("qq_bias") else _ROWS
    return max(1, min(problem.dim("Q"), rows // problem.dim("H")))


def _tiles(problem: Problem) -> list[tuple[int, int]]:
    """Queries and keys of a tile, best first."""
    if problem.dim("K") > 1:
        return list(_BY_HEAD)
    return [(max(1, rows // problem.dim("H")), keys) for rows, keys in _TOGETHER]


def _fits(needed: int, device: DeviceFacts) -> bool:
    return too_large_for_vmem("", "", needed, device) is None


def _strain(problem: Problem, queries: int, keys: int) -> float:
    """The ratio of a block to the best size, or its inverse: at least 1."""
    rows = keys * problem.dim("K")
    kinds = zip(widths(problem), dtypes(problem).values())
    widest = rows * max(width * jnp.dtype(dtype).itemsize for width, dtype in kinds)
    scores = 4 * rows * queries * problem.dim("H")
    used = max(widest / _BLOCK, scores / _SCORES)
    return max(used, 1 / used)


def heads_fill_words(heads: int, dtype: DTypeLike) -> bool:
    """Reports whether XLA puts the few heads of a token, and no other token, into the rows of a tile."""
    return heads in (1, 2, 4) and heads * jnp.dtype(dtype).itemsize >= 4


def read_in_place(heads: int, width: int, dtype: str) -> bool:
    """Reports whether a page of `width` channels, a multiple of 128, lies in memory as the matrix `[p * K, D]` that kernels read. XLA fills the
    rows of a tile with the heads of a token if these fill a word, and with tokens otherwise."""
    if heads_fill_words(heads, dtype):
        return width == LANES
    return heads == 1 or heads % 8 == 0


def widths(problem: Problem) -> tuple[int, int]:
    """The channels of every kind of pages."""
    dim, values = problem.dim("D"), problem.dim("V")
    return (values, dim - values) if problem.flag("latent") else (dim, values)


def smallest(problem: Problem, device: DeviceFacts) -> PallasConfig:
    queries = few(problem) if problem.flag("qq_bias") else 1
    return PallasConfig(queries, 16, 16 if problem.dim("K") > 1 else 1, 16, _cores(problem, device))


def adapted(config: PallasConfig, problem: Problem, device: DeviceFacts) -> PallasConfig:
    """Keeps the blocks; the number of cores is the device's."""
    return dataclasses.replace(config, cores=_cores(problem, device))


def _cores(problem: Problem, device: DeviceFacts) -> int:
    return max(1, min(2 if device.kind in _TWO_CORES else 1, problem.dim("N")))


def too_large(problem: Problem, config: PallasConfig, device: DeviceFacts) -> str | None:
    """The reason why a configuration does not fit the device; `None` if it does."""
    few = min(config.decode_queries, problem.dim("Q"))
    kernels = {"decode": (few, config.decode_keys, decode_bytes)}
    if problem.dim("Q") > few:
        kernels["prefill"] = config.block_q, config.block_k, prefill_bytes
    reasons = (
        too_large_for_vmem(name, f"{queries}x{keys}", needed(problem, queries, keys), device)
        for name, (queries, keys, needed) in kernels.items()
    )
    return next(filter(None, reasons), None)


def decode_bytes(problem: Problem, queries: int, keys: int) -> int:
    """An estimate of the bytes that the kernel takes with all heads at once."""
    heads = _heads(problem, queries)
    rows, columns = queries * heads, _columns(problem, keys)
    state = tile_bytes((rows, problem.dim("V")), "float32") + 2 * tile_bytes((rows, 128), "float32")
    # Scores, weights and the operands of their products.
    values = 3 * tile_bytes((rows, columns), "float32") + _page_bytes(problem, columns)
    return _buffers(problem, queries, heads, columns) + state + values


def prefill_bytes(problem: Problem, queries: int, keys: int) -> int:
    """An estimate of the bytes that the kernel for many queries takes."""
    if problem.dim("K") == 1:
        return decode_bytes(problem, queries, keys)
    heads, page = _heads(problem, queries), page_of(problem)
    rows, keys = queries * problem.dim("H"), block_pages(page, page, keys) * page
    columns = keys * problem.dim("K")
    wide = "float32" if "float32" in (problem.dtype("q"), *dtypes(problem).values()) else "bfloat16"
    state = tile_bytes((rows, problem.dim("V")), "float32") + 2 * tile_bytes((rows, 128), "float32")
    by_head = sum(tile_bytes((columns, width), wide) for width in widths(problem))
    by_head += tile_bytes((rows, problem.dim("D")), wide)
    values = 3 * tile_bytes((rows // problem.dim("K"), keys), "float32") + by_head
    return _buffers(problem, queries, heads, columns) + state + by_head + values


def _heads(problem: Problem, queries: int) -> int:
    return problem.dim("H") if queries == 1 else row_tile(problem.dim("H"), problem.dtype("q"))


def _columns(problem: Problem, keys: int) -> int:
    page, rows = page_of(problem), page_of(problem) * problem.dim("K")
    return block_pages(page, rows, keys) * rows


def _page_bytes(problem: Problem, columns: int) -> int:
    kinds = zip(widths(problem), dtypes(problem).values(), strict=True)
    return sum(tile_bytes((columns, width), dtype) for width, dtype in kinds)


def _buffers(problem: Problem, queries: int, heads: int, columns: int) -> int:
    """The bytes of what is copied to and fro, each twice: pages, queries, results."""
    q = problem.dtype("q")
    small = sum(tile_bytes((queries, heads, problem.dim(width)), q) for width in ("D", "V"))
    return 2 * (_page_bytes(problem, columns) + small + tile_bytes((queries, 1, heads), "float32"))
