"""Which blocks of pages and tiles of queries to use, by their bytes of vector memory."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ...dispatch import DeviceFacts, Problem
from ...launch.sizes import tile_bytes, too_large_for_vmem
from ..spec import page_dtypes
from .call import block_pages, PallasConfig, row_tile

_TWO_CORES = ("TPU v4", "TPU v5", "TPU v5p")
"""Kinds of devices whose two cores share one memory and one program."""
_BLOCK = 512 * 2**10
"""Bytes of one kind of pages in a block: enough for the memory to stream, and little to compute when a sequence ends early."""
_SCORES = 2**20
"""Bytes of a tile of scores."""
_ROWS = 128
"""Rows of queries and heads that a tile of keys is multiplied with in the time that it takes to load."""
_KEYS = (256, 512, 128, 1024, 64, 32, 16)


def dtypes(problem: Problem) -> dict[str, str]:
    """The dtype of every kind of pages."""
    first, second = page_dtypes(problem)
    return {"key": first, "rope" if problem.flag("latent") else "value": second}


def sublanes(dtype: Any) -> int:
    """The rows of a tile of memory."""
    return 32 // jnp.dtype(dtype).itemsize


def cores_of(device: DeviceFacts) -> int:
    return 2 if device.kind in _TWO_CORES else 1


def candidates(problem: Problem, device: DeviceFacts) -> list[PallasConfig]:
    """The blocks that fit, best first."""
    queries = max(1, min(problem.dim("Q"), _ROWS // problem.dim("H")))
    cores = min(cores_of(device), problem.dim("N")) or 1
    keys = problem.dim("M") * problem.dim("p")
    found = []
    for size in sorted(_KEYS, key=lambda size: _strain(problem, queries, min(size, keys))):
        found.append(PallasConfig(queries, min(size, max(keys, 16)), 128, 128, cores))
    found = [config for config in found if too_large(problem, config, device) is None]
    return list(dict.fromkeys(found))[:6] or [smallest(problem, device)]


def _strain(problem: Problem, queries: int, keys: int) -> float:
    """How far a block is from the best size, as a ratio."""
    rows = keys * problem.dim("K")
    widest = max(
        rows * width * jnp.dtype(dtype).itemsize
        for width, dtype in zip(_widths(problem), dtypes(problem).values())
    )
    scores = 4 * rows * queries * problem.dim("H")
    used = max(widest / _BLOCK, scores / _SCORES)
    return max(used, 1 / used)


def _widths(problem: Problem) -> tuple[int, int]:
    dim, values = problem.dim("D"), problem.dim("V")
    return (values, dim - values) if problem.flag("latent") else (dim, values)


def smallest(problem: Problem, device: DeviceFacts) -> PallasConfig:
    return PallasConfig(1, 16, 16, 16, min(cores_of(device), problem.dim("N")) or 1)


def adapted(config: PallasConfig, device: DeviceFacts) -> PallasConfig:
    return dataclasses.replace(config, cores=cores_of(device))


def too_large(problem: Problem, config: PallasConfig, device: DeviceFacts) -> str | None:
    needed = decode_bytes(problem, config)
    return too_large_for_vmem("decode", f"{config.decode_queries}x{config.decode_keys}", needed, device)


def decode_bytes(problem: Problem, config: PallasConfig) -> int:
    """An estimate of the bytes that the kernel for few queries takes."""
    queries = min(config.decode_queries, problem.dim("Q"))
    heads = problem.dim("H") if queries == 1 else row_tile(problem.dim("H"), problem.dtype("q"))
    rows, of_page = queries * heads, problem.dim("p") * problem.dim("K")
    columns = block_pages(problem.dim("p"), problem.dim("K"), config.decode_keys) * of_page
    q = problem.dtype("q")
    pages = sum(
        tile_bytes((columns, width), dtype)
        for width, dtype in zip(_widths(problem), dtypes(problem).values())
    )
    small = tile_bytes((rows, problem.dim("D")), q) + tile_bytes((rows, problem.dim("V")), q)
    state = tile_bytes((rows, problem.dim("V")), "float32") + 2 * tile_bytes((rows, 128), "float32")
    return 2 * (pages + small) + state + 3 * tile_bytes((rows, columns), "float32") + 2 * pages
