"""Which arguments multi-head attention refuses."""

from typing import Any, NamedTuple

import numpy as np
from jax import Array

from ..attention import Mask
from ..paged import PagedKVCache
from .arguments import check_flags, check_key, check_tokens, is_known, read_array, read_features
from .kv_cache import KVCache
from .rolling_cache import RollingKVCache
from .rotary import check_positions, RotaryChoice, RotaryEmbedding
from .tokens import check_ragged


class CallInputs(NamedTuple):
    """The arguments of a call beside `x` and `cache`."""

    kv_input: Any = None
    v_input: Any = None
    positions: Any = None
    padding_mask: Any = None
    kv_padding_mask: Any = None
    segment_ids: Any = None
    cu_seqlens: Any = None
    mask: Any = None
    bias: Any = None
    key: Any = None
    inference: Any = None


def head_dim_of(embed_dim: int, num_heads: int, head_dim: int | None) -> int:
    if head_dim is not None:
        return head_dim
    if embed_dim % num_heads:
        raise ValueError(
            f"num_heads: expected a divisor of embed_dim={embed_dim}, received {num_heads}; "
            "pass head_dim= for another width."
        )
    return embed_dim // num_heads


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int, rope: Any) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads: expected a divisor of num_heads={num_heads}, received {num_kv_heads}; "
            "every key/value head serves the same number of query heads."
        )
    if rope is not None and not isinstance(rope, RotaryEmbedding | RotaryChoice):
        raise ValueError(
            f"rope: expected a RotaryEmbedding or None, received {rope!r}; RotaryEmbedding({head_dim}) is the plain one."
        )
    if rope is not None and rope.head_dim != head_dim:
        raise ValueError(
            f"rope: expected a RotaryEmbedding of head_dim={head_dim}, received one of {rope.head_dim}; "
            "to turn only some of the features, give it rotary_dim=."
        )


def check_norm(qk_norm: Any) -> bool:
    """Whether the norm is over all heads together."""
    if not isinstance(qk_norm, bool | np.bool_) and qk_norm not in ("heads", "all"):
        raise ValueError(
            f"qk_norm: expected True or False, 'heads' or 'all', received {qk_norm!r}; 'heads' is True, 'all' normalises all heads "
            "together."
        )
    return isinstance(qk_norm, str) and qk_norm == "all"


def read_biases(use_qkv_bias: Any) -> tuple[bool, bool, bool]:
    """Those of queries, keys and values."""
    flags = use_qkv_bias if isinstance(use_qkv_bias, tuple) else (use_qkv_bias,) * 3
    if len(flags) != 3 or not all(isinstance(flag, bool | np.bool_) for flag in flags):
        raise ValueError(
            f"use_qkv_bias: expected True or False, or three of them for queries, keys and values, received {use_qkv_bias!r}; they are "
            "static switches."
        )
    return flags


