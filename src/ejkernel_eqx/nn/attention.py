"""Multi-head attention with weights, as the published decoder models have it."""

from typing import Any, overload, TypedDict, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from ..attention import FlashAttention, Mask
from ..dispatch import PlatformLike
from ..paged import PagedKVCache, RaggedBatch, RaggedPagedAttention
from .arguments import check_eps, check_flags, check_numbers, check_sizes
from .attention_inputs import (
    CallInputs,
    check_call,
    check_heads,
    check_pages,
    head_dim_of,
    locate,
    locate_cross,
)
from .kv_cache import KVCache
from .parts import Parts
from .projection import compute_dtype_of, project, stored_dtype_of
from .rotary import RotaryEmbedding
from .tokens import clear, merge_heads, split_heads


class _Given(TypedDict, total=False):
    """What a call takes beside `x` and the cache."""

    kv_input: Array | None
    positions: Array | None
    padding_mask: Array | None
    kv_padding_mask: Array | None
    segment_ids: Array | None
    mask: Array | Mask | None
    bias: Array | None
    key: Array | None
    inference: bool | None


class MultiHeadAttention(eqx.Module):
    r"""Multi-head attention (Vaswani et al. 2017, arXiv:1706.03762) with grouped keys and values (Ainslie et
    al. 2023, arXiv:2305.13245):

    $$q = \mathrm{rope}(\mathrm{norm}(x W_q^\top)),\quad k = \mathrm{rope}(\mathrm{norm}(x W_k^\top)),\quad
      v = x W_v^\top,\quad
      y = \big(\sigma(g) \odot \mathrm{FlashAttention}(q, k, v)\big) W_o^\top$$

    where the rotation, the norms, the gate $g$ (and biases, sinks, soft cap, window) are there only if asked
    for. The parameters have the names and shapes of the published model code, `[out, in]`, so its weights
    load by renaming; the guide "Layers" gives the constructor calls of Llama, Mistral, Gemma-2, Qwen3 and
    GPT-OSS.
    """

    q_proj: eqx.nn.Linear  # [H * D, E]; with a gate [H * (D + V), E], each head's query and then its gate
    k_proj: eqx.nn.Linear  # [K * D, C]
    v_proj: eqx.nn.Linear  # [K * V, C]
    o_proj: eqx.nn.Linear  # [E, H * V]
    q_norm: eqx.nn.RMSNorm | None  # [D]
    k_norm: eqx.nn.RMSNorm | None  # [D]
    sinks: Array | None  # [H]
    rope: RotaryEmbedding | None
    attention: FlashAttention
    paged_attention: RaggedPagedAttention
    embed_dim: int = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)
    kv_embed_dim: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    v_head_dim: int = eqx.field(static=True)
    output_gate: bool = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    def __init__(
        self,
        embed_dim: int,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        kv_embed_dim: int | None = None,
        rope: RotaryEmbedding | None = None,
        qk_norm: bool = False,
        qk_norm_eps: float = 1e-6,
        use_qkv_bias: bool = False,
        use_output_bias: bool = False,
        causal: bool = True,
        sliding_window: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        sinks: bool = False,
        output_gate: bool = False,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        platform: PlatformLike | None = None,
        config: Any = None,
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        key: Array,
    ):
        r"""**Arguments:**

        - `embed_dim`: features of the input and the output, `E`.
        - `num_heads`: query heads, `H`.
        - `num_kv_heads`: key and value heads `K`, a divisor of `H`; default `H`. One is multi-query
            attention.
        - `head_dim`, `v_head_dim`: `D` (default `embed_dim // num_heads`) and `V` (default `D`).
        - `kv_embed_dim`: features `C` of `kv_input`, for cross attention; default `E`.
        - `rope`: the rotation of queries and keys; default none.
        - `qk_norm`, `qk_norm_eps`: whether each head's query and key pass an RMS norm with a learned weight
            `[D]` before the rotation (Qwen3).
        - `use_qkv_bias`, `use_output_bias`: whether the projections have biases.
        - `causal`, `sliding_window`, `logits_soft_cap`, `softmax_scale`, `dropout_rate`, `deterministic`,
            `platform`, `config`: as in [`ejkernel_eqx.FlashAttention`][]. The scale's default is $D^{-1/2}$. The
            platform is that of attention over pages as well (`"cuda"` has none: there the device decides).
        - `sinks`: whether each head has a learned logit that joins the softmax's denominator (GPT-OSS).
        - `output_gate`: whether the heads' outputs are multiplied by $\sigma$ of a projection of the input,
            an entry for each of the `H * V` (Qwen3-Next); the gate's rows are part of `q_proj`, head by head.
        - `dtype`: of the parameters; default float32 (float64 in JAX's 64-bit mode).
        - `compute_dtype`: what the layer computes in and gives: its input and the weights of its projections are cast to it. Default:
            what the two promote to, so that a float32 layer computes in float32 whatever it is given.
        - `key`: a PRNG key for the initial weights.
        """
        check_sizes(embed_dim=embed_dim, num_heads=num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = head_dim_of(embed_dim, num_heads, head_dim)
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        kv_embed_dim = embed_dim if kv_embed_dim is None else kv_embed_dim
        check_sizes(
            num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim, kv_embed_dim=kv_embed_dim
        )
        check_heads(num_heads, num_kv_heads, head_dim, rope)
        check_flags(
            qk_norm=qk_norm, use_qkv_bias=use_qkv_bias, use_output_bias=use_output_bias, causal=causal
        )
        check_flags(sinks=sinks, output_gate=output_gate, deterministic=deterministic)
        check_numbers(logits_soft_cap=logits_soft_cap, softmax_scale=softmax_scale, dropout_rate=dropout_rate)
        check_eps(qk_norm_eps=qk_norm_eps)
        q_dim = num_heads * (head_dim + v_head_dim if output_gate else head_dim)
        parts = Parts(key, 4, dtype, compute_dtype)
        self.q_proj = parts.linear(embed_dim, q_dim, use_qkv_bias)
        self.k_proj = parts.linear(kv_embed_dim, num_kv_heads * head_dim, use_qkv_bias)
        self.v_proj = parts.linear(kv_embed_dim, num_kv_heads * v_head_dim, use_qkv_bias)
        self.o_proj = parts.linear(num_heads * v_head_dim, embed_dim, use_output_bias)
        norm = lambda: eqx.nn.RMSNorm(head_dim, qk_norm_eps, use_bias=False, dtype=parts.dtype)
        self.q_norm, self.k_norm = (norm(), norm()) if qk_norm else (None, None)
        self.sinks = jnp.zeros(num_heads, parts.dtype) if sinks else None
        self.rope = rope
        self.attention = FlashAttention(
            causal,
            sliding_window,
            logits_soft_cap,
            softmax_scale,
            dropout_rate,
            deterministic=deterministic,
            platform=platform,
            config=config,
        )
        self.paged_attention = RaggedPagedAttention(
            sliding_window,
            logits_soft_cap,
            softmax_scale,
            append=True,
            platform=None if platform == "cuda" else platform,
        )
        self.embed_dim, self.kv_embed_dim = embed_dim, kv_embed_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.v_head_dim = head_dim, v_head_dim
        self.output_gate, self.compute_dtype = output_gate, parts.compute_dtype

    def init_cache(
        self, batch_shape: tuple[int, ...] | int, max_length: int, dtype: DTypeLike | None = None
    ) -> KVCache:
        """An empty `KVCache` that fits this layer, by default in the dtype it computes in, or else that of its weights."""
        kept: DTypeLike = self._stored_dtype() if dtype is None else dtype
        return KVCache.init(batch_shape, max_length, self.num_kv_heads, self.head_dim, self.v_head_dim, kept)

    def init_paged_cache(
        self,
        num_pages: int,
        page_size: int,
        *,
        batch_shape: tuple[int, ...] | int = (),
        dtype: DTypeLike | None = None,
        scales: str | None = None,
    ) -> PagedKVCache:
        """An empty `PagedKVCache` that fits this layer, by default in the dtype it computes in, or else that of its weights;
        `batch_shape` is that of stacked layers. The other arguments are those of `PagedKVCache.init`."""
        kept: DTypeLike = self._stored_dtype() if dtype is None else dtype
        sizes = (num_pages, page_size, self.num_kv_heads, self.head_dim, self.v_head_dim)
        return PagedKVCache.init(*sizes, batch_shape=batch_shape, dtype=kept, scales=scales)

    def _projections(self) -> tuple[Any, ...]:
        return self.q_proj, self.k_proj, self.v_proj, self.o_proj

    def _stored_dtype(self) -> Any:
        return stored_dtype_of(self.compute_dtype, (self.k_proj, self.v_proj))

    @overload
    def __call__(self, x: Array, cache: None = None, **given: Unpack[_Given]) -> Array: ...

    @overload
    def __call__(self, x: Array, cache: KVCache, **given: Unpack[_Given]) -> tuple[Array, KVCache]: ...

    @overload
    def __call__(
        self, x: Array, cache: PagedKVCache, *, batch: RaggedBatch, inference: bool | None = None
    ) -> tuple[Array, PagedKVCache]: ...

    @jax.named_scope("ejx.nn.MultiHeadAttention")
    def __call__(
        self,
        x: Array,
        cache: KVCache | PagedKVCache | None = None,
        *,
        kv_input: Array | None = None,
        positions: Array | None = None,
        padding_mask: Array | None = None,
        kv_padding_mask: Array | None = None,
        segment_ids: Array | None = None,
        mask: Array | Mask | None = None,
        bias: Array | None = None,
        key: Array | None = None,
        inference: bool | None = None,
        batch: RaggedBatch | None = None,
    ) -> Array | tuple[Array, KVCache | PagedKVCache]:
        """**Arguments:**

        - `x`: `[..., T, E]`, any number of leading batch dimensions.
        - `cache`: the keys and values before `x`; those of `x` are appended. A prompt at once and then token
            by token, rows at different positions: all give what the whole sequence at once gives. For causal layers.
        - `kv_input`: `[..., S, C]`, what keys and values are made from instead of `x` (cross attention).
        - `positions`: integers that broadcast to `[..., T]`, for the rotation; by default tokens are counted from the
            row's first real token, the cached ones included. They do not move the mask.
        - `padding_mask`: bool `[..., T]`, True for real tokens, which in each row are side by side (padding
            left, right or both). Padding is neither read (it may hold NaN) nor cached; the output there is of
            no meaning.
        - `kv_padding_mask`: bool `[..., S]`, the same for `kv_input`.
        - `segment_ids`: integers `[..., T]`: tokens see their own segment only; negative is padding. Without
            a cache.
        - `mask`, `bias`: as in [`ejkernel_eqx.FlashAttention`][], of `[..., H, T, S]` (never `[..., T, S]`: all its
            leading axes before the heads'); with a cache the key axis has its `max_length`.
        - `key`: a PRNG key, needed for dropout outside inference mode.
        - `inference`: overrides the flag that `equinox.nn.inference_mode` sets.
        - `batch`: for serving, an `ejkernel_eqx.RaggedBatch`: `x` is `[T, E]`, the new tokens of its sequences, and `cache` a
            `PagedKVCache`, into whose pages their keys and values are written before all is read. It need not be bound to
            the batch's tables; only one that was comes back bound. Padding may hold NaN; the output there is of no
            meaning. Donate the cache to have it written in place.

        **Returns:** `y`, an array of the shape of `x` in the dtype that the layer computes in; with a cache, the tuple
        `(y, cache)`. Raises `ValueError` for arguments that do not fit, as far as their values are known.
        """
        given = CallInputs(
            kv_input, positions, padding_mask, kv_padding_mask, segment_ids, mask, bias, key, inference
        )
        if batch is not None:
            return self._over_pages(*check_pages(self, x, cache, batch, given), batch)
        x, kv_input = check_call(self, x, cache, given)
        assert not isinstance(cache, PagedKVCache)  # goes with a batch alone
        inputs = [x] if kv_input is None else [x, kv_input]
        dtype = compute_dtype_of(self.compute_dtype, self._projections(), *inputs)
        x = clear(x.astype(dtype), padding_mask)
        if kv_input is None:
            source, rows = x, locate(cache, padding_mask, segment_ids)
        else:
            source = clear(kv_input.astype(dtype), kv_padding_mask)
            rows = locate_cross(x, source, padding_mask, kv_padding_mask)
        q, k, v, gate = self._heads(x, source, positions, 0 if rows.offset is None else rows.offset)
        if cache is not None:
            cache = cache.append(k, v, mask=padding_mask)
            k, v = cache.k, cache.v
        out = self.attention(
            q,
            k.astype(q.dtype),
            v.astype(q.dtype),
            bias=bias,
            mask=mask,
            segment_ids=rows.segment_ids,
            kv_segment_ids=rows.kv_segment_ids,
            kv_lengths=None if cache is None else cache.lengths,
            sinks=self.sinks,
            q_offset=None if cache is None else rows.offset,
            key=key,
            inference=inference,
        )
        assert not isinstance(out, tuple)  # no lse was asked for
        y = self._finish(out, gate)
        return y if cache is None else (y, cache)

    def _over_pages(self, x: Array, cache: PagedKVCache, batch: RaggedBatch) -> tuple[Array, PagedKVCache]:
        """The tokens of a batch, whose keys and values go to their pages first."""
        bound = cache.bind(batch)
        x = x.astype(compute_dtype_of(self.compute_dtype, self._projections(), x))
        if 0 in (x.shape[0], batch.lengths.shape[0]):
            return jnp.zeros_like(x), bound if cache.is_bound else cache
        x = clear(x, batch.is_real)
        q, k, v, gate = self._heads(x, x, batch.positions)
        starts = {"query_start_loc": batch.query_start_loc, "max_query_len": batch.max_query_len}
        out, new = self.paged_attention(q, bound, k, v, **starts, sinks=self.sinks)
        return self._finish(out, gate), new if cache.is_bound else new.unbind()

    def _heads(
        self, x: Array, source: Array, positions: Array | None, offset: ArrayLike = 0
    ) -> tuple[Array, Array, Array, Array | None]:
        """Queries, keys and values, `[..., H or K, D or V]`, and the gate `[..., H * V]`."""
        width = self.head_dim + self.v_head_dim if self.output_gate else self.head_dim
        q = split_heads(project("q_proj", self.q_proj, x, self.num_heads * width), self.num_heads)
        q, gate = jnp.split(q, [self.head_dim], axis=-1) if self.output_gate else (q, None)
        k = project("k_proj", self.k_proj, source, self.num_kv_heads * self.head_dim)
        v = project("v_proj", self.v_proj, source, self.num_kv_heads * self.v_head_dim)
        k, v = split_heads(k, self.num_kv_heads), split_heads(v, self.num_kv_heads)
        if self.q_norm is not None:
            q = project("q_norm", self.q_norm, q, self.head_dim)
        if self.k_norm is not None:
            k = project("k_norm", self.k_norm, k, self.head_dim)
        if self.rope is not None:
            q, k = self.rope(q, positions, offset=offset), self.rope(k, positions, offset=offset)
        return q, k, v, None if gate is None else merge_heads(gate)

    def _finish(self, out: Array, gate: Array | None) -> Array:
        y = merge_heads(out) if gate is None else merge_heads(out) * jax.nn.sigmoid(gate)
        return project("o_proj", self.o_proj, y, self.embed_dim)
