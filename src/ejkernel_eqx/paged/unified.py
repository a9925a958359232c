"""`UnifiedAttention`: decodes and chunks of prompts on pages, with biases and trees of draft tokens."""

from typing import ClassVar, Literal, overload, TYPE_CHECKING, Unpack

import jax
from jax import Array

from .._shapes import AnyArray, Float, Int, Numbers
from .arguments import packed, read_queries, Scoring
from .cache.cache import PagedKVCache, PagedLatentCache
from .operation import PagedOperation
from .signature import Cache, Output, Query, UnifiedInputs, WithLse


class UnifiedAttention(PagedOperation):
    r"""Attention of each sequence's new tokens, few or many, on the keys and values in the pages of a cache, with ALiBi and a bias between new
    tokens.

    Of the $L$ tokens of a sequence, $n_q$ are new. Query $t$ is at position $i = L - n_q + t$ and sees the keys $j \le
    i$ of the window:

    $$s_{tj} = \mathrm{cap}\!\left(\mathrm{scale}\; q_t \cdot k_j\right) + m_h (j - i) + B_{t,\, j - (L - n_q)}$$

    with ALiBi slopes $m_h$, and a bias $B$ between the new tokens of a sequence (for keys $j \ge L - n_q$). With $B = -\infty$ between tokens
    of different branches, it decodes a tree of draft tokens, whose positions follow the packed order. The softmax, sinks and everything
    else are as in [`ejkernel_eqx.RaggedPagedAttention`][].

    Platforms: Triton (`"triton"`, `"triton-interpret"`), Pallas on TPU (`"pallas"`, `"pallas-interpret"`), XLA (`"xla"`). For inference only:
    differentiating it raises `UnsupportedError`.

    Sources: vLLM's unified attention kernel; Press et al., *ALiBi* (2022); Miao et al., *SpecInfer* (2024).
    """

    operation: ClassVar[str] = "unified_attention"
    __init__ = PagedOperation.__init__

    if TYPE_CHECKING:

        @overload
        def __call__(
            self, q: Query, cache: Cache, *, return_lse: Literal[False] = False, **more: Unpack[UnifiedInputs]
        ) -> Output: ...

        @overload
        def __call__(
            self, q: Query, cache: Cache, *, return_lse: Literal[True], **more: Unpack[UnifiedInputs]
        ) -> WithLse: ...

        @overload
        def __call__(
            self, q: Query, cache: Cache, *, return_lse: bool, **more: Unpack[UnifiedInputs]
        ) -> Output | WithLse: ...

    @jax.named_scope("ejkernel_eqx.UnifiedAttention")
    def __call__(
        self,
        q: Float[AnyArray, "*B T H D"],
        cache: PagedKVCache | PagedLatentCache,
        *,
        query_start_loc: Int[Numbers, " N+1"],
        max_query_len: int | None = None,
        alibi_slopes: Float[Numbers, " H"] | None = None,
        qq_bias: Float[AnyArray, "Q Q"] | None = None,
        sinks: Float[Numbers, " H *n"] | None = None,
        window: Int[Numbers, ""] | None = None,
        return_lse: bool = False,
    ) -> Float[Array, "*B T H V"] | tuple[Float[Array, "*B T H V"], Float[Array, "*B T H"]]:
        """**Arguments:**

        - `q` `[..., T, H, D]`, `cache`, `query_start_loc` `[N + 1]`, `max_query_len`, `sinks` `[H]` or `[H, n]`, `return_lse`: as in
            [`ejkernel_eqx.PrefillPagedAttention`][].
        - `alibi_slopes`: `[H]`.
        - `qq_bias`: `[Q, Q]` with `Q` at least `max_query_len`, the same for all sequences and heads. Entries may be minus infinity; those above
            the diagonal have no effect.
        - `window`: as in [`ejkernel_eqx.RaggedPagedAttention`][]; without `qq_bias`.

        **Returns:**

        `[..., T, H, V]` in the dtype of `q`, with `return_lse` also `[..., T, H]`; results and errors are those of
        [`ejkernel_eqx.PrefillPagedAttention`][].
        """
        q = read_queries(q, cache, "T H D")
        tokens = packed(q, cache, query_start_loc, max_query_len)
        return self._over_pages(q, cache, tokens, Scoring(return_lse, sinks, alibi_slopes, qq_bias), window)
