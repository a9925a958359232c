"""Multi-head attention with weights, as the published decoder models have it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload, TypedDict, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from ..attention import FlashAttention, Mask
from ..core.arguments import accumulator
from ..dispatch import PlatformLike
from ..paged import PagedKVCache, RaggedBatch, RaggedPagedAttention, UnifiedAttention
from ..paged.cache.pages import filled_dtype
from ..weights.attention import multi_head_attention
from ..weights.attention_configs import attention_options
from ..weights.view import Weights
from .alibi import read_alibi
from .arguments import check_eps, check_flags, check_numbers, check_sizes
from .attention_inputs import (
    CallInputs,
    check_call,
    check_heads,
    check_norm,
    check_pages,
    head_dim_of,
    read_biases,
    window_of,
)
from .attention_places import keys_of, locate, Places, places_of, places_over_pages
from .equinox_attention import options_of
from .kv_cache import KVCache
from .parts import Parts
from .projection import compute_dtype_of, project, stored_dtype_of
from .rolling_cache import RollingKVCache
from .rotary import RotaryChoice, RotaryEmbedding
from .tokens import clear, merge_heads, normed, split_heads
from .windows import check_scalar, read_window, with_window


class _Given(TypedDict, total=False):
    """What a call takes beside `x` and the cache."""

    kv_input: Array | None
    v_input: Array | None
    positions: Array | None
    padding_mask: Array | None
    kv_padding_mask: Array | None
    segment_ids: Array | None
    cu_seqlens: Array | None
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
    v_proj: eqx.nn.Linear  # [K * V, C]; with `v_embed_dim` [K * V, Cv]
    o_proj: eqx.nn.Linear  # [E, H * V]; with `output_size` [O, H * V]
    q_norm: eqx.nn.RMSNorm | None  # [D]; of all heads together [H * D]
    k_norm: eqx.nn.RMSNorm | None  # [D]; of all heads together [K * D]
    sinks: Array | None  # [H]
    sliding_window: Array | None  # int32 []: a window that is a value; a static one is in `attention`
    rope: RotaryEmbedding | RotaryChoice | None
    attention: FlashAttention
    paged_attention: RaggedPagedAttention | UnifiedAttention
    embed_dim: int = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)
    kv_embed_dim: int = eqx.field(static=True)
    v_embed_dim: int = eqx.field(static=True)
    output_size: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    v_head_dim: int = eqx.field(static=True)
    norm_over_all: bool = eqx.field(static=True)
    alibi: tuple[float, ...] | None = eqx.field(static=True)
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
        v_embed_dim: int | None = None,
        output_size: int | None = None,
        rope: RotaryEmbedding | RotaryChoice | None = None,
        qk_norm: bool | Literal["heads", "all"] = False,
        qk_norm_eps: float = 1e-6,
        use_qkv_bias: bool | tuple[bool, bool, bool] = False,
        use_output_bias: bool = False,
        alibi: bool | Sequence[float] = False,
        causal: bool = True,
        sliding_window: int | tuple[int | None, int | None] | Array | None = None,
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
        - `v_embed_dim`: features of `v_input`, if values have an input of their own; default `C`.
        - `output_size`: features `O` of the output; default `E`.
        - `rope`: the rotation of queries and keys; default none.
        - `qk_norm`, `qk_norm_eps`: an RMS norm of queries and of keys before the rotation. `True` or `"heads"`: of each head, with a
            learned weight `[D]` (Qwen3). `"all"`: of the features of all heads together, with weights `[H * D]` and `[K * D]` (OLMo-2).
        - `use_qkv_bias`, `use_output_bias`: whether the projections have biases; three flags are for queries, keys and values.
        - `alibi`: linear biases (Press et al. 2022, arXiv:2108.12409), in a causal layer: `True` for the published slopes
            ([`ejkernel_eqx.nn.alibi_slopes`][]), or one slope for each head. They are no parameters.
        - `causal`, `sliding_window`, `logits_soft_cap`, `softmax_scale`, `dropout_rate`, `deterministic`,
            `platform`, `config`: as in [`ejkernel_eqx.FlashAttention`][]. The scale's default is $D^{-1/2}$. The
            platform is that of attention over pages as well (`"cuda"` has none: there the device decides). A `sliding_window` may also be
            an integer array `[]`, negative for no window: a leaf of the layer that is not trained, so that layers with different windows,
            built under `equinox.filter_vmap`, are scanned over.
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
        v_embed_dim = kv_embed_dim if v_embed_dim is None else v_embed_dim
        output_size = embed_dim if output_size is None else output_size
        check_sizes(num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim)
        check_sizes(kv_embed_dim=kv_embed_dim, v_embed_dim=v_embed_dim, output_size=output_size)
        check_heads(num_heads, num_kv_heads, head_dim, rope)
        self.norm_over_all = check_norm(qk_norm)
        q_bias, k_bias, v_bias = read_biases(use_qkv_bias)
        check_flags(use_output_bias=use_output_bias, causal=causal)
        self.alibi = read_alibi(alibi, num_heads, causal)
        check_flags(sinks=sinks, output_gate=output_gate, deterministic=deterministic)
        check_numbers(logits_soft_cap=logits_soft_cap, softmax_scale=softmax_scale, dropout_rate=dropout_rate)
        check_eps(qk_norm_eps=qk_norm_eps)
        q_dim = num_heads * (head_dim + v_head_dim if output_gate else head_dim)
        parts = Parts(key, 4, dtype, compute_dtype)
        self.q_proj = parts.linear(embed_dim, q_dim, q_bias)
        self.k_proj = parts.linear(kv_embed_dim, num_kv_heads * head_dim, k_bias)
        self.v_proj = parts.linear(v_embed_dim, num_kv_heads * v_head_dim, v_bias)
        self.o_proj = parts.linear(num_heads * v_head_dim, output_size, use_output_bias)
        norm = lambda heads: eqx.nn.RMSNorm(
            (heads if self.norm_over_all else 1) * head_dim, qk_norm_eps, use_bias=False, dtype=parts.dtype
        )
        self.q_norm, self.k_norm = (norm(num_heads), norm(num_kv_heads)) if qk_norm else (None, None)
        self.sinks = jnp.zeros(num_heads, parts.dtype) if sinks else None
        self.rope = rope
        self.sliding_window = read_window(sliding_window, causal)
        sliding_window = None if isinstance(sliding_window, Array | np.ndarray) else sliding_window
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
        paged: Any = (sliding_window, logits_soft_cap, softmax_scale)
        paged_platform = None if platform == "cuda" else platform
        if self.alibi is None:
            self.paged_attention = RaggedPagedAttention(*paged, append=True, platform=paged_platform)
        else:
            self.paged_attention = UnifiedAttention(*paged, platform=paged_platform)
        self.embed_dim, self.output_size = embed_dim, output_size
        self.kv_embed_dim, self.v_embed_dim = kv_embed_dim, v_embed_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.v_head_dim = head_dim, v_head_dim
        self.output_gate, self.compute_dtype = output_gate, parts.compute_dtype

    @classmethod
    def from_equinox(
        cls, attention: eqx.nn.MultiheadAttention, *, platform: str | None = None
    ) -> "MultiHeadAttention":
        """The layer that gives what an `equinox.nn.MultiheadAttention` gives, with its projections: `attention(query, key_, value, mask)` is
        `layer(query, kv_input=key_, v_input=value, mask=mask)`. There are two differences. A query whose keys are all masked gives the
        output bias here, and the mean of all values there; and dropout draws other numbers."""
        layer = cls(**options_of(attention), platform=platform, key=jax.random.key(0))
        parts = [getattr(attention, f"{name}_proj") for name in ("query", "key", "value", "output")]
        layer = eqx.tree_at(lambda m: [m.q_proj, m.k_proj, m.v_proj, m.o_proj], layer, parts)
        return eqx.nn.inference_mode(layer, attention.dropout.inference)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], /, *, layer_index: int = 0, key: Array, **options: Any
    ) -> "MultiHeadAttention":
        """The layer of a published model, with initial weights: `ejkernel_eqx.load_published` fills it. Known are Llama, Mistral, Qwen2, Qwen3,
        Gemma, Gemma 2 and 3, GPT-OSS, OLMo-2, Phi-3, GPT-NeoX, GPT-2, and the softmax layers of Qwen3-Next, Qwen3.5 and MiniMax.

        **Arguments:**

        - `config`: the dictionary of the model's `config.json`, or `config.to_dict()` of `transformers`.
        - `layer_index`: which layer of the model, from 0.
        - `key`: a PRNG key for the initial weights.
        - `options`: more arguments of the constructor, `dtype` say; they take precedence over what the configuration says.

        Raises `ValueError` for a model or an option that is not known here.
        """
        found: dict[str, Any] = {**attention_options(config, layer_index), **options}
        return cls(**found, key=key)

    def _published(self, weights: Weights) -> "MultiHeadAttention":
        return multi_head_attention(self, weights)

    @overload
    def init_cache(
        self,
        batch_shape: tuple[int, ...] | int,
        max_length: int,
        dtype: DTypeLike | None = None,
        *,
        rolling: Literal[False] = False,
    ) -> KVCache: ...

    @overload
    def init_cache(
        self,
        batch_shape: tuple[int, ...] | int,
        max_length: int | None = None,
        dtype: DTypeLike | None = None,
        *,
        rolling: Literal[True],
    ) -> RollingKVCache: ...

    def init_cache(
        self,
        batch_shape: tuple[int, ...] | int,
        max_length: int | None = None,
        dtype: DTypeLike | None = None,
        *,
        rolling: bool = False,
    ) -> KVCache | RollingKVCache:
        """An empty `KVCache` that fits this layer, by default in the dtype it computes in, or else that of its weights. With `rolling`, in a
        layer with a static sliding window, a `RollingKVCache`: it keeps as many tokens as the window has and is never full, so `max_length`
        does not matter."""
        check_flags(rolling=rolling)
        kept: DTypeLike = self._stored_dtype() if dtype is None else dtype
        sizes = (self.num_kv_heads, self.head_dim, self.v_head_dim, kept)
        if rolling:
            return RollingKVCache.init(batch_shape, window_of(self), *sizes)
        check_sizes(max_length=max_length)
        assert max_length is not None
        return KVCache.init(batch_shape, max_length, *sizes)

    def init_paged_cache(
        self,
        num_pages: int,
        page_size: int,
        *,
        batch_shape: tuple[int, ...] | int = (),
        dtype: DTypeLike | tuple[DTypeLike | None, DTypeLike | None] | None = None,
        scales: str | None = None,
    ) -> PagedKVCache:
        """An empty `PagedKVCache` that fits this layer, by default in the dtype it computes in, or else that of its weights, as is a `None`
        in a pair for keys and values; `batch_shape` is that of stacked layers. The other arguments are those of `PagedKVCache.init`."""
        kept = filled_dtype(dtype, self._stored_dtype())
        sizes = (num_pages, page_size, self.num_kv_heads, self.head_dim, self.v_head_dim)
        return PagedKVCache.init(*sizes, batch_shape=batch_shape, dtype=kept, scales=scales)

    def init_pool(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        batch_shape: tuple[int, ...] | int = (),
        dtype: Any = None,
        scales: str | None = None,
        num_draft_tokens: int = 0,
    ) -> PagedKVCache:
        """What a server keeps for this layer, by the name and arguments that recurrent layers have too: `init_paged_cache(num_pages, page_size,
        batch_shape=..., dtype=..., scales=...)`. What is said of states (`num_slots`, `num_draft_tokens`) is not used: tokens in pages are
        taken back by shorter lengths."""
        return self.init_paged_cache(
            num_pages, page_size, batch_shape=batch_shape, dtype=dtype, scales=scales
        )

    def _projections(self) -> tuple[Any, ...]:
        return self.q_proj, self.k_proj, self.v_proj, self.o_proj

    def _stored_dtype(self) -> Any:
        return stored_dtype_of(self.compute_dtype, (self.k_proj, self.v_proj))

    @overload
    def __call__(
        self, x: Array, cache: None = None, *, return_lse: Literal[False] = False, **given: Unpack[_Given]
    ) -> Array: ...

    @overload
    def __call__(
        self, x: Array, cache: KVCache, *, return_lse: Literal[False] = False, **given: Unpack[_Given]
    ) -> tuple[Array, KVCache]: ...

    @overload
    def __call__(
        self, x: Array, cache: RollingKVCache, *, return_lse: Literal[False] = False, **given: Unpack[_Given]
    ) -> tuple[Array, RollingKVCache]: ...

    @overload
    def __call__(
        self,
        x: Array,
        cache: PagedKVCache,
        *,
        batch: RaggedBatch,
        positions: Array | None = None,
        return_lse: Literal[False] = False,
        inference: bool | None = None,
    ) -> tuple[Array, PagedKVCache]: ...

    @overload
    def __call__(
        self,
        x: Array,
        cache: Any = None,
        *,
        return_lse: bool,
        batch: RaggedBatch | None = None,
        **given: Unpack[_Given],
    ) -> Any: ...

    @jax.named_scope("ejx.nn.MultiHeadAttention")
    def __call__(
        self,
        x: Array,
        cache: KVCache | RollingKVCache | PagedKVCache | None = None,
        *,
        kv_input: Array | None = None,
        v_input: Array | None = None,
        positions: Array | None = None,
        padding_mask: Array | None = None,
        kv_padding_mask: Array | None = None,
        segment_ids: Array | None = None,
        cu_seqlens: Array | None = None,
        mask: Array | Mask | None = None,
        bias: Array | None = None,
        key: Array | None = None,
        inference: bool | None = None,
        batch: RaggedBatch | None = None,
        return_lse: bool = False,
    ) -> Any:  # one array to three values, as `cache` and `return_lse` say
        """**Arguments:**

        - `x`: `[..., T, E]`, any number of leading batch dimensions.
        - `cache`: the keys and values before `x`; those of `x` are appended. A prompt at once and then token
            by token, rows at different positions: all give what the whole sequence at once gives. For causal layers. A
            `RollingKVCache` keeps the window alone.
        - `kv_input`: `[..., S, C]`, what keys and values are made from instead of `x` (cross attention).
        - `v_input`: `[..., S, Cv]`, together with `kv_input`: what values are made from, which then makes keys alone.
        - `positions`: integers that broadcast to `[..., T]`, for the rotation; by default tokens are counted from the
            row's first real token, the cached ones included. They do not move the mask. A rotation with `mrope_section` takes `[axes, ..., T]`.
        - `padding_mask`: bool `[..., T]`, True for real tokens, which in each row are side by side (padding
            left, right or both). Padding is neither read (it may hold NaN) nor cached; the output there is of
            no meaning.
        - `kv_padding_mask`: bool `[..., S]`, the same for `kv_input`.
        - `segment_ids`: integers `[..., T]`: tokens see their own segment only; negative is padding. Without
            a cache.
        - `cu_seqlens`: offsets `[N + 1]` of packed sequences (`x` is `[T, E]` then), in the place of `padding_mask`, `segment_ids` and a
            cache: each sequence sees itself only, and its positions count from 0; tokens past the last offset are padding.
        - `mask`, `bias`: as in [`ejkernel_eqx.FlashAttention`][], of `[..., H, T, S]` (never `[..., T, S]`: all its
            leading axes before the heads'); with a cache the key axis has its `max_length`.
        - `key`: a PRNG key, needed for dropout outside inference mode.
        - `inference`: overrides the flag that `equinox.nn.inference_mode` sets.
        - `batch`: for serving, an `ejkernel_eqx.RaggedBatch`: `x` is `[T, E]`, the new tokens of its sequences, and `cache` a
            `PagedKVCache`, into whose pages their keys and values are written before all is read. It need not be bound to
            the batch's tables; only one that was comes back bound. Padding may hold NaN; outputs there are undefined.
            Donate the cache to have it written in place. `positions` go with it only where the rotation has `mrope_section`.
        - `return_lse`: also return the log-sum-exp of the scores, `[..., T, H]`, as in [`ejkernel_eqx.FlashAttention`][].

        **Returns:** `y`, `[..., T, E]` (or `O` features) in the dtype that the layer computes in; with a cache, the tuple `(y, cache)`;
        with `return_lse` the log-sum-exp comes last: `(y, lse)` or `(y, cache, lse)`.

        Raises `ValueError` for arguments that do not fit, as far as their values are known.
        """
        given = CallInputs(
            kv_input,
            v_input,
            positions,
            padding_mask,
            kv_padding_mask,
            segment_ids,
            cu_seqlens,
            mask,
            bias,
            key,
            inference,
        )
        check_flags(return_lse=return_lse)
        check_scalar(self.sliding_window)
        if batch is not None:
            x, cache = check_pages(self, x, cache, batch, given)
            return self._over_pages(x, cache, batch, positions, return_lse)
        given, x = check_call(self, x, cache, given)
        assert not isinstance(cache, PagedKVCache)  # goes with a batch alone
        rows = locate(x, cache, given)
        inputs = [a for a in (x, given.kv_input, given.v_input) if a is not None]
        dtype = compute_dtype_of(self.compute_dtype, self._projections(), *inputs)
        x = clear(x.astype(dtype), rows.real)
        source = x if given.kv_input is None else clear(given.kv_input.astype(dtype), kv_padding_mask)
        values = source if given.v_input is None else clear(given.v_input.astype(dtype), kv_padding_mask)
        q, k, v, gate = self._heads(x, source, values, places_of(self.rope, positions, rows))
        cache, keys = keys_of(cache, k, v, rows)
        out: Any = self.attention(
            q,
            keys.k.astype(q.dtype),
            keys.v.astype(q.dtype),
            bias=bias,
            mask=with_window(self.sliding_window, mask),
            **keys.how,
            sinks=self.sinks,
            alibi_slopes=self._slopes(q),
            key=key,
            inference=inference,
            return_lse=return_lse,
        )
        return self._results(out, gate, cache, return_lse)

    def _over_pages(
        self, x: Array, cache: PagedKVCache, batch: RaggedBatch, positions: Array | None, return_lse: bool
    ) -> Any:
        """The tokens of a batch, whose keys and values go to their pages first."""
        bound = cache.bind(batch)
        x = x.astype(compute_dtype_of(self.compute_dtype, self._projections(), x))
        if 0 in (x.shape[0], batch.lengths.shape[0]):
            y = jnp.zeros((x.shape[0], self.output_size), x.dtype)
            lse = jnp.full((x.shape[0], self.num_heads), -jnp.inf, accumulator(x.dtype))
            new = bound if cache.is_bound else cache
            return (y, new, lse) if return_lse else (y, new)
        x = clear(x, batch.is_real)
        q, k, v, gate = self._heads(x, x, x, places_over_pages(self.rope, batch, positions))
        given: Any = {
            "query_start_loc": batch.query_start_loc,
            "max_query_len": batch.max_query_len,
            "sinks": self.sinks,
            "window": self.sliding_window,
            "return_lse": return_lse,
        }
        if isinstance(self.paged_attention, UnifiedAttention):
            new = bound.append(k, v, batch.slots)
            out = self.paged_attention(q, new, **given, alibi_slopes=self._slopes(q))
        else:
            *out, new = self.paged_attention(q, bound, k, v, **given)
            out = out if return_lse else out[0]
        return self._results(out, gate, new if cache.is_bound else new.unbind(), return_lse)

    def _results(self, out: Any, gate: Array | None, cache: Any, return_lse: bool) -> Any:
        """What a call returns, of an operation's output, or of that and its `lse`."""
        out, *lse = out if return_lse else (out,)
        y = self._finish(out, gate)
        results = (y, *([] if cache is None else [cache]), *lse)
        return results if len(results) > 1 else y

    def _slopes(self, q: Array) -> Array | None:
        return None if self.alibi is None else jnp.asarray(self.alibi, accumulator(q.dtype))

    def _heads(
        self, x: Array, source: Array, values: Array, places: Places
    ) -> tuple[Array, Array, Array, Array | None]:
        """Queries, keys and values, `[..., H or K, D or V]`, and the gate `[..., H * V]`."""
        width = self.head_dim + self.v_head_dim if self.output_gate else self.head_dim
        q = split_heads(project("q_proj", self.q_proj, x, self.num_heads * width), self.num_heads)
        q, gate = jnp.split(q, [self.head_dim], axis=-1) if self.output_gate else (q, None)
        k = project("k_proj", self.k_proj, source, self.num_kv_heads * self.head_dim)
        v = project("v_proj", self.v_proj, values, self.num_kv_heads * self.v_head_dim)
        k, v = split_heads(k, self.num_kv_heads), split_heads(v, self.num_kv_heads)
        q, k = (
            normed(f"{name}_norm", norm, x, self.norm_over_all)
            for name, norm, x in (("q", self.q_norm, q), ("k", self.k_norm, k))
        )
        q, k = places.turn(self.rope, q), places.turn(self.rope, k)
        return q, k, v, None if gate is None else merge_heads(gate)

    def _finish(self, out: Array, gate: Array | None) -> Array:
        y = merge_heads(out) if gate is None else merge_heads(out) * jax.nn.sigmoid(gate)
        return project("o_proj", self.o_proj, y, self.output_size)
