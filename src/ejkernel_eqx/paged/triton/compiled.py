"""The host side of platform `triton`: configurations, support, and the assignment of sequences to kernels.

Both attention kernels write into the same `out` and `lse`, each for its own sequences. The decode kernel takes those with up to
`decode_queries` queries, and fills tokens of no sequence with 0 and minus infinity. Then the prefill kernel takes the sequences with more
queries.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from ...core.platforms import Interpreted, kernels_unavailable
from ...dispatch import DeviceFacts, Problem
from ...launch.sizes import cdiv, rows_of, too_large
from ..cache.quantise import LARGEST
from ..spec import page_dtypes, PagedArrays, PagedSpec
from . import decode_kernel, prefill_kernel, tile_sizes
from .call import folded
from .call import PagedTile as PagedTile
from .call import TritonConfig as TritonConfig
from .write_kernel import write as write

OPAQUE = True
VERSION = 3
MAX_HEAD_DIM = 256
MAX_LATENT_DIM = 512
MAX_FLOAT32_LATENT_DIM = 128
"""More channels, with three passes per product, would spill kilobytes per thread."""
DECODE_QUERIES = 16
"""The largest `max_query_len` with which the decode kernel takes all sequences."""
_MOST_CANDIDATES = 12

PORTABLE: dict[str, Any] = {"fast_tanh": False, "fast_bytes": False, "float32_dot": "ieee"}
"""Options of a configuration without NVIDIA's instructions."""

