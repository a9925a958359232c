"""The host side of platform `pallas` on TPU: configurations, support, and the assignment of sequences to kernels.

Every kernel writes the results of its sequences into `out` and `lse`, which begin as 0 and minus infinity.
"""

import jax.numpy as jnp
from jax import Array

from ...core.platforms import InterpretedPallas
from ...dispatch import DeviceFacts, Problem
from ..cache.quantise import LARGEST
from ..spec import PagedArrays, PagedSpec
from . import block_sizes
from .block_sizes import adapted as adapted
from .block_sizes import candidates
from .by_head import BY_HEAD
from .call import block_pages, Call, few_queries, LANES, page_unit, row_tile, tiles_of_queries
from .call import PallasConfig as PallasConfig
from .kernel import Method, over_items, Sizes
from .together import TOGETHER
from .write_kernel import write as write

OPAQUE = True
VERSION = 1
_TABLE = 240_000
"""Entries of page tables in scalar memory, which has 1 MiB on every generation; a sequence needs nine numbers besides."""
_DTYPES = ("bfloat16", "float32")

config_type = PallasConfig


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    page, heads = block_sizes.page_of(problem), problem.dim("K")
    pages = problem.dim("M") * (problem.dim("p") // page)
    if problem.flag("log_forget"):
        return "takes no forget gates"
    if problem.dtype("q") not in _DTYPES:
        return f"takes queries of bfloat16 and float32, not {problem.dtype('q')}"
    for name, dtype in block_sizes.dtypes(problem).items():
        if dtype not in (*_DTYPES, *LARGEST):
            return f"takes pages of bfloat16, float32 and 8-bit numbers, not {dtype}"
        tile = 8 if dtype == "float32" else 16
        if page * heads % tile:
            return (
                f"takes {name} pages of {dtype} whose tokens times key heads are a multiple of {tile}, the rows of a tile of memory, not {page} "
                f"tokens of {heads} heads"
            )
    if problem.flag("scales") == "token" and page % 4:
        return f"takes scales for each token with pages of a multiple of 4 tokens, not {page}"
    if problem.flag("qq_bias") and problem.dim("Q") > block_sizes.few(problem):
        return f"takes a query-query bias with up to {block_sizes.few(problem)} queries of a sequence, not {problem.dim('Q')}"
    if problem.dim("N") * (pages + 9) > _TABLE:
        return (
            f"reads page tables of up to {_TABLE} entries in all, which its scalar memory holds, not {problem.dim('N')} sequences of {pages} pages; "
            "larger pages need fewer"
        )
    if pages * page * heads >= 2**31:
        return f"takes page tables of fewer than 2**31 keys times heads, not {pages} pages of {page} keys of {heads} heads"
    return block_sizes.too_large(problem, block_sizes.smallest(problem, device), device)


def default_config(problem: Problem, device: DeviceFacts) -> PallasConfig:
    """The first of the preferred blocks that fit the device's vector memory."""
    return candidates(problem, device)[0]


def config_unsupported(config: PallasConfig, problem: Problem, device: DeviceFacts) -> str | None:
    """The reason why the blocks cannot fit the device's vector memory, by an estimate, or do not take a query-query bias."""
    if problem.flag("qq_bias") and config.decode_queries < problem.dim("Q"):
        return f"takes a query-query bias with up to decode_queries={config.decode_queries} queries, not {problem.dim('Q')}"
    return block_sizes.too_large(problem, config, device)


def remark(config: PallasConfig, problem: Problem, device: DeviceFacts) -> str:
    """A warning where XLA keeps pages or their scales in another order than the kernels read, as compiled programs show."""
    heads, widths, found = problem.dim("K"), block_sizes.widths(problem), []
    kinds = zip(widths, block_sizes.dtypes(problem).values(), strict=True)
    if any(width % LANES for width in widths):
        found.append(
            "between programs, XLA keeps pages whose head dim is no multiple of 128 with another axis last, so that each compiled program copies all "
            "of them once when it begins: pad head dims, or decode several tokens in one program"
        )
    elif not all(block_sizes.read_in_place(heads, width, dtype) for width, dtype in kinds):
        found.append(
            f"XLA keeps pages of {heads} key heads of {' and '.join(map(str, dict.fromkeys(widths)))} channels in another order than the kernels "
            "read, so that every call copies all of them: 1 or a multiple of 8 key heads are read in place, of 128 channels also 2 (not of 8 bits) "
            "and 4"
        )
    if problem.flag("scales") == "token" and problem.dim("p") % LANES:
        found.append(
            "every call copies all scales for each token, which XLA keeps in another order than it gathers: take pages of 128 tokens, or scales for "
            "each head"
        )
    return "; ".join(found)


def forward(arrays: PagedArrays, spec: PagedSpec, config: PallasConfig) -> dict[str, Array]:
    """`out [B, T, H, V]` and `lse [B, T, H]`, for arrays with one leading axis."""
    call, lead = Call.of(arrays, spec, config, True), arrays.q.shape[:2]
    tokens, heads = call.arrays.q.shape[:2]
    results = {"out": jnp.zeros((tokens, heads, call.values), arrays.q.dtype)}
    results["lse"] = jnp.full((tokens, 1, heads), -jnp.inf, jnp.float32)
    if call.sequences and tokens:
        few = min(config.decode_queries, spec.max_query_len)
        size, align = _sizes(call, TOGETHER, few, config.decode_keys)
        results = over_items(call, "decode", TOGETHER, size, few_queries(call, few, align), results)
        # Without a sequence of more queries the second kernel has no items.
        if spec.max_query_len > few and tokens > few:
            # A single key head has nothing to sort apart.
            method = TOGETHER if call.kv_heads == 1 else BY_HEAD
            size, align = _sizes(call, method, config.block_q, config.block_k)
            tiles = tiles_of_queries(call, few, config.block_q, align)
            results = over_items(call, "prefill", method, size, tiles, results)
    shapes = {"out": (heads, call.values), "lse": (heads,)}
    return {name: results[name].reshape(*lead, *shape) for name, shape in shapes.items()}


def _sizes(call: Call, method: Method, queries: int, keys: int) -> tuple[Sizes, int]:
    """Constants of a kernel, and the number that first pages are multiples of."""
    columns = call.page if method is BY_HEAD else call.rows
    # Several queries need heads that fill whole tiles of memory.
    heads = row_tile(call.heads, call.arrays.q.dtype) if queries > 1 else call.heads
    pages, table = block_pages(call.page, columns, keys), call.arrays.page_table.shape[-1]
    # With a bias by query, none may stand at the end of a block that was moved back to fit.
    tokens = max(call.arrays.q.shape[0], queries) + (queries if call.arrays.qq_bias is not None else 0)
    operand = call.arrays.kernel_operand
    size = Sizes(queries, heads, call.kv_heads, call.page, pages, table, call.config.cores, tokens, operand)
    return size, page_unit(columns) if call.spec.scales == "token" else 1


_SMALL = PallasConfig(decode_queries=2, decode_keys=16, block_q=16, block_k=16)
interpreted = InterpretedPallas(__name__, _SMALL)
"""The same kernels, simulated on the host with small tiles: platform `pallas-interpret`."""