def check_call(layer: Any, x: Any, cache: Any, given: CallInputs) -> tuple[CallInputs, Array]:
    """The arguments of a call without a batch, with what tokens are made from as arrays, if all fit."""
    if isinstance(cache, PagedKVCache):
        raise ValueError(
            "batch: expected a RaggedBatch with a PagedKVCache, received None; it says which pages belong to which tokens."
        )
    x = read_features("x", x, "[..., T, E]", "E", layer.embed_dim)
    check_tokens("padding_mask", given.padding_mask, "booleans", "x", x)
    check_tokens("segment_ids", given.segment_ids, "integers", "x", x)
    if given.positions is not None:
        axes = None if layer.rope is None else layer.rope.num_axes
        check_positions(given.positions, x.shape[:-1], axes)
    _check_scores("mask", given.mask, "booleans", x.shape[:-2], layer.num_heads)
    _check_scores("bias", given.bias, "floats", x.shape[:-2], layer.num_heads)
    if given.key is not None:
        check_key(given.key)
    if given.inference is not None:
        check_flags(inference=given.inference)
    if cache is not None and not isinstance(cache, KVCache | RollingKVCache):
        raise ValueError(
            f"cache: expected a KVCache, a RollingKVCache or None, received {type(cache).__name__}; build it with init_cache."
        )
    if given.cu_seqlens is not None:
        _check_packed(x, cache, given)
    if given.kv_input is not None:
        kv_input = read_features("kv_input", given.kv_input, "[..., S, C]", "C", layer.kv_embed_dim)
        check_tokens("kv_padding_mask", given.kv_padding_mask, "booleans", "kv_input", kv_input)
        _check_cross(layer, x, kv_input, cache, given.segment_ids)
        return given._replace(kv_input=kv_input, v_input=_read_values(layer, given.v_input, kv_input)), x
    for name in ("kv_padding_mask", "v_input"):
        if getattr(given, name) is not None:
            remedy = (
                "padding_mask= for the padding of x" if name == "kv_padding_mask" else "kv_input= as well"
            )
            raise ValueError(
                f"{name}: expected only together with kv_input, received it alone; pass {remedy}."
            )
    for name in ("kv_embed_dim", "v_embed_dim"):
        if (size := getattr(layer, name)) != layer.embed_dim:
            raise ValueError(
                f"kv_input: expected [..., S, {layer.kv_embed_dim}], received None; this layer was built for cross attention with {name}="
                f"{size}."
            )
    _check_side_by_side(given.padding_mask)
    if cache is not None:
        _check_cache(layer, x, cache, given.segment_ids)
    if isinstance(cache, RollingKVCache):
        _check_rolling(layer, cache, given)
    return given, x


def _read_values(layer: Any, v_input: Any, kv_input: Array) -> Array | None:
    if v_input is None:
        if layer.v_embed_dim != layer.kv_embed_dim:
            raise ValueError(
                f"v_input: expected [..., S, {layer.v_embed_dim}], received None; this layer was built with v_embed_dim=, so values have "
                "an input of their own."
            )
        return None
    v_input = read_features("v_input", v_input, "[..., S, Cv]", "Cv", layer.v_embed_dim)
    if v_input.shape[:-1] != kv_input.shape[:-1]:
        raise ValueError(
            f"v_input: expected the tokens of kv_input, {kv_input.shape[:-1]}, received shape {v_input.shape}; each key has one value."
        )
    return v_input


def _check_packed(x: Array, cache: Any, given: CallInputs) -> None:
    offsets = read_array("cu_seqlens", given.cu_seqlens, "integers", "[N + 1]")
    others = ("padding_mask", "segment_ids", "kv_input")
    other = next((name for name in others if getattr(given, name) is not None), None)
    if cache is not None or other is not None:
        raise ValueError(
            f"cu_seqlens: expected None with {other or 'cache'}, received both; packed sequences are whole, and tokens past the last offset "
            "are padding."
        )
    if x.ndim != 2 or offsets.ndim != 1 or not offsets.size:
        raise ValueError(
            f"cu_seqlens: expected offsets [N + 1] and x of shape [T, E], received {offsets.shape} and {x.shape}; pack all sequences into "
            "one row."
        )


def _check_scores(name: str, value: Any, kind: str, lead: tuple[int, ...], heads: int) -> None:
    """A mask or a bias over scores. One of `[..., T, S]` would be read as one of `[H, T, S]` wherever the sizes allow it."""
    if value is None or (name == "mask" and isinstance(value, Mask)):
        return
    shape = read_array(name, value, kind, "[..., H, T, S]").shape
    if lead and shape[:-2] == lead and max(lead) > 1:
        raise ValueError(
            f"{name}: expected [..., H, T, S] with H = {heads} or 1, received shape {shape}, whose axes before the last two are those of x, "
            f"{lead}, without one for the heads; add it: {name}[..., None, :, :]."
        )


def _check_side_by_side(padding_mask: Array | None) -> None:
    """Whether the real tokens of each row are neighbours, where that is known."""
    if padding_mask is None or not is_known(padding_mask) or not np.size(padding_mask):
        return
    real = np.asarray(padding_mask).reshape(-1, padding_mask.shape[-1])
    starts = real[:, :1].sum(1) + (real[:, 1:] & ~real[:, :-1]).sum(1)
    if np.any(starts > 1):
        row = int(np.argmax(starts > 1))
        raise ValueError(
            f"padding_mask: expected the real tokens of each row side by side, received padding between them in row {row}; pass mask= or "
            "segment_ids= to leave out tokens in between."
        )


