"""`PagedNativeSparseAttention`: native sparse attention of each sequence's new tokens, on the keys in the pages of a cache."""

from typing import ClassVar, Literal, overload, TYPE_CHECKING, TypedDict, Unpack

import jax
from jax import Array

from ..._shapes import AnyArray, Float, Int, Numbers
from ...paged.cache.cache import PagedKVCache
from ..operation import results_of, SparseOperation
from .arguments import resolve
from .core import ATTEND

Output = Float[Array, "*B T H V"]
WithIndices = tuple[Float[Array, "*B T H V"], Int[Array, "*B T K n"]]


class PagedNativeInputs(TypedDict, total=False):
    """The arguments by name of [`ejkernel_eqx.PagedNativeSparseAttention`][] but for `return_indices`, which decides what comes back."""

    query_start_loc: Int[Numbers, " N+1"] | None
    max_query_len: int | None
    block_indices: Int[Numbers, "*B T K n"] | None


class PagedNativeSparseAttention(SparseOperation):
    r"""Native sparse attention of each sequence's new tokens, over pages: one token in decoding, many in a chunk of a
    prompt. Keys and values are in the pages of one cache. Compressed keys and values are in the pages of a second
    cache.

    Of the $L$ tokens of a sequence, $n_q$ are new. Query $t$ is at position $i = L - n_q + t$. It attends to what
    [`ejkernel_eqx.NativeSparseAttention`][] says for a query there: compressed keys, chosen blocks of keys, and a
    window. Each has a softmax of its own, and gates weight their sum. Blocks and compressed keys start with the
    sequence.

    Both caches have the same page table. Page $i$ of the second holds, in order, the $p / d$ compressed keys whose last
    tokens lie in page $i$ of the first. Compressed key $c$ is of the tokens $c\,d \le j < c\,d + l$. Its slot in the
    sequence is $s = c + l/d - 1$. That is place $s \bmod p/d$ of page $\text{page\_table}_{n, \lfloor s / (p/d)
    \rfloor}$. The first $l/d - 1$ slots of a sequence are never read. A query reads the compressed keys of which all
    $l$ tokens are at or before it. The others need not be written yet. So sequences may share pages (`PageTable.fork`):
    the sequence that writes the last token of a compressed key owns the pages of both.

    Keys and compressed keys without a page (-1) are not visible. A branch in which a query sees nothing adds 0, and tokens of no sequence
    return 0. Platforms: Triton (`"triton"`, `"triton-interpret"`), XLA (`"xla"`). For inference only: differentiating it raises
    `UnsupportedError`.

    Source: Yuan et al., *Native Sparse Attention* (2025, arXiv:2502.11089), section 3; pages as in Kwon et al. (2023, arXiv:2309.06180).
    """

    operation: ClassVar[str] = "paged_native_sparse_attention"
    __init__ = SparseOperation.__init__

    if TYPE_CHECKING:

        @overload
        def __call__(
            self,
            q: Float[AnyArray, "*B T H D"],
            gates: Float[AnyArray, "*B T H 3"],
            cache: PagedKVCache,
            compressed: PagedKVCache,
            *,
            return_indices: Literal[False] = False,
            **others: Unpack[PagedNativeInputs],
        ) -> Output: ...

        @overload
        def __call__(
            self,
            q: Float[AnyArray, "*B T H D"],
            gates: Float[AnyArray, "*B T H 3"],
            cache: PagedKVCache,
            compressed: PagedKVCache,
            *,
            return_indices: Literal[True],
            **others: Unpack[PagedNativeInputs],
        ) -> WithIndices: ...

    @jax.named_scope("ejkernel_eqx.PagedNativeSparseAttention")
    def __call__(
        self,
        q: Float[AnyArray, "*B T H D"],
        gates: Float[AnyArray, "*B T H 3"],
        cache: PagedKVCache,
        compressed: PagedKVCache,
        *,
        query_start_loc: Int[Numbers, " N+1"] | None = None,
        max_query_len: int | None = None,
        block_indices: Int[Numbers, "*B T K n"] | None = None,
        return_indices: bool = False,
    ) -> Float[Array, "*B T H V"] | tuple[Float[Array, "*B T H V"], Int[Array, "*B T K n"]]:
        """**Arguments:**

        - `q`: `[..., T, H, D]`, the queries of all sequences, packed; bf16, f16, f32 (f64 on XLA).
        - `gates`: `[..., T, H, 3]`, any float dtype: the weights of the compressed, the selected and the sliding branch.
        - `cache`: keys and values of the dtype of `q`, bound to tables. `lengths` include the queries' own tokens, whose keys and values must
            already be written. Its page size is a multiple of `compression_stride`.
        - `compressed`: compressed keys and values, with as many pages of `page_size // compression_stride` keys. It has the tables of `cache`:
            its own, if it is bound, are not read.
        - `query_start_loc`: ints `[N + 1]`, where the queries of each sequence begin, and where the last ones end; `None`: one query per sequence.
        - `max_query_len`: a static upper bound of the queries per sequence, by default `T`; further ones are ignored. 1 for decodes alone.
        - `block_indices`: ints `[..., T, K, n]`, the blocks of each query and key head instead of a choice. -1, and a block named before,
            select nothing.
        - `return_indices`: also return the blocks that were chosen.

        **Returns:** `[..., T, H, V]` in the dtype of `q`; with `return_indices` also int32 `[..., T, K, num_blocks]`, -1 where there are no
        more blocks. Raises `ValueError` for invalid arguments, and `UnsupportedError` if no platform, or not the requested one, supports the call.
        """
        caches = (cache, compressed)
        arrays, spec = resolve(self.options, q, gates, caches, query_start_loc, max_query_len, block_indices)
        results = results_of(self, ATTEND, arrays, spec, spec.sparse.count)
        return (results["out"], results["indices"]) if return_indices else results["out"]
