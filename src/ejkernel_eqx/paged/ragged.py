"""`RaggedPagedAttention`: decodes and chunks of prompts in one call, with the writing of their keys."""

from typing import Any, ClassVar

import equinox as eqx
import jax
from jax import Array
from jaxtyping import Float, Int

from .._kernel import Kernel, Plan
from ..core.platforms import register
from .arguments import packed, PagedOptions, read_queries, resolve, Scoring
from .cache.cache import PagedKVCache, PagedLatentCache
from .operation import append, finish, plan_of

register("ragged_paged_attention", __package__)


class RaggedPagedAttention(Kernel):
    r"""Attention of the new tokens of each sequence, one (a decode) or many (a chunk of a prompt), on the keys and values in the pages of a cache.

    Query $t$ of a sequence of $L$ tokens, $n_q$ of which are new, sits at position $i = L - n_q + t$ and sees the keys up to its own:

    $$s_{tj} = \mathrm{cap}\!\left(\mathrm{scale}\; q_t \cdot k_j\right), \qquad
    o_t = \sum_{j = \max(0,\, i - w + 1)}^{i} \frac{e^{s_{tj}}}{\sum_l e^{s_{tl}} + \sum_m e^{\mathrm{sink}_{hm}}}\, v_j$$

    with $\mathrm{cap}(s) = c \tanh(s / c)$ where `logits_soft_cap` $= c$ is given (else $s$) and a window of $w$ keys. Keys whose page is not there
    (-1) are not seen; a query that sees no key gives 0. Query head $h$ reads key head $\lfloor h / (H / K) \rfloor$. With `append=True` the
    keys and values of the new tokens are written first. One compiled program serves all batches of the same sizes.

    Platforms: Triton (`"triton"`, `"triton-interpret"`), XLA (`"xla"`). For inference: differentiating it raises `UnsupportedError`.

    Source: Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention* (2023), section 4.
    """

    operation: ClassVar[str] = "ragged_paged_attention"

    options: PagedOptions = eqx.field(static=True)
    append: bool = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(
        self,
        sliding_window: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        *,
        append: bool = False,
        platform: str | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `sliding_window`: an int $w$: the last $w$ keys, the query's own included; a pair `(left, right)`: `left` keys before its own (`None`: all;
            there are none behind).
        - `logits_soft_cap`: the bound $c$ of the tanh soft cap.
        - `softmax_scale`: default `D**-0.5`; required with a `PagedLatentCache`.
        - `append`: a call also takes the keys and values of the new tokens, writes them, and returns the cache.
        - `platform`: use this platform or raise; `None` chooses by device and request.
        - `config`: use this kernel configuration; it implies its platform.
        - `tune_for`: [`ejkernel_eqx.inputs`][]`(q, cache, query_start_loc=..., max_query_len=...)`, arrays or
            `jax.ShapeDtypeStruct`s: settle the choice for these now.

        Raises `ValueError` for options that mean nothing.
        """
        self.options = PagedOptions.read(sliding_window, logits_soft_cap, softmax_scale)
        self.append = append
        self.plan = plan_of(RaggedPagedAttention, self, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.RaggedPagedAttention")
    def __call__(
        self,
        q: Float[Array, "..."],
        cache: PagedKVCache | PagedLatentCache,
        k: Float[Array, "..."] | None = None,
        v: Float[Array, "..."] | None = None,
        *,
        query_start_loc: Int[Array, "..."],
        max_query_len: int | None = None,
        sinks: Float[Array, "..."] | None = None,
        return_lse: bool = False,
    ) -> Any:  # one array to three, as `return_lse` and `append` say
        """**Arguments:**

        - `q`: `[..., T, H, D]`, the queries of all sequences side by side; `[..., T, H, R + Dr]` for a latent cache. bf16, f16, f32 (f64 on XLA).
            Without leading axes if `append`.
        - `cache`: bound to tables `[N, M]`, or with the leading axes of `q`; its pages without leading axes or with these. `lengths` count the new
            tokens, which have been written unless `append`.
        - `k`, `v`: with `append`, and only then, `[T, K, D]` and `[T, K, V]`; for a latent cache the latents `[T, R]` and the rotary keys `[T, Dr]`.
            They go where the tables say; a token without a page, or of no sequence, goes nowhere.
        - `query_start_loc`: ints `[N + 1]`, where the queries of each sequence begin and end; none lower than the one before but behind the
            last sequence with queries, where zeros are as good.
        - `max_query_len`: the most queries of one sequence, static; those past it are left out. Default `T`. Give it where it is small: with 1, only
            decoding is compiled.
        - `sinks`: logits `[H]` or `[H, n]` that join the denominator and carry no value.
        - `return_lse`: also return the log-sum-exp of the scores, as [`ejkernel_eqx.merge_attention`][] takes it (without sinks).

        **Returns:**

        `[..., T, H, V]` (`[..., T, H, R]` for a latent cache) in the dtype of `q`; with `return_lse` also `[..., T, H]` in float32: natural
        logarithm, sinks included, `-inf` for a query that sees nothing. Tokens of no sequence give 0 and `-inf`. With `append` the new cache
        comes last, bound to the same tables; donate the old one to `jit` to have it written in place. Raises `ValueError` for arguments that
        do not fit, `UnsupportedError` if no platform (or not the given one) supports the call.
        """
        q = read_queries(q, cache, "T H D")
        tokens = packed(q, cache, query_start_loc, max_query_len)
        if not self.append and not (k is None and v is None):
            raise ValueError(
                "k, v: expected None, as append=False, received arrays; build with append=True or write them by cache.append."
            )
        if self.append and (k is None or v is None):
            raise ValueError(
                "k, v: expected the keys and values of the new tokens, as append=True, received None; build with append=False to read only."
            )
        arrays, spec = resolve(q, cache, self.options, tokens, Scoring(sinks), return_lse=return_lse)
        if not self.append:
            return finish(self.plan, arrays, spec)
        arrays, cache = append(self.plan, arrays, spec, cache, (k, v))
        results = finish(self.plan, arrays, spec)
        return (*results, cache) if return_lse else (results, cache)
