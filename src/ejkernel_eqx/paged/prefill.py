"""`PrefillPagedAttention`: a chunk of queries per sequence on the pages of a cache."""

from typing import ClassVar, Literal, overload, TYPE_CHECKING, Unpack

import jax
from jax import Array

from .._shapes import AnyArray, Float, Int, Numbers
from .arguments import packed, read_queries, Scoring
from .cache.cache import PagedKVCache, PagedLatentCache
from .operation import PagedOperation
from .signature import Cache, Output, PackedInputs, Query, WithLse


class PrefillPagedAttention(PagedOperation):
    r"""Attention of one chunk of prompt per sequence, its last tokens, on the keys and values in the pages of a cache.

    Of the $L$ tokens of a sequence, $n_q$ are new. Query $t$ is at position $i = L - n_q + t$ and sees the keys up to
    its own:

    $$s_{tj} = \mathrm{cap}\!\left(\mathrm{scale}\; q_t \cdot k_j\right), \qquad
    o_t = \sum_{j = \max(0,\, i - w + 1)}^{i} \frac{e^{s_{tj}}}{\sum_l e^{s_{tl}} + \sum_m e^{\mathrm{sink}_{hm}}}\, v_j$$

    Everything else is as in [`ejkernel_eqx.PagedAttention`][]. Processing a prompt in chunks returns the same result as processing it at once.

    Platforms: Triton (`"triton"`, `"triton-interpret"`), Pallas on TPU (`"pallas"`, `"pallas-interpret"`), XLA (`"xla"`). For inference only:
    differentiating it raises `UnsupportedError`.

    Source: Agrawal et al., *Sarathi-Serve* (2024).
    """

    operation: ClassVar[str] = "prefill_paged_attention"
    __init__ = PagedOperation.__init__

    if TYPE_CHECKING:

        @overload
        def __call__(
            self, q: Query, cache: Cache, *, return_lse: Literal[False] = False, **more: Unpack[PackedInputs]
        ) -> Output: ...

        @overload
        def __call__(
            self, q: Query, cache: Cache, *, return_lse: Literal[True], **more: Unpack[PackedInputs]
        ) -> WithLse: ...

        @overload
        def __call__(
            self, q: Query, cache: Cache, *, return_lse: bool, **more: Unpack[PackedInputs]
        ) -> Output | WithLse: ...

    @jax.named_scope("ejkernel_eqx.PrefillPagedAttention")
    def __call__(
        self,
        q: Float[AnyArray, "*B T H D"],
        cache: PagedKVCache | PagedLatentCache,
        *,
        query_start_loc: Int[Numbers, " N+1"],
        max_query_len: int | None = None,
        sinks: Float[Numbers, " H *n"] | None = None,
        return_lse: bool = False,
    ) -> Float[Array, "*B T H V"] | tuple[Float[Array, "*B T H V"], Float[Array, "*B T H"]]:
        """**Arguments:**

        - `q`: `[..., T, H, D]`, the packed queries of all sequences; `[..., T, H, R + Dr]` for a latent cache. bf16, f16, f32 (f64 on XLA).
        - `cache`: bound to tables `[N, M]`, or tables with the leading axes of `q`. The pages have no leading axes, or those of `q`. `lengths`
            include the new tokens, whose keys and values must already be written.
        - `query_start_loc`: ints `[N + 1]`, where the queries of each sequence begin and end. They must not decrease, except after the last
            sequence with queries, where zeros are allowed.
        - `max_query_len`: the maximum number of queries per sequence, static; queries beyond it are ignored. Default `T`. Pass it if it is
            small: with 1, only decoding is compiled.
        - `sinks`, `return_lse`: as in [`ejkernel_eqx.PagedAttention`][].

        **Returns:**

        `[..., T, H, V]` (`[..., T, H, R]` for a latent cache) in the dtype of `q`. With `return_lse` also `[..., T, H]`
        in float32. It is the natural logarithm, including sinks, and `-inf` for a query that sees no key. Padding
        tokens, which belong to no sequence, return 0 and `-inf`. Raises `ValueError` for invalid arguments, and
        `UnsupportedError` if no platform, or not the requested one, supports the call.
        """
        q = read_queries(q, cache, "T H D")
        tokens = packed(q, cache, query_start_loc, max_query_len)
        return self._over_pages(q, cache, tokens, Scoring(return_lse, sinks))
