"""Attention on the keys and values of an earlier layer."""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from .._jitted import compiled_call
from .._signatures import Module
from ..attention import FlashAttention
from ..dispatch import PlatformLike
from ..nn import KVCache, RotaryEmbedding
from ..nn.attention_inputs import CallInputs, check_heads
from ..nn.attention_places import locate, Places, places_of, places_over_pages
from ..nn.kv_cache import marked
from ..nn.paged_layer import over_pages
from ..nn.parts import Parts
from ..nn.projection import compute_dtype_of, project
from ..nn.tokens import clear, merge_heads, normed, split_heads
from ..paged import RaggedBatch, RaggedPagedAttention
from ..weights.attention_configs import cross_layer_options
from ..weights.fill import fill_fields


class CrossLayerAttention(Module):
    r"""Attention of this layer's queries on the keys and values of an earlier layer (cross-layer attention, Brandon et al. 2024,
    arXiv:2405.12981; Gemma 4):

    $$y = \mathrm{softmax}(q k^\top)\, v\, W_o^\top, \qquad q = \mathrm{rope}(\mathrm{norm}(x W_q^\top))$$

    where $k$ and $v$ are those of the earlier layer. It has no cache of its own. Parameters have their published names.
    """

    q_proj: eqx.nn.Linear  # [H * D, E]
    o_proj: eqx.nn.Linear  # [E, H * D]
    q_norm: eqx.nn.RMSNorm | None  # [D]
    rope: RotaryEmbedding | None
    attention: FlashAttention
    paged_attention: RaggedPagedAttention
    embed_dim: int = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    _options_of = staticmethod(cross_layer_options)

    def __init__(
        self,
        embed_dim: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rope: RotaryEmbedding | None = None,
        qk_norm: bool = False,
        qk_norm_eps: float = 1e-6,
        use_qkv_bias: bool = False,
        use_output_bias: bool = False,
        sliding_window: int | None = None,
        softmax_scale: float | None = None,
        platform: PlatformLike | None = None,
        dtype: Any = None,
        compute_dtype: Any = None,
        key: Array,
    ):
        check_heads(num_heads, num_kv_heads, head_dim, rope)
        parts, width = Parts(key, 2, dtype, compute_dtype), num_heads * head_dim
        self.q_proj = parts.linear(embed_dim, width, use_qkv_bias)
        self.o_proj = parts.linear(width, embed_dim, use_output_bias)
        norm = eqx.nn.RMSNorm(head_dim, qk_norm_eps, use_bias=False, dtype=parts.dtype)
        self.q_norm, self.rope = norm if qk_norm else None, rope
        limits: Any = (sliding_window, None, softmax_scale)
        self.attention = FlashAttention(True, *limits, platform=platform)
        self.paged_attention = RaggedPagedAttention(
            *limits, platform=None if platform == "cuda" else platform
        )
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, head_dim
        self.compute_dtype = parts.compute_dtype

    def init_cache(self, *sizes: Any) -> None:
        """Returns no cache: the other layer keeps the keys and values."""

    def init_pool(self, **sizes: Any) -> None:
        """Returns no pool: the other layer has the pages."""

    @compiled_call()
    def __call__(
        self,
        x: Array,
        keys: Any,
        *,
        padding_mask: Any = None,
        segment_ids: Any = None,
        batch: RaggedBatch | None = None,
    ) -> Array:
        """**Arguments:**

        - `x`: `[..., T, E]`; with `batch`, `[T, E]`.
        - `keys`: the keys and values of the other layer, after its call on the same tokens: two arrays `[..., T, K, D]`; with a cache, its `KVCache`;
            with `batch`, its pages and the batch of its call.

        **Returns:** an array of the shape of `x`.
        """
        if batch is not None:
            return self._over_pages(x, *keys)
        given = CallInputs(padding_mask=padding_mask, segment_ids=segment_ids)
        if isinstance(keys, KVCache):
            new = x.shape[-2] if padding_mask is None else jnp.sum(padding_mask, axis=-1, dtype=jnp.int32)
            rows = locate(x, dataclasses.replace(keys, lengths=keys.lengths - new), given)
            k, v, seen = keys.k, keys.v, {"kv_lengths": keys.lengths, "q_offset": rows.offset}
        else:
            rows, (k, v) = locate(x, None, given), keys
            seen: Any = {"segment_ids": rows.segment_ids, "kv_segment_ids": rows.kv_segment_ids}
        x = clear(x, rows.real).astype(compute_dtype_of(self.compute_dtype, self, x))
        q = self._queries(x, places_of(self.rope, None, rows))
        out = self._finish(self.attention(q, k.astype(q.dtype), v.astype(q.dtype), **seen))
        return marked(out, keys)

    def _over_pages(self, x: Array, pages: Any, batch: RaggedBatch) -> Array:
        def call(x: Array, bound: Any) -> tuple[Array, Any]:
            q = self._queries(x, places_over_pages(self.rope, batch, None))
            at: Any = {"query_start_loc": batch.query_start_loc, "max_query_len": batch.max_query_len}
            return self._finish(self.paged_attention(q, bound, **at)), bound

        return over_pages(self, x, pages, batch, call)[0]

    def _queries(self, x: Array, places: Places) -> Array:
        q = split_heads(project("q_proj", self.q_proj, x, self.num_heads * self.head_dim), self.num_heads)
        return places.turn(self.rope, normed("q_norm", self.q_norm, q, False))

    def _finish(self, out: Any) -> Array:
        return project("o_proj", self.o_proj, merge_heads(out), self.embed_dim)

    def _published(self, weights: Any) -> "CrossLayerAttention":
        # Some checkpoints hold projections of keys, which this layer does not have.
        weights.skip("k_proj.*", "v_proj.*", "k_norm.*", "v_norm.*")
        return fill_fields(self, weights)
