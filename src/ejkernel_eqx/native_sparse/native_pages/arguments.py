"""Checks what a user passes to native sparse attention over pages and resolves it to `PagedNativeArrays`."""

import dataclasses
from typing import Any

from jax import Array

from ...core.arguments import fitting
from ...paged.arguments import one_each, packed, PagedOptions, read_queries, Scoring
from ...paged.arguments import resolve as resolve_pages
from ...paged.cache.cache import PagedKVCache
from ..arguments import Options, read_indices
from .spec import PagedNativeArrays, PagedNativeSpec

_PAGES = PagedOptions(None, None, None)


def resolve(
    options: Options, q: Any, gates: Any, caches: Any, query_start_loc: Any, max_query_len: Any, indices: Any
) -> tuple[PagedNativeArrays, PagedNativeSpec]:
    cache, compressed = caches
    for name, x in (("cache", cache), ("compressed", compressed)):
        if not isinstance(x, PagedKVCache):
            raise ValueError(f"{name}: expected a PagedKVCache, received {type(x).__name__}.")
    q = read_queries(q, cache, "T H D")
    gates = fitting("gates", gates, (*q.shape[:-1], 3), "T H 3")
    _check_pages(q, cache, compressed, options.compression_stride)
    if query_start_loc is not None:
        tokens = packed(q, cache, query_start_loc, max_query_len)
    elif max_query_len in (None, 1):
        tokens = one_each(q, cache)
    else:
        raise ValueError(
            f"max_query_len: expected None or 1 without query_start_loc, received {max_query_len!r}; pass query_start_loc for sequences with "
            "several queries."
        )
    plain, _ = resolve_pages(q, cache, _PAGES, tokens, Scoring(True))
    assert plain.v is not None
    arrays = PagedNativeArrays(
        q, gates, plain.k, plain.v, compressed.k, compressed.v,
        plain.page_table, plain.q_start, plain.q_len, plain.kv_len,
    )  # fmt: skip
    sparse = options.spec(q.shape[-1])
    if indices is not None:
        indices = read_indices(indices, (*q.shape[:-2], cache.num_kv_heads))
        arrays = arrays._replace(indices=indices)
        sparse = dataclasses.replace(sparse, count=indices.shape[-1], given=True)
    return arrays, PagedNativeSpec(sparse, tokens.max_query_len)


def _check_pages(q: Array, cache: PagedKVCache, compressed: PagedKVCache, stride: int) -> None:
    """Both pools have one page table: page `i` of `compressed` has the compressed keys that end in page `i` of `cache`."""
    if cache.page_size % stride:
        raise ValueError(
            f"cache: expected a page size that is a multiple of compression_stride={stride}, received {cache.page_size}; a page of compressed keys "
            "holds those that end in a page of keys."
        )
    names = ("batch_shape", "num_pages", "page_size", "num_kv_heads", "head_dim")
    sizes = lambda pages: {name: getattr(pages, name) for name in names} | {"value_dim": pages.v_head_dim}
    expected, received = sizes(cache), sizes(compressed)
    expected["page_size"] //= stride
    for name, value in expected.items():
        if received[name] != value:
            raise ValueError(
                f"compressed: expected {name}={value}, received {received[name]}; it has the pages of cache, each with page_size // "
                f"compression_stride={stride} compressed keys."
            )
    for name, pages in (("cache", cache), ("compressed", compressed)):
        for x in (pages.k, pages.v):
            if x.dtype != q.dtype:
                raise ValueError(
                    f"{name}: expected pages of the dtype of q, {q.dtype}, received {x.dtype}; quantised pages are not supported, cast others."
                )
