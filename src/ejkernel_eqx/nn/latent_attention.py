"""`MultiHeadLatentAttention`: the attention layer of DeepSeek-V2 and V3."""

import functools
import math
from typing import Any, Literal, overload, TYPE_CHECKING, Unpack

import equinox as eqx
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from .._jitted import compiled_call
from .._shapes import AnyArray, Bool, Float, Int, is_symbolic
from ..attention import Mask, merge_attention
from ..attention.ring.arguments import Split
from ..dispatch import PlatformLike
from ..latent import AbsorbedLatentAttention
from ..latent import MultiHeadLatentAttention as ExpandedAttention
from ..latent.absorbed import absorbed, expanded
from ..latent.cost import expands, LatentSizes
from ..paged import PagedLatentCache, RaggedBatch, RaggedPagedAttention
from ..paged.cache.pages import filled_dtype
from ..rotary import RotaryEmbedding, YarnScaling
from ..weights.latent_configs import latent_attention_options
from .arguments import checked
from .attention_inputs import CallInputs, check_rows
from .attention_places import locate, Places, places_over_pages, Rows
from .heads_for_tokens import LatentOverTokens, over_tokens
from .kv_cache import marked
from .latent_cache import LatentCache
from .paged_layer import check_pool, over_pages, PagedLayer
from .parts import Parts
from .projection import compute_dtype_of, in_float8, product, project, stored_dtype_of
from .published import Published
from .signatures import LatentInputs, SameOutput, Tokens
from .split_attention import places_over, split_of
from .tokens import check_ragged, clear, merge_heads, split_heads


