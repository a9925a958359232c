"""The host side of platform `pallas` on TPU: configurations, support, and the assignment of sequences to kernels.

Every kernel writes the results of its sequences into `out` and `lse`, which begin as 0 and minus infinity.
"""

import jax.numpy as jnp
from jax import Array

from ...dispatch import DeviceFacts, Problem
from ...launch.pallas import Execute, run
from ..spec import PagedArrays, PagedSpec
from . import block_sizes
from .by_head import BY_HEAD
from .call import block_pages, Call, few_queries, folded, row_tile, tiles_of_queries
from .call import PallasConfig as PallasConfig
from .kernel import over_items, Sizes
from .together import TOGETHER

OPAQUE = True
VERSION = 1
_TABLE = 240_000
"""Entries of page tables in scalar memory, which has 1 MiB on every generation; a sequence needs nine numbers besides."""
_DTYPES = ("bfloat16", "float32")

config_type = PallasConfig


def unavailable(device: DeviceFacts) -> str | None:
    return None


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    q, pages = problem.dtype("q"), block_sizes.dtypes(problem)
    for dtype in (q, *pages.values()):
        if dtype not in _DTYPES:
            return f"takes bfloat16 and float32, not {dtype}"
    for name, dtype in pages.items():
        rows, tile = problem.dim("p") * problem.dim("K"), block_sizes.sublanes(dtype)
        if rows % tile:
            return (
                f"takes {name} pages of {dtype} whose tokens times key heads are a multiple of {tile}, the rows of a tile, not {problem.dim('p')} "
                f"tokens of {problem.dim('K')} heads"
            )
    if problem.flag("qq_bias"):
        return "has no query-query bias"
    if problem.dim("N") * (problem.dim("M") + 9) > _TABLE:
        return (
            f"reads page tables of up to {_TABLE} entries in all, which its scalar memory holds, not {problem.dim('N')} sequences of "
            f"{problem.dim('M')} pages; larger pages need fewer"
        )
    if problem.dim("M") * problem.dim("p") * problem.dim("K") >= 2**31:
        return f"takes page tables of fewer than 2**31 keys times heads, not {problem.dim('M')} pages of {problem.dim('p')} of {problem.dim('K')}"
    return block_sizes.too_large(problem, block_sizes.smallest(problem, device), device)


def default_config(problem: Problem, device: DeviceFacts) -> PallasConfig:
    """The first of the preferred blocks that fit the device's vector memory."""
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[PallasConfig]:
    """Configurations worth timing, the heuristic first."""
    return block_sizes.candidates(problem, device)


def config_unsupported(config: PallasConfig, problem: Problem, device: DeviceFacts) -> str | None:
    """Why the blocks cannot fit the device's vector memory, by an estimate."""
    return block_sizes.too_large(problem, config, device)


def adapted(config: PallasConfig, problem: Problem, device: DeviceFacts) -> PallasConfig:
    """Keeps the blocks; the number of cores is the device's."""
    return block_sizes.adapted(config, problem, device)


def remark(config: PallasConfig, problem: Problem, device: DeviceFacts) -> str:
    """Where XLA keeps pages in another order than the kernels read."""
    if problem.dim("D") % 128 == 0 and problem.dim("V") % 128 == 0:
        return ""
    return (
        "between programs, XLA keeps pages whose head dim is no multiple of 128 with another axis last, so that each compiled program copies all of "
        "them once when it begins: pad head dims, or decode several tokens in one program"
    )


def forward(
    arrays: PagedArrays, spec: PagedSpec, config: PallasConfig, *, execute: Execute = run
) -> dict[str, Array]:
    """`out [B, T, H, V]` and `lse [B, T, H]`, for arrays with one leading axis."""
    call, lead = folded(arrays, spec, config, execute), arrays.q.shape[:2]
    tokens, heads = call.arrays.q.shape[:2]
    results = {
        "out": jnp.zeros((tokens, heads, call.values), arrays.q.dtype),
        "lse": jnp.full((tokens, 1, heads), -jnp.inf, jnp.float32),
    }
    if call.sequences and tokens:
        few = min(config.decode_queries, spec.max_query_len)
        size = _sizes(call, few, config.decode_keys, few > 1)
        results = over_items(call, "decode", TOGETHER, size, few_queries(call, few, 1), results)
        if spec.max_query_len > few and tokens > few:
            size = _sizes(call, config.block_q, config.block_k, True)
            tiles = tiles_of_queries(call, few, config.block_q, 1)
            method = TOGETHER if call.kv_heads == 1 else BY_HEAD
            results = over_items(call, "prefill", method, size, tiles, results)
    return {
        "out": results["out"].reshape(*lead, heads, call.values),
        "lse": results["lse"].reshape(*lead, heads),
    }


def _sizes(call: Call, queries: int, keys: int, several: bool) -> Sizes:
    """What a kernel is compiled for; several queries need heads that fill whole tiles of memory."""
    return Sizes(
        queries=queries,
        heads=row_tile(call.heads, call.arrays.q.dtype) if several else call.heads,
        kv_heads=call.kv_heads,
        page=call.page,
        pages=block_pages(call.page, call.kv_heads, keys),
        table=call.arrays.page_table.shape[-1],
        cores=call.config.cores,
        tokens=max(call.arrays.q.shape[0], queries),
        operand=call.operand,
    )