def window_of(layer: Any) -> int:
    """How many keys a rolling cache of this layer has to hold."""
    left, right = layer.attention.window
    if layer.sliding_window is not None or left is None or not (layer.attention.causal or right == 0):
        found = (
            "an array"
            if layer.sliding_window is not None
            else f"causal={layer.attention.causal} and {(left, right)}"
        )
        raise ValueError(
            f"rolling: expected a causal layer with a static sliding_window, received one with {found}; other layers see keys that a window "
            "has left behind: use a KVCache."
        )
    return left + 1


def _check_rolling(layer: Any, cache: RollingKVCache, given: CallInputs) -> None:
    if cache.window < (window := window_of(layer)):
        raise ValueError(
            f"cache: expected a RollingKVCache of at least {window} slots, the layer's window, received {cache.window}; build it with "
            "init_cache(batch_shape, rolling=True)."
        )
    for name in ("mask", "bias"):
        if getattr(given, name) is not None:
            raise ValueError(
                f"{name}: expected None with a RollingKVCache, received an array; its keys are those of the whole sequence: use a KVCache."
            )


def _check_cache(layer: Any, x: Array, cache: KVCache | RollingKVCache, segment_ids: Array | None) -> None:
    if segment_ids is not None:
        raise ValueError(
            "segment_ids: expected None with a cache, received an array; give each sequence a row of its own."
        )
    if not layer.attention.causal and layer.attention.window[1] != 0:
        raise ValueError(
            "cache: expected None in a layer with causal=False, received a KVCache; tokens that see later ones cannot be computed before "
            "these: give the whole sequence at once, or build the layer with causal=True."
        )
    if cache.batch_shape != x.shape[:-2]:
        raise ValueError(
            f"cache: expected batch shape {x.shape[:-2]} as x has, received {cache.batch_shape}; "
            "build it with init_cache(x.shape[:-2], max_length)."
        )


def _check_cross(layer: Any, x: Array, kv_input: Array, cache: Any, segment_ids: Any) -> None:
    if cache is not None or segment_ids is not None:
        name = "segment_ids" if cache is None else "cache"
        raise ValueError(f"{name}: expected None with kv_input, received both; pass one of the two.")
    if layer.rope is not None or layer.attention.causal:
        found = "rope" if layer.rope is not None else "causal=True"
        raise ValueError(
            f"kv_input: expected a layer with causal=False and rope=None, received one with {found}; "
            "positions of two sequences do not compare, so build the layer for cross attention without them."
        )
    if kv_input.shape[:-2] != x.shape[:-2]:
        raise ValueError(
            f"kv_input: expected the leading axes {x.shape[:-2]} of x, received shape {kv_input.shape}; broadcast it first."
        )


def check_pages(layer: Any, x: Any, cache: Any, batch: Any, given: CallInputs) -> tuple[Array, PagedKVCache]:
    """The packed tokens of a call with a batch, and its pages, on which this layer can go."""
    axes = None if layer.rope is None else layer.rope.num_axes
    others = given._replace(key=None, inference=None, **({} if axes is None else {"positions": None}))
    x = check_ragged(x, batch, layer.embed_dim, others._asdict())
    if axes is not None and given.positions is not None:
        check_positions(given.positions, x.shape[:-1], axes)
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
    if given.inference is not None:
        check_flags(inference=given.inference)
    if not layer.attention.causal or layer.kv_embed_dim != layer.embed_dim:
        raise ValueError(
            "batch: expected a causal layer that attends to its own input, received one with causal=False or kv_embed_dim=; "
            "only such a layer decodes from pages."
        )
    drops = layer.attention.options.dropout_rate > 0
    if drops and not (layer.attention.inference if given.inference is None else given.inference):
        raise ValueError(
            "inference: expected True with batch in a layer with dropout, received False; use equinox.nn.inference_mode."
        )
    return x, cache
