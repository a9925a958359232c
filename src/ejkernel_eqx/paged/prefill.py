"""`PrefillPagedAttention`: a chunk of queries of each sequence on the pages of a cache."""

from typing import Any, ClassVar

import equinox as eqx
import jax
from jax import Array
from jaxtyping import Float, Int

from .._kernel import Kernel, Plan
from ..core.platforms import register
from .arguments import packed, PagedOptions, read_queries, Scoring
from .cache.cache import PagedKVCache, PagedLatentCache
from .operation import plan_of, run

register("prefill_paged_attention", __package__)


class PrefillPagedAttention(Kernel):
    r"""Attention of a chunk of a prompt of each sequence, its last tokens, on the keys and values in the pages of a cache.

    Query $t$ of a sequence of $L$ tokens, $n_q$ of which are new, sits at position $i = L - n_q + t$ and sees the keys up to its own:

    $$s_{tj} = \mathrm{cap}\!\left(\mathrm{scale}\; q_t \cdot k_j\right), \qquad
    o_t = \sum_{j = \max(0,\, i - w + 1)}^{i} \frac{e^{s_{tj}}}{\sum_l e^{s_{tl}} + \sum_m e^{\mathrm{sink}_{hm}}}\, v_j$$

    Everything else is as in [`ejkernel_eqx.PagedAttention`][]. A prompt in chunks gives what it gives in one.

    Platforms: Triton (`"triton"`, `"triton-interpret"`), XLA (`"xla"`). For inference: differentiating it raises `UnsupportedError`.

    Source: Agrawal et al., *Sarathi-Serve* (2024).
    """

    operation: ClassVar[str] = "prefill_paged_attention"

    options: PagedOptions = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(
        self,
        sliding_window: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        *,
        platform: str | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `sliding_window`: an int $w$: the last $w$ keys, the query's own included; a pair `(left, right)`: `left` keys before its own (`None`: all;
            there are none behind).
        - `logits_soft_cap`: the bound $c$ of the tanh soft cap.
        - `softmax_scale`: default `D**-0.5`; required with a `PagedLatentCache`.
        - `platform`: use this platform or raise; `None` chooses by device and request.
        - `config`: use this kernel configuration; it implies its platform.
        - `tune_for`: [`ejkernel_eqx.inputs`][]`(q, cache, query_start_loc=..., max_query_len=...)`, arrays or
            `jax.ShapeDtypeStruct`s: settle the choice for these now.

        Raises `ValueError` for options that mean nothing.
        """
        self.options = PagedOptions.read(sliding_window, logits_soft_cap, softmax_scale)
        self.plan = plan_of(PrefillPagedAttention, self, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.PrefillPagedAttention")
    def __call__(
        self,
        q: Float[Array, "..."],
        cache: PagedKVCache | PagedLatentCache,
        *,
        query_start_loc: Int[Array, "..."],
        max_query_len: int | None = None,
        sinks: Float[Array, "..."] | None = None,
        return_lse: bool = False,
    ) -> Any:  # one array or two, as `return_lse` says
        """**Arguments:**

        - `q`: `[..., T, H, D]`, the queries of all sequences side by side; `[..., T, H, R + Dr]` for a latent cache. bf16, f16, f32 (f64 on XLA).
        - `cache`: bound to tables `[N, M]`, or with the leading axes of `q`; its pages without leading axes or with these. `lengths` count the new
            tokens, which have been written.
        - `query_start_loc`: ints `[N + 1]`, where the queries of each sequence begin and end; none lower than the one before but behind the
            last sequence with queries, where zeros are as good.
        - `max_query_len`: the most queries of one sequence, static; those past it are left out. Default `T`. Give it where it is small: with 1, only
            decoding is compiled.
        - `sinks`: logits `[H]` or `[H, n]` that join the denominator and carry no value.
        - `return_lse`: also return the log-sum-exp of the scores, as [`ejkernel_eqx.merge_attention`][] takes it (without sinks).

        **Returns:**

        `[..., T, H, V]` (`[..., T, H, R]` for a latent cache) in the dtype of `q`; with `return_lse` also `[..., T, H]` in float32: natural
        logarithm, sinks included, `-inf` for a query that sees nothing. Tokens of no sequence give 0 and `-inf`. Raises `ValueError` for
        arguments that do not fit, `UnsupportedError` if no platform (or not the given one) supports the call.
        """
        q = read_queries(q, cache, "T H D")
        tokens = packed(q, cache, query_start_loc, max_query_len)
        return run(self.plan, self.options, q, cache, tokens, Scoring(sinks), return_lse)