class MultiHeadLatentAttention(PagedLayer[PagedLatentCache], Published):
    r"""Multi-head latent attention (DeepSeek-V2, 2024, arXiv:2405.04434, section 2.1; the same in DeepSeek-V3):

    $$c = \mathrm{norm}(x W_{kv}^\top),\quad k^r = \mathrm{rope}(x W_{kr}^\top),\quad [k_h, v_h] = c\,W_{b,h}^\top,\quad
      [q^c_h, q^r_h] = \mathrm{norm}(x W_{qa}^\top) W_{qb,h}^\top$$

    $$y = \Big[\mathrm{softmax}\big(\mathrm{scale}\,(q^c_h k_h^\top + \mathrm{rope}(q^r_h) k^{r\top})\big)\, v_h\Big]_h W_o^\top$$

    Only the latent $c$ and the rotary key $k^r$, which all heads share, are cached. Without a cache, keys and values
    are expanded ([`ejkernel_eqx.MultiHeadLatentAttention`][]). Few new tokens after a cache attend to the latents
    themselves ([`ejkernel_eqx.AbsorbedLatentAttention`][]). A long chunk does the former for its own tokens and the
    latter for those before. The two are merged exactly. Parameters have the names and shapes (`[out, in]`) of the
    published code, so published weights load by renaming.
    """

    q_proj: eqx.nn.Linear | None  # [H * (Dn + Dr), E], without query LoRA
    q_a_proj: eqx.nn.Linear | None  # [Rq, E]
    q_a_layernorm: eqx.nn.RMSNorm | None  # [Rq]
    q_b_proj: eqx.nn.Linear | None  # [H * (Dn + Dr), Rq]
    kv_a_proj_with_mqa: eqx.nn.Linear  # [R + Dr, E]
    kv_a_layernorm: eqx.nn.RMSNorm  # [R]
    kv_b_proj: eqx.nn.Linear  # [H * (Dn + V), R], each head's keys and then its values
    o_proj: eqx.nn.Linear  # [E, H * V]
    rope: RotaryEmbedding | None
    attention: ExpandedAttention
    absorbed_attention: AbsorbedLatentAttention
    past_attention: AbsorbedLatentAttention
    paged_attention: RaggedPagedAttention
    embed_dim: int = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    q_lora_rank: int | None = eqx.field(static=True)
    kv_lora_rank: int = eqx.field(static=True)
    qk_nope_head_dim: int = eqx.field(static=True)
    qk_rope_head_dim: int = eqx.field(static=True)
    v_head_dim: int = eqx.field(static=True)
    split: Split | None = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    @checked
    def __init__(
        self,
        embed_dim: int,
        *,
        num_heads: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int | None = None,
        q_lora_rank: int | None = None,
        rope: RotaryEmbedding | Literal[False] | None = None,
        norm_eps: float = 1e-6,
        use_bias: bool = False,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        sequence_axis: str | None = None,
        token_order: Literal["contiguous", "zigzag"] = "contiguous",
        platform: PlatformLike | None = None,
        config: Any = None,
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        key: PRNGKeyArray,
    ):
        r"""**Arguments:**

        - `embed_dim`: features `E` of the input and output.
        - `num_heads`: number of heads `H`.
        - `kv_lora_rank`: features `R` of the latent (512 in DeepSeek-V2 and V3).
        - `qk_nope_head_dim`, `qk_rope_head_dim`: features of a query or key without and with rotation, `Dn` and `Dr` (128 and 64).
        - `v_head_dim`: features `V` of a value; default `Dn`.
        - `q_lora_rank`: features `Rq` between the two projections of the queries; `None` for a single one (DeepSeek-V2-Lite).
        - `rope`: rotary embedding of `Dr` features; default one that is interleaved, as DeepSeek's. `False` for none (Kimi-Linear).
        - `norm_eps`: added to the mean square in the norms of the latents.
        - `use_bias`: whether `q_a_proj`, `kv_a_proj_with_mqa` and `o_proj` have biases.
        - `logits_soft_cap`, `platform`, `config`: as in [`ejkernel_eqx.MultiHeadLatentAttention`][]. The platform also applies to attention
            over latents.
        - `softmax_scale`: default `(Dn + Dr) ** -0.5`, and if `rope` has a `YarnScaling` with `mscale_all_dim` $= m$, that times
            $(0.1\, m \ln(\text{factor}) + 1)^2$.
        - `sequence_axis`, `token_order`: a mesh axis that the tokens are split over, and their order, as in [`ejkernel_eqx.nn.MultiHeadAttention`][].
            Devices gather latents, exchange heads for tokens, and each expands the keys and values of its heads. If they do not divide the heads,
            some have fewer.
        - `dtype`, `compute_dtype`: as in [`ejkernel_eqx.nn.MultiHeadAttention`][].
        - `key`: PRNG key for the initial weights.
        """
        v_head_dim = qk_nope_head_dim if v_head_dim is None else v_head_dim
        self.rope = _read_rope(rope, qk_rope_head_dim)
        self.split = split_of(sequence_axis, token_order)
        parts, dim = Parts(key, 5, dtype, compute_dtype), qk_nope_head_dim + qk_rope_head_dim
        norm = lambda features: eqx.nn.RMSNorm(features, norm_eps, use_bias=False, dtype=parts.dtype)
        self.q_proj = self.q_a_proj = self.q_a_layernorm = self.q_b_proj = None
        if q_lora_rank is None:
            self.q_proj = parts.linear(embed_dim, num_heads * dim)
            parts.left_out()
        else:
            self.q_a_proj = parts.linear(embed_dim, q_lora_rank, use_bias)
            self.q_a_layernorm = norm(q_lora_rank)
            self.q_b_proj = parts.linear(q_lora_rank, num_heads * dim)
        self.kv_a_proj_with_mqa = parts.linear(embed_dim, kv_lora_rank + qk_rope_head_dim, use_bias)
        self.kv_a_layernorm = norm(kv_lora_rank)
        self.kv_b_proj = parts.linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim))
        self.o_proj = parts.linear(num_heads * v_head_dim, embed_dim, use_bias)
        scale = _softmax_scale(self.rope, dim) if softmax_scale is None else float(softmax_scale)
        options: Any = {"logits_soft_cap": logits_soft_cap, "softmax_scale": scale, "platform": platform}
        self.attention = ExpandedAttention(causal=True, config=config, **options)
        self.absorbed_attention = AbsorbedLatentAttention(causal=True, **options)
        self.past_attention = AbsorbedLatentAttention(causal=False, **options)
        self.paged_attention = RaggedPagedAttention(append=True, **options)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.v_head_dim, self.compute_dtype = v_head_dim, parts.compute_dtype

    _options_of = staticmethod(latent_attention_options)

    def init_cache(
        self, batch_shape: tuple[int, ...] | int, max_length: int, dtype: DTypeLike | None = None
    ) -> LatentCache:
        """Returns an empty [`LatentCache`][ejkernel_eqx.nn.LatentCache] for this layer.

        **Arguments:**

        - `batch_shape`: leading axes; `()` for one sequence, an integer `B` for `(B,)`.
        - `max_length`: capacity of each row, in tokens.
        - `dtype`: of latents and rotary keys; default `compute_dtype`, or else the dtype of the weights.
        """
        kept: DTypeLike = self._stored_dtype() if dtype is None else dtype
        return LatentCache.init(batch_shape, max_length, self.kv_lora_rank, self.qk_rope_head_dim, kept)

    def init_paged_cache(
        self,
        num_pages: int,
        page_size: int,
        *,
        batch_shape: tuple[int, ...] | int = (),
        dtype: DTypeLike | tuple[DTypeLike | None, DTypeLike | None] | None = None,
        scales: str | None = None,
    ) -> PagedLatentCache:
        """Returns an empty [`PagedLatentCache`][ejkernel_eqx.PagedLatentCache] for this layer.

        **Arguments:**

        - `num_pages`, `page_size`, `scales`: as in `PagedLatentCache.init`.
        - `batch_shape`: leading axes of stacked layers.
        - `dtype`: of the pages, or a pair for latents and rotary keys. The default, also for `None` in a pair, is
            `compute_dtype`, or else the dtype of the weights.
        """
        kept = filled_dtype(dtype, self._stored_dtype())
        sizes = (num_pages, page_size, self.kv_lora_rank, self.qk_rope_head_dim)
        return PagedLatentCache.init(*sizes, batch_shape=batch_shape, dtype=kept, scales=scales)

    if TYPE_CHECKING:

        @overload
        def __call__(self, x: Tokens, cache: None = None, **given: Unpack[LatentInputs]) -> SameOutput: ...

        @overload
        def __call__(
            self, x: Tokens, cache: LatentCache, **given: Unpack[LatentInputs]
        ) -> tuple[SameOutput, LatentCache]: ...

        @overload
        def __call__(
            self, x: Tokens, cache: PagedLatentCache, *, batch: RaggedBatch
        ) -> tuple[SameOutput, PagedLatentCache]: ...

    @compiled_call("ejx.nn.MultiHeadLatentAttention")
    def __call__(
        self,
        x: Float[AnyArray, "*B T E"],
        cache: LatentCache | PagedLatentCache | None = None,
        *,
        positions: Int[AnyArray, "... T"] | None = None,
        padding_mask: Bool[AnyArray, "*B T"] | None = None,
        segment_ids: Int[AnyArray, "*B T"] | None = None,
        cu_seqlens: Int[AnyArray, " N+1"] | None = None,
        mask: Bool[AnyArray, "#*B #H #T #S"] | Mask | None = None,
        batch: RaggedBatch | None = None,
    ) -> SameOutput | tuple[SameOutput, LatentCache | PagedLatentCache]:
        """**Arguments:**

        - `x`: `[..., T, E]` with any number of leading axes.
        - `cache`: latents and rotary keys of the tokens before `x`; those of `x` are appended. Processing a prompt at once, in chunks or token by
            token, with rows at different positions, returns the same as processing whole sequences at once. For inference: calls with a cache have
            no gradient.
        - `positions`, `padding_mask`, `segment_ids`, `cu_seqlens`: as in [`ejkernel_eqx.nn.MultiHeadAttention`][].
        - `mask`: as in [`ejkernel_eqx.MultiHeadLatentAttention`][], `[..., H, T, S]`. Not with a cache, nor with `sequence_axis`.
        - `batch`: an `ejkernel_eqx.RaggedBatch`, for serving. `x [T, E]` holds the new tokens of its sequences and `cache` is a
            `PagedLatentCache`, into whose pages they are written. It may be bound to the tables of the batch or not, and is returned in the same
            state. Padding may hold NaN; outputs at padding positions are undefined. Donate the cache for writing in place.

        **Returns:** `y`, of the shape of `x`, in the dtype of the computation. With a cache: `(y, cache)`.

        Raises `ValueError` for invalid arguments; values are checked when they are known (outside `jit`).
        """
        tokens: Any = {"padding_mask": padding_mask, "segment_ids": segment_ids, "cu_seqlens": cu_seqlens}
        given = CallInputs(positions=positions, mask=mask, **tokens)
        if batch is not None:
            x = check_ragged(x, batch, self.embed_dim, given._asdict())
            sizes = self.kv_lora_rank, self.qk_rope_head_dim
            check_pool(cache, PagedLatentCache, "(R, Dr)", sizes, lambda of: (of.latent_dim, of.rope_dim))
            return over_pages(self, x, cache, batch, functools.partial(self._over_pages, batch))
        x = check_rows(self.embed_dim, (LatentCache, PagedLatentCache), x, cache, given)
        assert not isinstance(cache, PagedLatentCache)
        rows = locate(x, cache, given)
        x = clear(x.astype(compute_dtype_of(self.compute_dtype, self, x)), rows.real)
        split = self.split if cache is None else None
        q, latent, k_rope = self._parts(x, places_over(split, self.rope, positions, rows, x))
        # With a cache, latents are not expanded before it is known which form takes less work.
        if cache is not None:
            return self._after(q, latent, k_rope, cache, rows)
        if over_tokens(split, x, rows.cu_seqlens, mask):
            over = LatentOverTokens.of(self, split, q)
            ids = {} if rows.segment_ids is None else {"segment_ids": jnp.asarray(rows.segment_ids)}
            return self._finish(over(q, latent, k_rope, *self._weights(q.dtype), **ids))
        k, v = self._expanded(latent)
        ids: Any = {"segment_ids": rows.segment_ids, "kv_segment_ids": rows.kv_segment_ids}
        return self._finish(self.attention(q, k, k_rope, v, mask=mask, cu_seqlens=rows.cu_seqlens, **ids))

    def _after(
        self, q: Array, latent: Array, k_rope: Array, cache: LatentCache, rows: Rows
    ) -> tuple[Array, LatentCache]:
        """A call with a dense cache."""
        new = cache.append(latent, k_rope, mask=rows.real)
        w_uk, w_uv = self._weights(q.dtype)
        real: dict[str, Any] = {"w_uk": w_uk, "w_uv": w_uv}
        if rows.real is not None and rows.offset is not None:
            # The first real token has the position of the row's length.
            real |= {"q_starts": cache.lengths - rows.offset, "q_lengths": new.lengths - cache.lengths}
        if not expands(math.prod(q.shape[:-2]), q.shape[-3], self._sizes):
            out = self.absorbed_attention(q, new.latent, new.rope, kv_lengths=new.lengths, **real)
            return marked(self._finish(out), new), new
        # Padding among the new tokens has a negative id, which hides it from every query.
        ids = None if rows.real is None else jnp.where(jnp.asarray(rows.real), jnp.int32(0), -1)
        k, v = self._expanded(latent)
        own = self.attention(q, k, k_rope, v, segment_ids=ids, return_lse=True)
        # The rows after the write, of which only the old part is read, so that a donated cache is written in place.
        past = self.past_attention(q, new.latent, new.rope, kv_lengths=cache.lengths, return_lse=True, **real)
        return marked(self._finish(merge_attention(past, own, return_lse=False)), new), new

    def _over_pages(
        self, batch: RaggedBatch, x: Array, bound: PagedLatentCache
    ) -> tuple[Array, PagedLatentCache]:
        """A call with a batch: latents and rotary keys are written to their pages first."""
        q, latent, k_rope = self._parts(x, places_over_pages(self.rope, batch, None))
        w_uk, w_uv = self._weights(q.dtype)
        starts = batch.query_start_loc
        sizes: Any = {"query_start_loc": starts, "max_query_len": batch.max_query_len}
        if not expands(q.shape[0], batch.max_query_len, self._sizes):
            # One call writes the new latents and attends to all of them.
            out, new = self.paged_attention(absorbed(q, w_uk), bound, latent, k_rope, **sizes)
            out = expanded(out, w_uv)
        else:
            new = bound.append(latent, k_rope, batch.slots)
            k, v = self._expanded(latent)
            own = self.attention(q, k, k_rope, v, cu_seqlens=starts, return_lse=True)
            # Only the tokens before count here, as the new ones are attended to in the expanded form.
            before = new.bind(batch.page_table, batch.lengths - (starts[1:] - starts[:-1]))
            past = self.past_attention(q, before, w_uk=w_uk, w_uv=w_uv, return_lse=True, **sizes)
            out = merge_attention(past, own, return_lse=False)
        return self._finish(out), new

    def _parts(self, x: Array, places: Places) -> tuple[Array, Array, Array]:
        """Queries `[..., T, H, Dn + Dr]`, latents `[..., T, R]` and rotary keys `[..., T, Dr]`."""
        width = self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        # Smaller models compute queries by one product, without a low rank.
        if self.q_lora_rank is None:
            q = project("q_proj", self.q_proj, x, width)
        else:
            q = project("q_a_proj", self.q_a_proj, x, self.q_lora_rank)
            q = project("q_a_layernorm", self.q_a_layernorm, q, self.q_lora_rank)
            q = project("q_b_proj", self.q_b_proj, q, width)
        q, q_rope = jnp.split(split_heads(q, self.num_heads), [self.qk_nope_head_dim], axis=-1)
        both = project(
            "kv_a_proj_with_mqa", self.kv_a_proj_with_mqa, x, self.kv_lora_rank + self.qk_rope_head_dim
        )
        latent, k_rope = jnp.split(both, [self.kv_lora_rank], axis=-1)
        latent = project("kv_a_layernorm", self.kv_a_layernorm, latent, self.kv_lora_rank)
        q = jnp.concatenate([q, places.turn(self.rope, q_rope)], axis=-1)
        # The rotation takes an axis of heads, which the shared key has not.
        return q, latent, places.turn(self.rope, k_rope[..., None, :])[..., 0, :]

    def _expanded(self, latent: Array) -> tuple[Array, Array]:
        """Keys `[..., T, H, Dn]` and values `[..., T, H, V]`."""
        linear, heads = self.kv_b_proj, self.num_heads
        width = self.qk_nope_head_dim + self.v_head_dim
        is_plain = type(linear) is eqx.nn.Linear and linear.bias is None
        is_plain = is_plain and not in_float8(latent, linear.weight)
        if is_plain and linear.weight.shape == (heads * width, self.kv_lora_rank) and splits_weights(latent):
            # Kernels take keys and values apart. With many tokens it is the weights that are fewer to copy.
            parts = [w.reshape(-1, w.shape[-1]) for w in self._weights(linear.weight.dtype)]
            k, v = (split_heads(product(latent, w), heads) for w in parts)
            return k, v
        both = split_heads(project("kv_b_proj", linear, latent, heads * width), heads)
        k, v = jnp.split(both, [self.qk_nope_head_dim], axis=-1)
        return k, v

    def _weights(self, dtype: Any) -> tuple[Array, Array]:
        """The weights of keys `[H, Dn, R]` and values `[H, V, R]`."""
        width = self.qk_nope_head_dim + self.v_head_dim
        if type(self.kv_b_proj) is eqx.nn.Linear:
            weight = self.kv_b_proj.weight.astype(dtype)
        else:  # of whatever computes it
            unit = jnp.eye(self.kv_lora_rank, dtype=dtype)
            weight = project("kv_b_proj", self.kv_b_proj, unit, self.num_heads * width).T
        w_uk, w_uv = jnp.split(
            weight.reshape(self.num_heads, width, self.kv_lora_rank), [self.qk_nope_head_dim], axis=1
        )
        return w_uk, w_uv

    def _finish(self, out: Any) -> Array:
        return project("o_proj", self.o_proj, merge_heads(out), self.embed_dim)

    @property
    def _sizes(self) -> LatentSizes:
        nope, rope = self.qk_nope_head_dim, self.qk_rope_head_dim
        return LatentSizes(self.num_heads, nope, rope, self.v_head_dim, self.kv_lora_rank)

    def _stored_dtype(self) -> Any:
        return stored_dtype_of(self.compute_dtype, (self.kv_a_proj_with_mqa,))


def splits_weights(latent: Array) -> bool:
    """Returns whether weights have fewer numbers to copy than the keys and values of these latents."""
    tokens = math.prod(latent.shape[:-1])
    return is_symbolic(tokens) or tokens > latent.shape[-1]


def _read_rope(rope: Any, rope_dim: int) -> RotaryEmbedding | None:
    if rope is False:
        return None
    if rope is None:
        return RotaryEmbedding(rope_dim, interleaved=True)
    if not isinstance(rope, RotaryEmbedding) or rope.num_axes is not None:
        raise ValueError(
            f"rope: expected a RotaryEmbedding of one axis, None or False, received {rope!r}; the default one is RotaryEmbedding({rope_dim}, "
            "interleaved=True)."
        )
    if rope.head_dim != rope_dim:
        raise ValueError(
            f"rope: expected a RotaryEmbedding of qk_rope_head_dim={rope_dim}, received one of {rope.head_dim}; only that part of a head is rotated."
        )
    return rope


def _softmax_scale(rope: RotaryEmbedding | None, dim: int) -> float:
    scaling = None if rope is None else rope.scaling
    share = scaling.softmax_factor if isinstance(scaling, YarnScaling) else 1.0
    return dim**-0.5 * share
