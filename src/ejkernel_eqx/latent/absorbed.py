"""`AbsorbedLatentAttention`: latent attention on the latents themselves, as in decoding."""

import dataclasses
from typing import Any, ClassVar, Literal, overload, TYPE_CHECKING, TypedDict, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from .._kernel import Kernel, Plan
from .._shapes import AnyArray, Float, Int, Numbers
from .._values import check_between
from ..core.arguments import array
from ..core.plans import plan_of
from ..dispatch import PlatformLike
from ..paged import arguments as pages
from ..paged import PagedLatentCache
from ..paged.arguments import PagedOptions, Scoring, Tokens
from ..paged.cache.pages import read_array
from ..paged.core import finish
from ..paged.signature import Output, WithLse
from ..paged.spec import PagedArrays, PagedSpec
from ..paged.tokens import alone
from ..parallel import match_sharding
from ..parallel.mesh import resharded, spec_of
from .arguments import read_latents, read_weights

# Its kernels are those of attention over pages.


class AbsorbedInputs(TypedDict, total=False):
    """The arguments by name of [`ejkernel_eqx.AbsorbedLatentAttention`][] but for `return_lse`, which decides what comes back."""

    w_uk: Float[AnyArray, "H Dn R"] | None
    w_uv: Float[AnyArray, "H V R"] | None
    query_start_loc: Int[Numbers, " N+1"] | None
    max_query_len: int | None
    q_starts: int | Int[Numbers, "*B"] | None
    q_lengths: int | Int[Numbers, "*B"] | None
    kv_lengths: int | Int[Numbers, "*B"] | None
    sinks: Float[Numbers, " H *n"] | None


