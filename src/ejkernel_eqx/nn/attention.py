"""`MultiHeadAttention`: the attention layer of the published decoder models."""

from collections.abc import Sequence
from typing import Any, Literal, overload, TYPE_CHECKING, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from .._jitted import compiled_call
from .._shapes import AnyArray, Bool, Float, Int
from ..attention import FlashAttention, Mask, RingAttention
from ..core.arguments import accumulator
from ..dispatch import PlatformLike
from ..matmul import Matmul
from ..paged import PagedKVCache, RaggedBatch, RaggedPagedAttention, UnifiedAttention
from ..paged.cache.pages import filled_dtype
from ..rotary import RotaryChoice, RotaryEmbedding
from ..rotary.heads import RotaryHeads
from ..weights.attention import multi_head_attention
from ..weights.attention_configs import attention_options
from .alibi import read_alibi
from .arguments import check_flags, checked, read_sizes
from .attention_inputs import (
    CallInputs,
    check_call,
    check_chunk,
    check_forget_gate,
    check_heads,
    check_keys_as_values,
    check_norm,
    check_pages,
    head_dim_of,
    read_biases,
    read_temperature,
    window_of,
)
from .attention_places import keys_of, locate, Places, places_over_pages
from .equinox_attention import options_of
from .few_rows import added, Block, check_block, Norm, plain_norms, projected, with_residual
from .few_rows import normed as normed_input
from .kv_cache import KVCache, marked
from .paged_layer import over_pages, PagedLayer
from .parts import Parts
from .projection import compute_dtype_of, project, stored_dtype_of
from .published import Published
from .rolling_cache import RollingKVCache
from .signatures import AnyInputs, Cache, Inputs, Lse, Output, PageInputs, Pages, RowCache, Tokens
from .split_attention import attention_over, on_whole_rows, places_over
from .tokens import clear, merge_heads, normed, split_heads
from .windows import check_scalar, read_window, with_chunks, with_window


