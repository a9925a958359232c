"""`RaggedPagedAttention`: decodes and chunks of prompts in one call, which can also write their keys and values."""

from typing import Any, ClassVar, Literal, overload, TYPE_CHECKING, Unpack

import equinox as eqx
import jax
from jax import Array

from .._shapes import AnyArray, Float, Int, Numbers
from ..dispatch import PlatformLike
from .arguments import packed, read_queries, Scoring
from .cache.cache import PagedKVCache, PagedLatentCache
from .operation import PagedOperation
from .signature import C, Cache, Output, Query, RaggedInputs, WithLse


class RaggedPagedAttention(PagedOperation):
    r"""Attention of each sequence's new tokens, one (decoding) or many (a chunk of a prompt), on the keys and values in the pages of a cache.

    Of the $L$ tokens of a sequence, $n_q$ are new. Query $t$ is at position $i = L - n_q + t$ and sees the keys up to
    its own:

    $$s_{tj} = \mathrm{cap}\!\left(\mathrm{scale}\; q_t \cdot k_j\right), \qquad
    o_t = \sum_{j = \max(0,\, i - w + 1)}^{i} \frac{e^{s_{tj}}}{\sum_l e^{s_{tl}} + \sum_m e^{\mathrm{sink}_{hm}}}\, v_j$$

    with $\mathrm{cap}(s) = c \tanh(s / c)$ if `logits_soft_cap` $= c$ is given (else $s$) and a window of $w$ keys. Keys without a page (-1) are
    not visible. A query that sees no key returns 0. Query head $h$ reads key head $\lfloor h / (H / K) \rfloor$. With `append=True`, the keys
    and values of the new tokens are written first. One compiled program serves all batches of the same sizes.

    Platforms: Triton (`"triton"`, `"triton-interpret"`), Pallas on TPU (`"pallas"`, `"pallas-interpret"`), XLA (`"xla"`). For inference only:
    differentiating it raises `UnsupportedError`.

    Source: Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention* (2023), section 4.
    """

    operation: ClassVar[str] = "ragged_paged_attention"

    append: bool = eqx.field(static=True)

    def __init__(
        self,
        sliding_window: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        *,
        append: bool = False,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `sliding_window`, `logits_soft_cap`, `softmax_scale`, `platform`, `config`, `tune_for`: as in [`ejkernel_eqx.PagedAttention`][].
        - `append`: calls also take the keys and values of the new tokens, write them, and return the updated cache.

        Raises `ValueError` for invalid options.
        """
        self.append = append
        more = {"platform": platform, "config": config, "tune_for": tune_for}
        super().__init__(sliding_window, logits_soft_cap, softmax_scale, **more)

    if TYPE_CHECKING:

        @overload
        def __call__(
            self,
            q: Query,
            cache: Cache,
            k: None = None,
            v: None = None,
            *,
            return_lse: Literal[False] = False,
            **more: Unpack[RaggedInputs],
        ) -> Output: ...

        @overload
        def __call__(
            self,
            q: Query,
            cache: Cache,
            k: None = None,
            v: None = None,
            *,
            return_lse: Literal[True],
            **more: Unpack[RaggedInputs],
        ) -> WithLse: ...

        @overload
        def __call__(
            self,
            q: Query,
            cache: C,
            k: Float[AnyArray, "T *K D"],
            v: Float[AnyArray, "T *K V"],
            *,
            return_lse: Literal[False] = False,
            **more: Unpack[RaggedInputs],
        ) -> tuple[Output, C]: ...

        @overload
        def __call__(
            self,
            q: Query,
            cache: C,
            k: Float[AnyArray, "T *K D"],
            v: Float[AnyArray, "T *K V"],
            *,
            return_lse: Literal[True],
            **more: Unpack[RaggedInputs],
        ) -> tuple[Output, Float[Array, "*B T H"], C]: ...

    @jax.named_scope("ejkernel_eqx.RaggedPagedAttention")
    def __call__(
        self,
        q: Float[AnyArray, "*B T H D"],
        cache: PagedKVCache | PagedLatentCache,
        k: Float[AnyArray, "T *K D"] | None = None,
        v: Float[AnyArray, "T *K V"] | None = None,
        *,
        query_start_loc: Int[Numbers, " N+1"],
        max_query_len: int | None = None,
        sinks: Float[Numbers, " H *n"] | None = None,
        window: Int[Numbers, ""] | None = None,
        return_lse: bool = False,
    ) -> Float[Array, "*B T H V"] | tuple[Any, ...]:  # with the `lse`, the cache or both
        """**Arguments:**

        - `q` `[..., T, H, D]`, `cache`, `query_start_loc` `[N + 1]`, `max_query_len`, `sinks` `[H]` or `[H, n]`, `return_lse`: as in
            [`ejkernel_eqx.PrefillPagedAttention`][]. With `append`, there are no leading axes, and the new tokens must not be written yet.
        - `k`, `v`: only with `append`, `[T, K, D]` and `[T, K, V]`. For a latent cache they are the latents `[T, R]`
            and the rotary keys `[T, Dr]`. They are written to the slots that the tables assign. Tokens without a page
            or a sequence are not written.
        - `window`: a sliding window as a value instead of the constructor's `sliding_window`: an integer, negative for
            no window. It may be traced. Inside `jit`, a chunk of several new tokens then reads the keys separately for
            each of them. One new token per sequence costs nothing more.

        **Returns:**

        `[..., T, H, V]` in the dtype of `q`, with `return_lse` also `[..., T, H]`; results and errors are those of
        [`ejkernel_eqx.PrefillPagedAttention`][]. With `append`, the last result is the new cache, bound to the same tables; donate
        the old one to `jit` to update it in place.
        """
        q = read_queries(q, cache, "T H D")
        tokens = packed(q, cache, query_start_loc, max_query_len)
        if not self.append and not (k is None and v is None):
            raise ValueError(
                "k, v: expected None with append=False, received arrays; build with append=True, or write them with cache.append."
            )
        if self.append and (k is None or v is None):
            raise ValueError(
                "k, v: expected the keys and values of the new tokens with append=True, received None; build with append=False to read only."
            )
        new = (k, v) if self.append else None
        return self._over_pages(q, cache, tokens, Scoring(return_lse, sinks), window, new)