class AbsorbedLatentAttention(Kernel):
    r"""Latent attention in its absorbed form, for decoding. The latents are keys and values of all heads. The weights
    that would expand them are applied to queries and outputs instead.

    $$s_{hij} = \mathrm{cap}\!\left(\mathrm{scale}\,\big(W^{UK\top}_h q^c_{hi} \cdot c_j + q^r_{hi} \cdot k^r_j\big)\right), \qquad
    o_{hi} = W^{UV}_h \sum_{j} \frac{e^{s_{hij}}}{\sum_l e^{s_{hil}}}\, c_j$$

    with latents $c_j$, queries $[q^c, q^r]$ and $\mathrm{cap}(s) = c \tanh(s / c)$ if `logits_soft_cap` $= c$ is given (else $s$). The result is
    that of [`ejkernel_eqx.MultiHeadLatentAttention`][] on keys $k_{hj} = W^{UK}_h c_j$ and values $v_{hj} = W^{UV}_h c_j$. Each token is read once
    for all heads, in pages ([`ejkernel_eqx.PagedLatentCache`][]) or as dense rows. For many queries per token the expanded form takes fewer
    operations; parts of the keys that were computed in either form are merged by [`ejkernel_eqx.merge_attention`][].

    Platforms: Triton (`"triton"`, `"triton-interpret"`), Pallas on TPU (`"pallas"`, `"pallas-interpret"`), XLA (`"xla"`). For inference only:
    differentiating it raises `UnsupportedError`.

    Source: DeepSeek-AI, *DeepSeek-V2* (2024), arXiv:2405.04434, section 2.1.2.
    """

    operation: ClassVar[str] = "absorbed_latent_attention"

    causal: bool = eqx.field(static=True)
    options: PagedOptions = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(
        self,
        causal: bool = True,
        sliding_window: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        *,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `causal`: the queries of a sequence are its last tokens and see the keys up to their own. Otherwise each sees all keys of its
            sequence, as a chunk of a prompt sees the tokens before it. True by default as in all attention over pages, while the expanded form,
            [`ejkernel_eqx.MultiHeadLatentAttention`][], is not causal by default: pass `causal=` where both are used.
        - `sliding_window`, `logits_soft_cap`, `platform`, `config`, `tune_for`: as in [`ejkernel_eqx.PagedAttention`][]. A window needs
            `causal=True`.
        - `softmax_scale`: that of the expanded heads, such as `(Dn + Dr) ** -0.5`; required, as latents do not tell it.

        Raises `ValueError` for invalid options.
        """
        self.options = PagedOptions.read(sliding_window, logits_soft_cap, softmax_scale)
        if self.options.softmax_scale is None:
            raise ValueError(
                "softmax_scale: expected a number, received None; pass the scale of the expanded heads, such as (nope_dim + rope_dim) ** -0.5, "
                "which cannot be derived from latents."
            )
        if not causal and self.options.left is not None:
            raise ValueError(
                f"sliding_window: expected None with causal=False, received {sliding_window!r}; only queries with a position have a window."
            )
        self.causal = causal
        self.plan = plan_of(AbsorbedLatentAttention, self, platform, config, tune_for)

    if TYPE_CHECKING:

        @overload
        def __call__(
            self,
            q: Float[AnyArray, "*B T H D"],
            latent: Float[AnyArray, "*B S R"] | PagedLatentCache,
            k_rope: Float[AnyArray, "*B S Dr"] | None = None,
            *,
            return_lse: Literal[False] = False,
            **others: Unpack[AbsorbedInputs],
        ) -> Output: ...

        @overload
        def __call__(
            self,
            q: Float[AnyArray, "*B T H D"],
            latent: Float[AnyArray, "*B S R"] | PagedLatentCache,
            k_rope: Float[AnyArray, "*B S Dr"] | None = None,
            *,
            return_lse: Literal[True],
            **others: Unpack[AbsorbedInputs],
        ) -> WithLse: ...

        @overload
        def __call__(
            self,
            q: Float[AnyArray, "*B T H D"],
            latent: Float[AnyArray, "*B S R"] | PagedLatentCache,
            k_rope: Float[AnyArray, "*B S Dr"] | None = None,
            *,
            return_lse: bool,
            **others: Unpack[AbsorbedInputs],
        ) -> Output | WithLse: ...

    @jax.named_scope("ejkernel_eqx.AbsorbedLatentAttention")
    def __call__(
        self,
        q: Float[AnyArray, "*B T H D"],
        latent: Float[AnyArray, "*B S R"] | PagedLatentCache,
        k_rope: Float[AnyArray, "*B S Dr"] | None = None,
        *,
        w_uk: Float[AnyArray, "H Dn R"] | None = None,
        w_uv: Float[AnyArray, "H V R"] | None = None,
        query_start_loc: Int[Numbers, " N+1"] | None = None,
        max_query_len: int | None = None,
        q_starts: int | Int[Numbers, "*B"] | None = None,
        q_lengths: int | Int[Numbers, "*B"] | None = None,
        kv_lengths: int | Int[Numbers, "*B"] | None = None,
        sinks: Float[Numbers, " H *n"] | None = None,
        return_lse: bool = False,
    ) -> Float[Array, "*B T H V"] | tuple[Float[Array, "*B T H V"], Float[Array, "*B T H"]]:
        """**Arguments:**

        - `q`: `[..., T, H, Dn + Dr]`, or without `w_uk` `[..., T, H, R + Dr]`. The rotary part is last. bf16, f16, f32
            (f64 on XLA).
        - `latent`, `k_rope`: dense latents `[..., S, R]` and rotary keys `[..., S, Dr]`, with the leading axes of `q`.
            Or a bound [`ejkernel_eqx.PagedLatentCache`][] and `None`, with packed queries `[T, H, ...]`.
        - `w_uk`: `[H, Dn, R]`, which expands a latent to the keys of the heads; default: queries have been multiplied by it.
        - `w_uv`: `[H, V, R]`, which expands it to values; default: outputs are latents, `[..., T, H, R]`.
        - `query_start_loc`, `max_query_len`: with pages, as in [`ejkernel_eqx.RaggedPagedAttention`][].
        - `q_starts`, `q_lengths`: with dense latents, the place of the first real query of each row and the number of real ones; others give 0.
            Default: all are real.
        - `kv_lengths`: with dense latents, ints from 0 to `S`: the number of keys of each row, those of its queries included if `causal`.
            Default `S`. Latents behind may hold anything.
        - `sinks`, `return_lse`: as in [`ejkernel_eqx.PagedAttention`][].

        **Returns:**

        `[..., T, H, V]` (`[..., T, H, R]` without `w_uv`) in the dtype of `q`. With `return_lse` also `[..., T, H]` in
        float32. It is the natural logarithm, including sinks, and `-inf` for a query that sees no key. Raises
        `ValueError` for invalid arguments, and `UnsupportedError` if no platform, or not the requested one, supports
        the call.
        """
        q = array("q", q, "T H D")
        rows = {"q_starts": q_starts, "q_lengths": q_lengths, "kv_lengths": kv_lengths}
        dense: Any = None
        if isinstance(latent, PagedLatentCache):
            _check_none("a PagedLatentCache", k_rope=k_rope, **rows)
            sizes = latent.latent_dim, latent.rope_dim
        else:
            _check_none("dense latents", query_start_loc=query_start_loc, max_query_len=max_query_len)
            dense = read_latents(latent, k_rope, q.shape[:-3])
            sizes = dense[0].shape[-1], dense[1].shape[-1]
        w_uk, w_uv = read_weights(w_uk, w_uv, q, sizes)
        # With the weight in the queries, scores are products with the latents: `[..., T, H, R + Dr]`.
        if w_uk is not None:
            q = absorbed(q, w_uk)
        scoring = Scoring(return_lse, sinks)
        if isinstance(latent, PagedLatentCache):
            arrays, spec = self._over_pages(q, latent, query_start_loc, max_query_len, scoring)
        else:
            tokens = self._over_rows(q, dense[0], **rows)
            arrays, spec = pages.resolve_rows(q, dense, self.options, tokens, scoring)
        results: Any = finish(self.plan, arrays, spec)
        # Only outputs are expanded: the weight of the values does not change the log-sum-exp.
        out, *lse = results if return_lse else (results,)
        out = out if w_uv is None else expanded(out, w_uv)
        return (out, *lse) if return_lse else out

    def _over_pages(
        self, q: Array, cache: PagedLatentCache, query_start_loc: Any, max_query_len: Any, scoring: Scoring
    ) -> tuple[PagedArrays, PagedSpec]:
        """The call on pages, with a sequence for each query if that sees all keys."""
        pages.read_queries(q, cache, "T H D")
        if query_start_loc is None:
            raise ValueError(
                "query_start_loc: expected ints [N + 1] with a PagedLatentCache, received None; RaggedBatch.query_start_loc holds them."
            )
        tokens = pages.packed(q, cache, query_start_loc, max_query_len)
        arrays, spec = pages.resolve(q, cache, self.options, tokens, scoring)
        if self.causal:
            return arrays, spec
        if q.ndim > 3:
            raise ValueError(
                f"q: expected [tokens, heads, channels] with causal=False, received shape {q.shape}; use jax.vmap over leading axes."
            )
        # As a sequence of its own, a query sees all keys of its sequence.
        return alone(arrays, causal=False), dataclasses.replace(spec, max_query_len=1)

    def _over_rows(
        self, q: Array, latent: Array, q_starts: Any, q_lengths: Any, kv_lengths: Any
    ) -> tuple[Tokens, Array]:
        """Queries of the sequences of each row, and their numbers of keys. Where queries see all keys, each is a sequence."""
        lead, queries, keys = q.shape[:-3], q.shape[-3], latent.shape[-2]

        def read(name: str, value: Any, default: int, most: int) -> Array:
            value = default if value is None else value
            x = read_array(name, value, ((), lead), f"ints {lead}, one for each row of q, or one for all")
            x = check_between(name, x.astype(jnp.int32), value, 0, most, "see q and latent")
            return jnp.broadcast_to(x, lead)

        start, lengths = read("q_starts", q_starts, 0, queries), read("kv_lengths", kv_lengths, keys, keys)
        count = read("q_lengths", q_lengths, queries, queries)
        if q_starts is not None:
            # The default count includes queries before the start, which are not real.
            count = jnp.minimum(count, queries - start)
        if self.causal:
            # Each row is one sequence: `[*B]` becomes `[*B, 1]`.
            return Tokens(start[..., None], count[..., None], max(queries, 1)), lengths[..., None]
        # Each query is a sequence, `[*B, T]`, empty if it is not real.
        token = jnp.broadcast_to(jnp.arange(queries, dtype=jnp.int32), (*lead, queries))
        real = (token >= start[..., None]) & (token < (start + count)[..., None])
        every = jnp.broadcast_to(lengths[..., None], real.shape)
        return Tokens(token, real.astype(jnp.int32), 1), every


def absorbed(q: Array, w_uk: Array) -> Array:
    """Queries `[..., T, H, Dn + Dr]` as `[..., T, H, R + Dr]`: their first part multiplied by the weight `[H, Dn, R]` of the keys."""
    own, rope = jnp.split(q, [w_uk.shape[1]], axis=-1)
    own = jnp.einsum("...hd,hdr->...hr", own, _beside(q, w_uk), precision=_precision(q))
    return jnp.concatenate([own, match_sharding(rope, own)], axis=-1)


def expanded(out: Array, w_uv: Array) -> Array:
    """Outputs `[..., T, H, R]` as `[..., T, H, V]`, by the weight `[H, V, R]` of the values."""
    return jnp.einsum("...hr,hvr->...hv", out, _beside(out, w_uv), precision=_precision(out))


def _beside(x: Array, weight: Array) -> Array:
    """The weight in the dtype of `x`. Features that are split over an explicit mesh are gathered, and its heads lie as those of `x`."""
    weight = weight.astype(x.dtype)
    if not any(spec_of(weight)[1:]):
        return weight
    return resharded(weight, jax.typeof(weight).sharding.mesh, PartitionSpec(spec_of(x)[-2]))


def _precision(x: Array) -> Any:
    """The precision of the kernels: float32 is not rounded on its way into a product."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def _check_none(what: str, **others: Any) -> None:
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"{name}: expected None with {what}, received {type(value).__name__}; see which arguments go with which."
            )
