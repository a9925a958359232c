"""`PagedAttention`: decoding, with one query per sequence on the pages of a cache."""

from typing import ClassVar, Literal, overload, TYPE_CHECKING, Unpack

import jax
from jax import Array

from .._shapes import AnyArray, Float, Numbers
from .arguments import one_each, read_queries, Scoring
from .cache.cache import PagedKVCache, PagedLatentCache
from .operation import PagedOperation
from .signature import Cache, DecodeInputs, Output, Query, WithLse


class PagedAttention(PagedOperation):
    r"""Attention of one query per sequence, its last token, on the keys and values in the pages of a cache.

    $$s_{nj} = \mathrm{cap}\!\left(\mathrm{scale}\; q_n \cdot k_{nj}\right), \qquad
    o_n = \sum_{j = \max(0,\, L_n - w)}^{L_n - 1} \frac{e^{s_{nj}}}{\sum_l e^{s_{nl}} + \sum_m e^{\mathrm{sink}_{hm}}}\, v_{nj}$$

    with $\mathrm{cap}(s) = c \tanh(s / c)$ if `logits_soft_cap` $= c$ is given (else $s$), $L_n$ tokens of sequence $n$ and a window of $w$ keys.
    Keys without a page (-1) are not visible. A query that sees no key returns 0. Query head $h$ reads key head $\lfloor h / (H / K) \rfloor$.

    Platforms: Triton (`"triton"`, `"triton-interpret"`), Pallas on TPU (`"pallas"`, `"pallas-interpret"`), XLA (`"xla"`). For inference only:
    differentiating it raises `UnsupportedError`.

    Source: Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention* (2023), section 4.
    """

    operation: ClassVar[str] = "paged_attention"
    __init__ = PagedOperation.__init__

    if TYPE_CHECKING:

        @overload
        def __call__(
            self, q: Query, cache: Cache, *, return_lse: Literal[False] = False, **more: Unpack[DecodeInputs]
        ) -> Output: ...

        @overload
        def __call__(
            self, q: Query, cache: Cache, *, return_lse: Literal[True], **more: Unpack[DecodeInputs]
        ) -> WithLse: ...

        @overload
        def __call__(
            self, q: Query, cache: Cache, *, return_lse: bool, **more: Unpack[DecodeInputs]
        ) -> Output | WithLse: ...

    @jax.named_scope("ejkernel_eqx.PagedAttention")
    def __call__(
        self,
        q: Float[AnyArray, "*B N H D"],
        cache: PagedKVCache | PagedLatentCache,
        *,
        sinks: Float[Numbers, " H *n"] | None = None,
        return_lse: bool = False,
    ) -> Float[Array, "*B N H V"] | tuple[Float[Array, "*B N H V"], Float[Array, "*B N H"]]:
        """**Arguments:**

        - `q`: `[..., N, H, D]`, one query for each sequence of the cache; `[..., N, H, R + Dr]` for a latent cache. bf16, f16, f32 (f64 on XLA).
        - `cache`: bound to tables `[N, M]`, or tables with the leading axes of `q`. The pages have no leading axes, or those of `q`. `lengths`
            include the query's own token, whose key and value must already be written.
        - `sinks`: logits `[H]` or `[H, n]` that join the denominator but have no value.
        - `return_lse`: also return the log-sum-exp of the scores; without sinks, [`ejkernel_eqx.merge_attention`][] accepts it.

        **Returns:**

        `[..., N, H, V]` (`[..., N, H, R]` for a latent cache) in the dtype of `q`. With `return_lse` also `[..., N, H]`
        in float32. It is the natural logarithm, including sinks, and `-inf` for a query that sees no key. Raises
        `ValueError` for invalid arguments, and `UnsupportedError` if no platform, or not the requested one, supports
        the call.
        """
        q = read_queries(q, cache, "N H D")
        return self._over_pages(q, cache, one_each(q, cache), Scoring(return_lse, sinks))