config_type = TritonConfig
unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    q, dim, values = problem.dtype("q"), problem.dim("D"), problem.dim("V")
    pages = page_dtypes(problem)
    if "float64" in (q, *pages):
        return "takes float32, float16 and bfloat16, not float64"
    if problem.flag("latent"):
        if values > MAX_LATENT_DIM or dim - values > MAX_HEAD_DIM:
            return f"takes latent pages of up to {MAX_LATENT_DIM} channels and {MAX_HEAD_DIM} of rope, not {values} and {dim - values}"
        most = MAX_FLOAT32_LATENT_DIM
        if tile_sizes.dot_bytes(problem) == 4 and values > most:
            return f"multiplies latent pages of up to {most} channels in float32, not {values}"
    elif max(dim, values) > MAX_HEAD_DIM:
        return f"takes head dims up to {MAX_HEAD_DIM}, not D {dim} and V {values}"
    if "float8_e4m3fn" in pages and device.vendor == "nvidia" and device.capability < (8, 9):
        return (
            f"takes float8_e4m3fn pages from compute capability 8.9 on, the device has {device.compute_capability or 'none'}; float8_e5m2 and int8 "
            "it has"
        )
    count, page = problem.dim("M"), problem.dim("p")
    if count * page >= 2**31:
        return f"takes page tables of fewer than 2**31 keys, not {count} pages of {page}"
    return None


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    """The first preferred tiles that fit the device's shared memory, with enough splits to fill the device."""
    queries = decode_queries(problem.dim("Q"), problem.dim("H") // problem.dim("K"))
    decode = tile_sizes.decode_tiles(problem, device, queries)[0]
    splits, chunk_size = tile_sizes.splits(problem, device, queries, decode.block_m)
    prefill = tile_sizes.prefill_tiles(problem, device)[0]
    how = {} if device.vendor == "nvidia" else PORTABLE
    return TritonConfig(decode, prefill, splits, chunk_size, **how)


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first, then other numbers of splits, then the next tiles of both kernels together."""
    heuristic = default_config(problem, device)
    queries = decode_queries(problem.dim("Q"), problem.dim("H") // problem.dim("K"))
    decode = tile_sizes.decode_tiles(problem, device, queries)
    prefill = tile_sizes.prefill_tiles(problem, device)
    # The prefill kernel is not launched then, so one of its tiles is enough.
    if problem.dim("Q") <= queries:
        prefill = prefill[:1]
    keys = problem.dim("M") * problem.dim("p")

    def spread(split_k: int) -> dict[str, int]:
        """The tile with this number of splits, and `chunk_size` no larger than a split."""
        chunk_size = min(heuristic.chunk_size, max(tile_sizes.CHUNK, cdiv(keys, split_k)))
        return {"split_k": min(split_k, max(1, cdiv(keys, chunk_size))), "chunk_size": chunk_size}

    ways = [spread(n) for n in (heuristic.split_k, 2 * heuristic.split_k, heuristic.split_k // 2) if n]
    found = [heuristic, *_together(heuristic, keys, device)]
    found += [dataclasses.replace(heuristic, **way) for way in ways]
    for row, (few, many) in enumerate(rows_of([decode, prefill])[1:], 1):
        tiles = dataclasses.replace(heuristic, decode=few, prefill=many)
        found += [dataclasses.replace(tiles, **way) for way in (ways[:2] if row < 3 else ways[:1])]
    return list(dict.fromkeys(found))[:_MOST_CANDIDATES]


def _together(config: TritonConfig, keys: int, device: DeviceFacts) -> list[TritonConfig]:
    """The configuration in one launch, also with smaller splits, whose merge then costs less than a launch. Only NVIDIA's devices have run it."""
    # Without splits there is nothing to merge.
    if config.split_k == 1 or device.vendor != "nvidia":
        return []
    block, one = config.decode.block_k, dataclasses.replace(config, together=True)
    count = min(4 * config.split_k, cdiv(keys, block))
    smaller = dataclasses.replace(one, split_k=count, chunk_size=block)
    return [one, smaller] if config.chunk_size > block else [one]


def config_unsupported(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str | None:
    """The reason why the tiles cannot fit the device's shared memory, by an upper estimate; for the smallest tile, only the compiler can tell."""
    is_bytes = not LARGEST.keys().isdisjoint(page_dtypes(problem))
    if config.fast_bytes and is_bytes and device.vendor != "nvidia":
        return "fast_bytes uses NVIDIA's instructions"
    queries = decode_queries(problem.dim("Q"), problem.dim("H") // problem.dim("K"))
    tiles = {"decode": config.decode}
    if problem.dim("Q") > queries:
        tiles["prefill"] = config.prefill
    for kernel, tile in tiles.items():
        needed, sizes = tile_sizes.shared_memory(problem, tile, device), f"{tile.block_m}x{tile.block_k}"
        reason = too_large(kernel, sizes, tile.num_stages, needed, device)
        if reason is not None and tile != tile_sizes.SMALLEST:
            return reason
    return None


def remark(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str:
    """A warning where 8-bit pages save memory but no time."""
    if not tile_sizes.bound_by_products(problem):
        return ""
    return (
        "8-bit latents halve the memory of the cache; with more than 32 queries times heads a sequence they save no time, because attention is then "
        "bound by products and not by reading latents"
    )


def adapted(config: TritonConfig, problem: Problem, device: DeviceFacts) -> TritonConfig:
    """Keeps the tiles. The number of programs per sequence depends on the number and length of the sequences."""
    queries = decode_queries(problem.dim("Q"), problem.dim("H") // problem.dim("K"))
    count, chunk_size = tile_sizes.splits(problem, device, queries, config.decode.block_m)
    return dataclasses.replace(config, split_k=count, chunk_size=chunk_size)


def forward(arrays: PagedArrays, spec: PagedSpec, config: TritonConfig) -> dict[str, Array]:
    """`out [B, T, H, V]` and `lse [B, T, H]`, for arrays with one leading axis."""
    call = folded(arrays, spec, config)
    if call.sequences == 0 or call.arrays.q.shape[0] == 0:
        types = call.result_types
        results = {"out": jnp.zeros_like(types["out"]), "lse": jnp.full_like(types["lse"], -jnp.inf)}
    else:
        most = decode_queries(spec.max_query_len, call.group)
        # The decode kernel comes first, as it also fills the tokens of no sequence.
        results = decode_kernel.decode(call, most)
        if spec.max_query_len > most:
            results = prefill_kernel.prefill(call, results, most)
    lead = arrays.q.shape[:2]
    return {name: x.reshape((*lead, *x.shape[1:])) for name, x in results.items()}


def decode_queries(max_query_len: int, group: int) -> int:
    """The largest number of queries per sequence that the decode kernel takes: the maximum if it is small, else as many as fill the kernel's
    smallest tile."""
    return max_query_len if max_query_len <= DECODE_QUERIES else max(1, 16 // group)


_SMALL = TritonConfig(tile_sizes.SMALLEST, tile_sizes.SMALLEST, split_k=3, chunk_size=16)
interpreted = Interpreted(__name__, _SMALL, **PORTABLE)
"""The same kernels on the host, with tiles for small arrays: platform `triton-interpret`."""
