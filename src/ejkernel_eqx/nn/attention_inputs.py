"""What multi-head attention makes of its arguments: which it refuses, and where the tokens of a call sit."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ..paged import PagedKVCache
from .kv_cache import KVCache
from .rotary import RotaryEmbedding


class Rows(NamedTuple):
    """Where the tokens of a call sit. Each `None`: nothing beyond the default."""

    offset: Array | None = None  # int32 [...]: the place of `x[..., 0, :]` in its row's history
    segment_ids: Array | None = None
    kv_segment_ids: Array | None = None
    kv_lengths: Array | None = None


def head_dim_of(embed_dim: int, num_heads: int, head_dim: int | None) -> int:
    if head_dim is not None:
        return head_dim
    if embed_dim % num_heads:
        raise ValueError(
            f"num_heads: expected a divisor of embed_dim={embed_dim}, received {num_heads}; "
            "pass head_dim= for another width."
        )
    return embed_dim // num_heads


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int, rope: RotaryEmbedding | None) -> None:
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads: expected a divisor of num_heads={num_heads}, received {num_kv_heads}; "
            "every key/value head serves the same number of query heads."
        )
    if rope is not None and rope.head_dim != head_dim:
        raise ValueError(
            f"rope: expected a RotaryEmbedding of head_dim={head_dim}, received one of {rope.head_dim}; "
            "to turn only some of the features, give it rotary_dim=."
        )


def locate(cache: KVCache | None, padding_mask: Array | None, segment_ids: Array | None) -> Rows:
    """The places of a call's tokens. Left padding moves the first token before the row's start: its offset
    shrinks."""
    left = None if padding_mask is None else jnp.argmax(padding_mask, axis=-1).astype(jnp.int32)
    if cache is not None:
        return Rows(offset=cache.lengths if left is None else cache.lengths - left)
    offset = None if left is None else -left
    if padding_mask is not None:
        segment_ids = jnp.where(padding_mask, jnp.int32(0) if segment_ids is None else segment_ids, -1)
    return Rows(offset, segment_ids, segment_ids)


def locate_cross(
    x: Array, kv_input: Array, padding_mask: Array | None, kv_padding_mask: Array | None
) -> Rows:
    if padding_mask is None and kv_padding_mask is None:
        return Rows()
    ids = [
        jnp.zeros(a.shape[:-1], jnp.int32) if real is None else jnp.where(real, jnp.int32(0), -1)
        for a, real in ((x, padding_mask), (kv_input, kv_padding_mask))
    ]
    return Rows(None, *ids)


def check_pages(layer: Any, cache: Any, inference: bool | None) -> PagedKVCache:
    """The pages of a call with a batch, on which this layer can go."""
    if not isinstance(cache, PagedKVCache):
        raise ValueError(
            f"cache: expected a PagedKVCache with batch, received {type(cache).__name__}; build it with init_paged_cache."
        )
    heads = (layer.num_kv_heads, layer.head_dim, layer.v_head_dim)
    found = (cache.num_kv_heads, cache.head_dim, cache.v_head_dim)
    if found != heads or cache.batch_shape:
        raise ValueError(
            f"cache: expected pages of one layer with heads (K, D, V) = {heads}, received {found} and batch_shape "
            f"{cache.batch_shape}; build it with init_paged_cache, and jax.lax.scan over stacked layers."
        )
    if not layer.attention.causal or layer.k_proj.in_features != layer.embed_dim:
        raise ValueError(
            "batch: expected a causal layer that attends to its own input, received one with causal=False or kv_embed_dim=; "
            "only such a layer decodes from pages."
        )
    drops = layer.attention.options.dropout_rate > 0
    if drops and not (layer.attention.inference if inference is None else inference):
        raise ValueError(
            "inference: expected True with batch in a layer with dropout, received False; use equinox.nn.inference_mode."
        )
    return cache
