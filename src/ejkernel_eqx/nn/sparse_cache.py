"""The caches of native sparse attention: keys and values, and the compressed ones of their blocks, dense and in pages."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from .._shapes import AnyArray, Bool, Float, Int, Numbers
from .._signatures import Module
from ..paged import PagedKVCache
from .arguments import check_divides
from .kv_cache import KVCache, none_overflowed


class SparseKVCache(Module):
    """Keys and values of all tokens so far, and the compressed ones of the blocks that are complete. There is one row
    per sequence, each with its own length.

    It is a pure value, as [`ejkernel_eqx.nn.KVCache`][]. A call of the layer returns a new one, which is written in
    place if the old one is donated to `jit`. A cache with batch shape `(layers, B)` can be scanned over together with
    stacked layers.

    - `k`: `[..., S, K, D]`, rotated, `v`: `[..., S, K, V]`, with `S` the capacity in tokens.
    - `compressed_k`: `[..., C, K, D]`, `compressed_v`: `[..., C, K, V]`: number `c` stands for the tokens from `c * compression_stride` on.
    - `lengths`: int32 `[...]`, the number of tokens in each row; slots beyond are never read, nor are compressed keys of incomplete blocks.
    - `overflowed`: bool `[...]`, True for rows that were full, as in `KVCache`.
    """

    k: Float[Array, "*B S K D"]
    v: Float[Array, "*B S K V"]
    compressed_k: Float[Array, "*B C K D"]
    compressed_v: Float[Array, "*B C K V"]
    lengths: Int[Array, "*B"]
    overflowed: Bool[Array, "*B"]

    def __init__(
        self, k: Any, v: Any, compressed_k: Any, compressed_v: Any, lengths: Any, overflowed: Any = None
    ):
        self.k, self.v, self.compressed_k, self.compressed_v = k, v, compressed_k, compressed_v
        self.lengths = lengths
        self.overflowed = none_overflowed(lengths) if overflowed is None else overflowed

    @classmethod
    def init(
        cls,
        batch_shape: tuple[int, ...] | int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: DTypeLike = jnp.float32,
        *,
        compression_size: int,
        compression_stride: int,
    ) -> "SparseKVCache":
        """Returns an empty cache.

        **Arguments:**

        - `batch_shape`, `max_length`, `num_kv_heads`, `head_dim`, `dtype`: as in [`ejkernel_eqx.nn.KVCache.init`][].
        - `compression_size`, `compression_stride`: tokens of a compressed key, and between the first tokens of two.
        """
        check_divides("compression_stride", compression_stride, "compression_size", compression_size)
        rows = KVCache.init(batch_shape, max_length, num_kv_heads, head_dim, dtype=dtype)
        count = max(1, (max_length - compression_size) // compression_stride + 1)
        empty = lambda x: jnp.zeros((*rows.batch_shape, count, *x.shape[-2:]), x.dtype)
        return cls(rows.k, rows.v, empty(rows.k), empty(rows.v), rows.lengths)

    @property
    def max_length(self) -> int:
        """Capacity of each row, in tokens."""
        return self.k.shape[-3]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.k.shape[:-3]

    def append(
        self,
        k_new: Float[AnyArray, "*B T K D"],
        v_new: Float[AnyArray, "*B T K V"],
        *,
        mask: Bool[AnyArray, "#*B #T"] | None = None,
    ) -> "SparseKVCache":
        """Appends keys and values, as [`ejkernel_eqx.nn.KVCache.append`][] does, with the same errors; compressed ones stay as they are."""
        rows = KVCache(self.k, self.v, self.lengths, self.overflowed).append(k_new, v_new, mask=mask)
        new = {"k": rows.k, "v": rows.v, "lengths": rows.lengths, "overflowed": rows.overflowed}
        return dataclasses.replace(self, **new)

    def complete(
        self,
        compressed_k: Float[AnyArray, "*B N K D"],
        compressed_v: Float[AnyArray, "*B N K V"],
        first: Int[AnyArray, "*B"],
        end: Int[AnyArray, "*B"],
    ) -> "SparseKVCache":
        """Writes the compressed keys and values `first <= c < end` of each row, the first ones of those given."""
        number = first[..., None] + jax.lax.broadcasted_iota(jnp.int32, compressed_k.shape[:-2], first.ndim)
        before = jnp.minimum(first, self.compressed_k.shape[-3])
        rows, complete = KVCache(self.compressed_k, self.compressed_v, before), number < end[..., None]
        k, v = (
            rows.write(store, new, before, complete)
            for store, new in ((rows.k, compressed_k), (rows.v, compressed_v))
        )
        return dataclasses.replace(self, compressed_k=k, compressed_v=v)


class PagedSparseCache(Module):
    """Keys and values of many sequences in pages, and the compressed ones of their blocks. The latter are in as many
    pages of a second pool, with the same page table.

    - `tokens`: a `PagedKVCache` of `page_size` tokens a page.
    - `compressed`: a `PagedKVCache`. Its page `i` holds the `page_size // compression_stride` compressed keys and
        values whose last tokens lie in page `i` of `tokens`. Number `c` is slot `c + compression_size //
        compression_stride - 1` of its sequence. The slots before number 0 are unused.

    A compressed key is written with its last token and into that token's page. So sequences may share pages (`PageTable.fork`), as with a
    `PagedKVCache`; `copy_pages` copies the compressed keys of a page with it.
    """

    tokens: PagedKVCache
    compressed: PagedKVCache

    @classmethod
    def init(
        cls,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        compression_stride: int,
        batch_shape: Any = (),
        dtype: DTypeLike = jnp.float32,
    ) -> "PagedSparseCache":
        """Returns an empty cache that is not bound to tables. The arguments are those of [`ejkernel_eqx.PagedKVCache.init`][]; the stride divides
        `page_size`. Pages of 8 bits are not supported."""
        check_divides("compression_stride", compression_stride, "page_size", page_size)
        sizes = (num_kv_heads, head_dim)
        options: Any = {"batch_shape": batch_shape, "dtype": dtype}
        return cls(
            PagedKVCache.init(num_pages, page_size, *sizes, **options),
            PagedKVCache.init(num_pages, page_size // compression_stride, *sizes, **options),
        )

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.tokens.batch_shape

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.tokens.page_size

    @property
    def num_pages(self) -> int:
        return self.tokens.num_pages

    @property
    def is_bound(self) -> bool:
        """Returns whether the cache has tables."""
        return self.tokens.is_bound

    def bind(self, page_table: Any, lengths: Any | None = None) -> "PagedSparseCache":
        """The same pages with tables: those of a `RaggedBatch`, or both arrays."""
        return PagedSparseCache(self.tokens.bind(page_table, lengths), self.compressed.unbind())

    def unbind(self) -> "PagedSparseCache":
        """The same pages without tables."""
        return PagedSparseCache(self.tokens.unbind(), self.compressed.unbind())

    def copy_pages(self, source: Int[Numbers, " C"], target: Int[Numbers, " C"]) -> "PagedSparseCache":
        """Works as [`ejkernel_eqx.PagedKVCache`][]`.copy_pages`, in both pools."""
        return PagedSparseCache(
            self.tokens.copy_pages(source, target), self.compressed.copy_pages(source, target)
        )