class MultiHeadAttention(PagedLayer[PagedKVCache], Published):
    r"""Multi-head attention (Vaswani et al. 2017, arXiv:1706.03762) with grouped keys and values (Ainslie et
    al. 2023, arXiv:2305.13245):

    $$q = \mathrm{rope}(\mathrm{norm}(x W_q^\top)),\quad k = \mathrm{rope}(\mathrm{norm}(x W_k^\top)),\quad
      v = x W_v^\top,\quad
      y = \big(\sigma(g) \odot \mathrm{FlashAttention}(q, k, v)\big) W_o^\top$$

    where the rotation, the norms and the gate $g$ are optional, as are biases, sinks, a soft cap, a window and forget gates.
    Parameters have the names and shapes (`[out, in]`) of the published model code, so published weights load by
    renaming. The guide "Layers" lists the constructor calls for Llama, Mistral, Gemma-2, Qwen3 and GPT-OSS.
    `from_config` supports the softmax layers of the models in the guide "Published models", besides GPT-NeoX and GPT-2.
    """

    q_proj: eqx.nn.Linear  # [H * D, E]; with a gate [H * (D + V), E], each head's query and then its gate
    k_proj: eqx.nn.Linear  # [K * D, C]
    v_proj: eqx.nn.Linear | None  # [K * V, C]; with `v_embed_dim` [K * V, Cv]
    o_proj: eqx.nn.Linear  # [O, H * V]
    q_norm: eqx.nn.RMSNorm | None  # [D]; over all heads [H * D]
    k_norm: eqx.nn.RMSNorm | None  # [D]; over all heads [K * D]
    v_norm: eqx.nn.RMSNorm | None  # without weights
    sinks: Array | None  # [H]
    fgate_proj: eqx.nn.Linear | None  # [H, E]
    sliding_window: Array | None  # int32 []: a window given as an array; a static one is in `attention`
    rope: RotaryEmbedding | RotaryChoice | None
    attention: FlashAttention | RingAttention  # the latter for tokens that are split over a mesh axis
    paged_attention: RaggedPagedAttention | UnifiedAttention
    matmul: Matmul  # of few tokens in a block
    rotary_heads: RotaryHeads | None  # as `matmul`; None without a rotation
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
    temperature: tuple[float, int, int] | None = eqx.field(static=True)
    chunk_size: int | None = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    @checked
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
        qk_norm: bool | Literal["heads", "all", "unit"] = False,
        qk_norm_eps: float = 1e-6,
        use_qkv_bias: bool | tuple[bool, bool, bool] = False,
        use_output_bias: bool = False,
        alibi: bool | Sequence[float] = False,
        causal: bool = True,
        sliding_window: int | tuple[int | None, int | None] | Int[AnyArray, ""] | None = None,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        sinks: bool = False,
        output_gate: bool = False,
        forget_gate: bool = False,
        temperature: tuple[float, int, int] | None = None,
        v_norm: bool = False,
        keys_as_values: bool = False,
        chunk_size: int | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        sequence_axis: str | None = None,
        token_order: Literal["contiguous", "zigzag"] = "contiguous",
        platform: PlatformLike | None = None,
        config: Any = None,
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        key: PRNGKeyArray,
    ):
        r"""**Arguments:**

        - `embed_dim`: features `E` of the input.
        - `num_heads`: number of query heads, `H`.
        - `num_kv_heads`: number of key and value heads `K`, a divisor of `H`; default `H`. 1 is multi-query attention.
        - `head_dim`: features `D` of a query or key head; default `embed_dim // num_heads`.
        - `v_head_dim`: features `V` of a value head; default `D`.
        - `kv_embed_dim`: features `C` of `kv_input`, for cross attention; default `E`.
        - `v_embed_dim`: features `Cv` of `v_input`, for values computed from a separate input; default `C`.
        - `output_size`: features `O` of the output; default `E`.
        - `rope`: rotary embedding of queries and keys; default none.
        - `qk_norm`: RMS norm of queries and keys before the rotation. `True` or `"heads"`: each head separately, with learned weights `[D]`
            (Qwen3). `"all"`: all heads together, with learned weights `[H * D]` and `[K * D]` (OLMo-2). `"unit"`: each head, without weights
            (Llama 4).
        - `qk_norm_eps`: added to the mean square.
        - `use_qkv_bias`, `use_output_bias`: whether the projections have biases. Three flags set queries, keys and values separately.
        - `alibi`: linear biases (Press et al. 2022, arXiv:2108.12409), for causal layers. `True` uses the published slopes
            ([`ejkernel_eqx.nn.alibi_slopes`][]); a sequence gives one slope per head. Slopes are not trained.
        - `causal`, `sliding_window`, `logits_soft_cap`, `softmax_scale`, `dropout_rate`, `deterministic`, `platform`, `config`: as in
            [`ejkernel_eqx.FlashAttention`][]. The platform also applies to attention over pages, except `"cuda"`, which has no paged kernel:
            there the choice is by device. `sliding_window` may also be an integer array `[]`, negative for no window. It is then
            an untrained leaf of the layer, so layers with different windows can be stacked with `equinox.filter_vmap` and scanned over.
        - `sinks`: whether each head has a learned logit that joins the denominator of the softmax (GPT-OSS).
        - `output_gate`: whether the outputs of the heads are multiplied elementwise by $\sigma(g)$, with $g$ a projection of the input to
            `H * V` features (Qwen3-Next). The rows of the gate are part of `q_proj`, head by head.
        - `forget_gate`: whether each token multiplies the weights of all earlier keys by a gate per query head, the sigmoid of `fgate_proj`
            (Forgetting Transformer, Lin et al. 2025, arXiv:2503.02130; `log_forget` of [`ejkernel_eqx.FlashAttention`][]). For causal layers without
            `alibi` and `sequence_axis`. Caches of all kinds hold the gates.
        - `temperature`: $(s, n, o)$, by which queries at position $p$ are multiplied by $1 + s \ln(1 + \lfloor (p + o) / n \rfloor)$ after the
            rotation (Ministral 3, Llama 4); default none.
        - `v_norm`: whether the values of each head are divided by their root mean square (Gemma 4), with `qk_norm_eps`.
        - `keys_as_values`: whether values are the projected keys, before their norm and rotation; `v_proj` is then `None` (Gemma 4).
        - `chunk_size`: tokens of a row see those of their own chunk of so many positions alone (Llama 4), in causal layers without a window. Pages
            then hold at most one chunk of each text.
        - `sequence_axis`: a mesh axis that the tokens are split over. Calls without a cache then run [`ejkernel_eqx.RingAttention`][]: under `jit` on
            whole rows, inside `jax.shard_map` on one device's tokens. Those with a cache are as without it.
        - `token_order`: the `order` of `RingAttention`, with `sequence_axis`. In zigzag order `padding_mask`, `segment_ids`, `positions`, `mask` and
            `bias` are in the order of the tokens. Default positions are those in time; they need a mesh that is known while tracing: an explicit
            one, `jax.set_mesh`, or `jax.shard_map`.
        - `dtype`: of the parameters; default float32 (float64 in JAX's 64-bit mode).
        - `compute_dtype`: dtype of the computation and the output; inputs and projection weights are cast to it. Default: the promoted dtype
            of the two, so a float32 layer computes in float32 for any input.
        - `key`: PRNG key for the initial weights.
        """
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = head_dim_of(embed_dim, num_heads, head_dim)
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        kv_embed_dim = embed_dim if kv_embed_dim is None else kv_embed_dim
        v_embed_dim = kv_embed_dim if v_embed_dim is None else v_embed_dim
        output_size = embed_dim if output_size is None else output_size
        check_heads(num_heads, num_kv_heads, head_dim, rope)
        self.norm_over_all = check_norm(qk_norm)
        q_bias, k_bias, v_bias = read_biases(use_qkv_bias)
        self.alibi = read_alibi(alibi, num_heads, causal)
        q_dim = num_heads * (head_dim + v_head_dim if output_gate else head_dim)
        check_forget_gate(forget_gate, causal and not alibi and sequence_axis is None)
        parts = Parts(key, 5 if forget_gate else 4, dtype, compute_dtype)
        self.q_proj = parts.linear(embed_dim, q_dim, q_bias)
        self.k_proj = parts.linear(kv_embed_dim, num_kv_heads * head_dim, k_bias)
        check_keys_as_values(keys_as_values, (head_dim, kv_embed_dim), (v_head_dim, v_embed_dim))
        if keys_as_values:
            parts.left_out()
        own_values = None if keys_as_values else parts.linear(v_embed_dim, num_kv_heads * v_head_dim, v_bias)
        self.v_proj = own_values
        self.o_proj = parts.linear(num_heads * v_head_dim, output_size, use_output_bias)
        self.fgate_proj = parts.linear(embed_dim, num_heads, True) if forget_gate else None
        norm = lambda heads: eqx.nn.RMSNorm(
            (heads if self.norm_over_all else 1) * head_dim,
            qk_norm_eps,
            use_weight=qk_norm != "unit",
            use_bias=False,
            dtype=parts.dtype,
        )
        self.q_norm, self.k_norm = (norm(num_heads), norm(num_kv_heads)) if qk_norm else (None, None)
        unweighted = eqx.nn.RMSNorm(v_head_dim, qk_norm_eps, use_weight=False, use_bias=False)
        self.v_norm = unweighted if v_norm else None
        self.sinks = jnp.zeros(num_heads, parts.dtype) if sinks else None
        self.rope = rope
        self.sliding_window = read_window(sliding_window, causal)
        check_chunk(chunk_size, causal and sliding_window is None and sequence_axis is None)
        self.chunk_size = chunk_size
        sliding_window = None if isinstance(sliding_window, Array | np.ndarray) else sliding_window
        limits: Any = (sliding_window, logits_soft_cap, softmax_scale)
        kernel: Any = {"deterministic": deterministic, "platform": platform, "config": config}
        self.attention = attention_over(sequence_axis, token_order, causal, *limits, dropout_rate, **kernel)
        paged_platform = None if platform == "cuda" else platform
        self.matmul = Matmul(platform=paged_platform)
        turns = isinstance(rope, RotaryEmbedding)
        self.rotary_heads = RotaryHeads(rope.interleaved, platform=paged_platform) if turns else None
        if self.alibi is None and not forget_gate:
            self.paged_attention = RaggedPagedAttention(*limits, append=True, platform=paged_platform)
        else:
            self.paged_attention = UnifiedAttention(*limits, platform=paged_platform)
        self.embed_dim, self.output_size = embed_dim, output_size
        self.kv_embed_dim, self.v_embed_dim = kv_embed_dim, v_embed_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.v_head_dim = head_dim, v_head_dim
        self.output_gate, self.compute_dtype = output_gate, parts.compute_dtype
        self.temperature = read_temperature(temperature, rope, sequence_axis)

    @classmethod
    def from_equinox(
        cls, attention: eqx.nn.MultiheadAttention, *, platform: PlatformLike | None = None
    ) -> "MultiHeadAttention":
        """Converts an `equinox.nn.MultiheadAttention`, whose projections are shared: `attention(query, key_, value, mask)` becomes
        `layer(query, kv_input=key_, v_input=value, mask=mask)`. Results are equal with two exceptions. For a query whose keys are all
        masked, this layer returns the output bias, and Equinox the (projected) mean of all values. Dropout draws different random numbers.
        """
        layer = cls(**options_of(attention), platform=platform, key=jax.random.key(0))
        parts = [getattr(attention, f"{name}_proj") for name in ("query", "key", "value", "output")]
        layer = eqx.tree_at(lambda m: [m.q_proj, m.k_proj, m.v_proj, m.o_proj], layer, parts)
        return eqx.nn.inference_mode(layer, attention.dropout.inference)

    _options_of = staticmethod(attention_options)
    _published = multi_head_attention

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
        """Returns an empty [`KVCache`][ejkernel_eqx.nn.KVCache] for this layer.

        **Arguments:**

        - `batch_shape`: leading axes; `()` for one sequence, an integer `B` for `(B,)`.
        - `max_length`: capacity of each row, in tokens.
        - `dtype`: of keys and values; default `compute_dtype`, or else the dtype of the weights.
        - `rolling`: return a [`RollingKVCache`][ejkernel_eqx.nn.RollingKVCache] instead, for layers with a static `sliding_window`. It holds
            one window of tokens and is never full, so `max_length` is not used.
        """
        check_flags(rolling=rolling)
        kept: DTypeLike = self._stored_dtype() if dtype is None else dtype
        sizes = (self.num_kv_heads, self.head_dim, self.v_head_dim, kept)
        gates = None if self.fgate_proj is None else self.num_heads
        if rolling:
            return RollingKVCache.init(batch_shape, window_of(self), *sizes, num_gates=gates)
        (max_length,) = read_sizes(max_length=max_length)
        assert max_length is not None
        return KVCache.init(batch_shape, max_length, *sizes, num_gates=gates)

    def init_paged_cache(
        self,
        num_pages: int,
        page_size: int,
        *,
        batch_shape: tuple[int, ...] | int = (),
        dtype: DTypeLike | tuple[DTypeLike | None, DTypeLike | None] | None = None,
        scales: str | None = None,
    ) -> PagedKVCache:
        """Returns an empty [`PagedKVCache`][ejkernel_eqx.PagedKVCache] for this layer.

        **Arguments:**

        - `num_pages`, `page_size`, `scales`: as in `PagedKVCache.init`.
        - `batch_shape`: leading axes of stacked layers.
        - `dtype`: of the pages, or a pair for keys and values. The default, also for `None` in a pair, is
            `compute_dtype`, or else the dtype of the weights.
        """
        kept = filled_dtype(dtype, self._stored_dtype())
        sizes = (num_pages, page_size, self.num_kv_heads, self.head_dim, self.v_head_dim)
        gates = None if self.fgate_proj is None else self.num_heads
        return PagedKVCache.init(*sizes, batch_shape=batch_shape, dtype=kept, scales=scales, num_gates=gates)

    def _stored_dtype(self) -> Any:
        return stored_dtype_of(self.compute_dtype, (self.k_proj, self.v_proj))

    if TYPE_CHECKING:

        @overload
        def __call__(
            self, x: Tokens, cache: None = None, *, return_lse: Literal[False] = False, **rows: Unpack[Inputs]
        ) -> Output: ...

        @overload
        def __call__(
            self, x: Tokens, cache: RowCache, *, return_lse: Literal[False] = False, **rows: Unpack[Inputs]
        ) -> tuple[Output, RowCache]: ...

        @overload
        def __call__(
            self, x: Tokens, cache: Pages, *, return_lse: Literal[False] = False, **rows: Unpack[PageInputs]
        ) -> tuple[Output, Pages]: ...

        @overload
        def __call__(
            self, x: Tokens, cache: None = None, *, return_lse: Literal[True], **rows: Unpack[Inputs]
        ) -> tuple[Output, Lse]: ...

        @overload
        def __call__(
            self, x: Tokens, cache: RowCache, *, return_lse: Literal[True], **rows: Unpack[Inputs]
        ) -> tuple[Output, RowCache, Lse]: ...

        @overload
        def __call__(
            self, x: Tokens, cache: Pages, *, return_lse: Literal[True], **rows: Unpack[PageInputs]
        ) -> tuple[Output, Pages, Lse]: ...

        @overload
        def __call__(
            self, x: Tokens, cache: Cache | None = None, *, return_lse: bool, **rows: Unpack[AnyInputs]
        ) -> Output | tuple[Any, ...]: ...

    @compiled_call("ejx.nn.MultiHeadAttention")
    def __call__(
        self,
        x: Float[AnyArray, "*B T E"],
        cache: Cache | None = None,
        *,
        kv_input: Float[AnyArray, "*B S C"] | None = None,
        v_input: Float[AnyArray, "*B S Cv"] | None = None,
        positions: Int[AnyArray, "... T"] | None = None,
        padding_mask: Bool[AnyArray, "*B T"] | None = None,
        kv_padding_mask: Bool[AnyArray, "*B S"] | None = None,
        segment_ids: Int[AnyArray, "*B T"] | None = None,
        cu_seqlens: Int[AnyArray, " N+1"] | None = None,
        mask: Bool[AnyArray, "#*B #H #T #S"] | Mask | None = None,
        bias: Float[AnyArray, "#*B #H #T #S"] | None = None,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        batch: RaggedBatch | None = None,
        norm: Norm | None = None,
        residual: Float[AnyArray, "*B T O"] | None = None,
        return_lse: bool = False,
    ) -> Output | tuple[Output, Cache] | tuple[Output, Lse] | tuple[Output, Cache, Lse]:
        """**Arguments:**

        - `x`: `[..., T, E]` with any number of leading axes.
        - `cache`: keys and values of the tokens before `x`, for causal layers; those of `x` are appended. Processing a prompt at once, in chunks
            or token by token, with rows at different positions, returns the same as processing whole sequences at once. A
            `RollingKVCache` keeps one window only.
        - `kv_input`: `[..., S, C]`, the input of keys and values instead of `x` (cross attention).
        - `v_input`: `[..., S, Cv]`, the input of values; `kv_input` is then the input of keys only.
        - `positions`: integers that broadcast to `[..., T]`, for the rotation only: they do not affect the mask. By default tokens are counted
            from the first real token of the row, including cached ones. A rotation with `mrope_section` takes `[axes, ..., T]`.
        - `padding_mask`: bool `[..., T]`, True for real tokens, which must be contiguous in each row (padding left, right or both). Padding
            may hold NaN and is not cached; outputs at padding positions are undefined.
        - `kv_padding_mask`: bool `[..., S]`, the same for `kv_input`.
        - `segment_ids`: integers `[..., T]`; tokens see their own segment only, and negative ids are padding. Not with a cache.
        - `cu_seqlens`: offsets `[N + 1]` of packed sequences, with `x` of shape `[T, E]`. Each sequence sees only itself, and its positions
            start at 0; tokens past the last offset are padding. Not with `padding_mask`, `segment_ids` or a cache.
        - `mask`, `bias`: as in [`ejkernel_eqx.FlashAttention`][], `[..., H, T, S]`. An array with leading axes needs the axis of the heads as
            well: `[..., T, S]` is rejected. With a cache, `S` is its `max_length`. A causal layer stays causal: `mask` is intersected with what
            the layer hides, and shows nothing more.
        - `key`: PRNG key, required for dropout outside inference mode.
        - `inference`: overrides the flag set by `equinox.nn.inference_mode`.
        - `batch`: an `ejkernel_eqx.RaggedBatch`, for serving. `x [T, E]` holds the new tokens of its sequences. `cache`
            is a `PagedKVCache`. The new keys and values are written into its pages before attention reads them. The
            cache may be bound to the tables of the batch or not, and is returned in the same state. Padding may hold
            NaN; outputs at padding positions are undefined. Donate the cache for writing in place. `positions` are
            accepted only if the rotation has `mrope_section`.
        - `norm`, `residual`: those of the block around the layer. The input is the norm of `x`. The residual has the
            shape of the output and is added to it, in the dtype of the residual. With a batch of few tokens they are
            computed in the launches of the projections ([`ejkernel_eqx.Matmul`][]). Not with `kv_input`.
        - `return_lse`: also return the log-sum-exp of the scores, `[..., T, H]`, as in [`ejkernel_eqx.FlashAttention`][].

        **Returns:** `y`, of shape `[..., T, O]` (`O = E` by default), in the dtype of the computation. With a cache: `(y, cache)`. With
        `return_lse`, the log-sum-exp is last: `(y, lse)` or `(y, cache, lse)`.

        Raises `ValueError` for invalid arguments; values are checked when they are known (outside `jit`).
        """
        rows = positions, padding_mask, kv_padding_mask, segment_ids, cu_seqlens
        given = CallInputs(kv_input, v_input, *rows, mask, bias, key, inference)
        block = Block(norm, residual)
        check_flags(return_lse=return_lse)
        check_scalar(self.sliding_window)
        if batch is not None:
            x, cache = check_pages(self, x, cache, batch, given)
            check_block(block, x, self.output_size, kv_input)
            other = self.fgate_proj is not None or x.dtype != compute_dtype_of(self.compute_dtype, self, x)
            if norm is not None and other:
                x, block = normed_input(norm, x), Block(None, residual)  # in the wider dtype, and for gates
            return self._over_pages(x, cache, batch, positions, block, return_lse)
        given, x = check_call(self, x, cache, given)
        check_block(block, x, self.output_size, kv_input)
        assert not isinstance(cache, PagedKVCache)  # those need a batch
        rows = locate(x, cache, given)
        inputs = [a for a in (x, given.kv_input, given.v_input) if a is not None]
        dtype = compute_dtype_of(self.compute_dtype, self, *inputs)
        x = normed_input(norm, clear(x, rows.real)).astype(dtype)
        source = x if given.kv_input is None else clear(given.kv_input.astype(dtype), kv_padding_mask)
        values = source if given.v_input is None else clear(given.v_input.astype(dtype), kv_padding_mask)
        return with_residual(residual, self._attend((x, source, values), cache, given, rows, return_lse))

    def apart(self, x: Array, keys: Array, values: Array, **given: Any) -> Array:
        """`layer(x, padding_mask=..., segment_ids=...)`, whose input comes three times, for queries, keys and values:
        [`ejkernel_eqx.ResidualRMSNorm`][]`.for_readers` then adds their three gradients."""
        read, x = check_call(self, x, None, CallInputs(**given))
        rows = locate(x, None, read)
        dtype = compute_dtype_of(self.compute_dtype, self, x)
        x, keys, values = (clear(a.astype(dtype), rows.real) for a in (x, keys, values))
        return self._attend((x, keys, values), None, read, rows, False)

    def with_keys(self, x: Array, **given: Any) -> tuple[Array, tuple[Array, Array]]:
        """`layer(x, padding_mask=..., segment_ids=...)`, and its keys and values `[..., T, K, D]`, for layers that read them, too."""
        read, x = check_call(self, x, None, CallInputs(**given))
        rows = locate(x, None, read)
        x = clear(x.astype(compute_dtype_of(self.compute_dtype, self, x)), rows.real)
        return self._attend((x, x, x), None, read, rows, False, True)

    def _attend(
        self,
        inputs: tuple[Array, Array, Array],
        cache: Any,
        given: CallInputs,
        rows: Any,
        return_lse: bool,
        return_keys: bool = False,
    ) -> Any:
        """The results of a call, from the inputs of queries, keys and values."""
        x, source, values = inputs
        attention = self.attention if cache is None else on_whole_rows(self.attention)
        split = attention.split if isinstance(attention, RingAttention) else None
        places = places_over(split, self.rope, given.positions, rows, x)
        q, k, v, gate = self._heads(x, source, values, places, return_keys)
        size, mask = self.chunk_size, with_window(self.sliding_window, given.mask)
        if size is not None and (cache is not None or rows.cu_seqlens is not None):
            mask = with_chunks(size, mask)
        elif size is not None:
            rows = rows.in_chunks(size, x.shape[:-1])
        cache, k, v, visible = keys_of(cache, k, v, rows, self._log_forget(x))
        out: Any = attention(
            q,
            k.astype(q.dtype),
            v.astype(q.dtype),
            bias=given.bias,
            mask=mask,
            **visible,
            sinks=self.sinks,
            alibi_slopes=self._slopes(q),
            key=given.key,
            inference=given.inference,
            return_lse=return_lse,
        )
        out, *lse = out if return_lse else (out,)
        y = marked(self._finish(out, gate), cache)
        results = (y, *([] if cache is None else [cache]), *lse, *([(k, v)] if return_keys else []))
        return results if len(results) > 1 else y

    def _over_pages(
        self,
        x: Array,
        cache: PagedKVCache,
        batch: RaggedBatch,
        positions: AnyArray | None,
        block: Block,
        return_lse: bool,
    ) -> Any:
        """A call with a batch: keys and values are written to their pages first."""
        if self.chunk_size is not None and batch.page_table.shape[-1] * batch.page_size > self.chunk_size:
            raise ValueError(
                f"batch: expected texts of at most chunk_size={self.chunk_size} tokens in pages, received a table for "
                f"{batch.page_table.shape[-1] * batch.page_size}; serve shorter ones, or decode over rows."
            )
        given: Any = {"query_start_loc": batch.query_start_loc, "max_query_len": batch.max_query_len}
        given |= {"sinks": self.sinks, "window": self.sliding_window, "return_lse": return_lse}

        def empty(x: Array) -> tuple[Array, ...]:
            lse = jnp.full((x.shape[0], self.num_heads), -jnp.inf, accumulator(x.dtype))
            dtype = x.dtype if block.residual is None else block.residual.dtype
            return jnp.zeros((x.shape[0], self.output_size), dtype), *((lse,) if return_lse else ())

        def call(x: Array, bound: PagedKVCache) -> tuple[tuple[Array, ...], PagedKVCache]:
            places = places_over_pages(self.rope, batch, positions)
            if block.is_alone:
                q, k, v, gate = self._heads(x, x, x, places)
            else:
                q, k, v, gate = self._heads_of_few(x, block.norm, places)
            if isinstance(self.paged_attention, UnifiedAttention):
                gates = {} if self.fgate_proj is None else {"log_forget": self._log_forget(x), "batch": batch}
                new = bound.append(k, v, batch.slots, **gates)
                out: Any = self.paged_attention(q, new, **given, alibi_slopes=self._slopes(q))
                out = out if return_lse else (out,)
            else:
                *out, new = self.paged_attention(q, bound, k, v, **given)
            return (self._finish(out[0], gate, block.residual), *out[1:]), new

        # Few tokens of padding are computed like others: what they hold reaches no other token.
        (y, *lse), new = over_pages(self, x, cache, batch, call, empty, clears=block.is_alone)
        return y, new, *lse

    def _log_forget(self, x: Array) -> Array | None:
        if self.fgate_proj is None:
            return None
        logits = project("fgate_proj", self.fgate_proj, x, self.num_heads)
        return jax.nn.log_sigmoid(logits.astype(accumulator(x.dtype)))

    def _slopes(self, q: Array) -> Array | None:
        return None if self.alibi is None else jnp.asarray(self.alibi, accumulator(q.dtype))

    def _heads(
        self, x: Array, source: Array, values: Array, places: Places, together: bool = False
    ) -> tuple[Array, Array, Array, Array | None]:
        """Queries, keys and values, `[..., H or K, D or V]`, and the gate `[..., H * V]`. Together: by `_turned`."""
        sources = zip(self._projections().items(), (x, source, values), self._widths())
        q, k, *v = (project(name, layer, of, n) for (name, layer), of, n in sources)
        return (self._turned if together else self._split)(q, k, v[0] if v else k, places)

    def _projections(self) -> dict[str, Any]:
        both: dict[str, Any] = {"q_proj": self.q_proj, "k_proj": self.k_proj}
        return both if self.v_proj is None else both | {"v_proj": self.v_proj}

    def _widths(self) -> tuple[int, int, int]:
        width = self.head_dim + self.v_head_dim if self.output_gate else self.head_dim
        return self.num_heads * width, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.v_head_dim

    def _heads_of_few(
        self, x: Array, norm: Norm | None, places: Places
    ) -> tuple[Array, Array, Array, Array | None]:
        """The results of `_heads` for the norm of few tokens."""
        layers = self._projections()
        q, k, *v = projected(self.matmul, x, norm, layers, self._widths()[: len(layers)])
        return self._turned(q, k, v[0] if v else k, places)

    def _turned(
        self, q: Array, k: Array, v: Array, places: Places
    ) -> tuple[Array, Array, Array, Array | None]:
        """The results of `_split`, with norms and rotation in one operation if it computes them."""
        norms = plain_norms(self.q_norm, self.k_norm, self.norm_over_all)
        rope, rotary_heads = self.rope, self.rotary_heads
        if self.output_gate or self.temperature is not None or self.v_norm is not None:
            return self._split(q, k, v, places)
        if rotary_heads is None or norms is None or not isinstance(rope, RotaryEmbedding):
            return self._split(q, k, v, places)
        # Another rotation may have been put in the place of the first.
        if rope.interleaved != rotary_heads.spec.interleaved:
            return self._split(q, k, v, places)
        q, k = split_heads(q, self.num_heads), split_heads(k, self.num_kv_heads)
        cos, sin = places.tables(rope, q)
        q, k = rotary_heads(q, k, cos, sin, **norms)
        return q, k, split_heads(v, self.num_kv_heads), None

    def _split(
        self, q: Array, k: Array, v: Array, places: Places
    ) -> tuple[Array, Array, Array, Array | None]:
        """The results of `_heads`, from projections."""
        q = split_heads(q, self.num_heads)
        q, gate = jnp.split(q, [self.head_dim], axis=-1) if self.output_gate else (q, None)
        k, v = split_heads(k, self.num_kv_heads), split_heads(v, self.num_kv_heads)
        q, k = (
            normed(f"{name}_norm", norm, x, self.norm_over_all)
            for name, norm, x in (("q", self.q_norm, q), ("k", self.k_norm, k))
        )
        v = normed("v_norm", self.v_norm, v, False)
        q, k = places.turn(self.rope, q), places.turn(self.rope, k)
        if self.temperature is not None:
            q = places.tempered(self.temperature, q)
        return q, k, v, None if gate is None else merge_heads(gate)

    def _finish(self, out: Array, gate: Array | None, residual: Array | None = None) -> Array:
        """The output of the layer, with a residual of few tokens added to it."""
        y = merge_heads(out) if gate is None else merge_heads(out) * jax.nn.sigmoid(gate)
        if residual is None:
            return project("o_proj", self.o_proj, y, self.output_size)
        return added(self.matmul, "o_proj", self.o_proj, y, residual)
