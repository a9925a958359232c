"""Checks of the arguments of multi-head attention."""

from typing import Any, NamedTuple

import numpy as np
from jax import Array

from .._shapes import AnyArray
from .._values import check_known
from ..attention import Mask, RingAttention
from ..paged import PagedKVCache
from ..rotary import check_positions, RotaryChoice, RotaryEmbedding
from .arguments import (
    check_flags,
    check_key,
    check_numbers,
    check_tokens,
    read_array,
    read_features,
    read_packed,
    read_sizes,
    read_tokens,
)
from .kv_cache import KVCache
from .paged_layer import check_pool
from .rolling_cache import RollingKVCache
from .tokens import check_ragged


class CallInputs(NamedTuple):
    """The arguments of a call other than `x` and `cache`."""

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
            "or pass head_dim=."
        )
    return embed_dim // num_heads


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int, rope: Any) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads: expected a divisor of num_heads={num_heads}, received {num_kv_heads}; "
            "each key/value head serves the same number of query heads."
        )
    if rope is not None and not isinstance(rope, RotaryEmbedding | RotaryChoice):
        raise ValueError(
            f"rope: expected a RotaryEmbedding or None, received {rope!r}; the default one is RotaryEmbedding({head_dim})."
        )
    if rope is not None and rope.head_dim != head_dim:
        raise ValueError(
            f"rope: expected a RotaryEmbedding of head_dim={head_dim}, received one of {rope.head_dim}; "
            "to rotate only part of the features, build it with rotary_dim=."
        )


def check_norm(qk_norm: Any) -> bool:
    """Returns whether all heads are normalised together."""
    if not isinstance(qk_norm, bool | np.bool_) and qk_norm not in ("heads", "all", "unit"):
        raise ValueError(
            f"qk_norm: expected True or False, 'heads', 'all' or 'unit', received {qk_norm!r}; 'heads' (or True) normalises each head, "
            "'all' all heads together, 'unit' each head without weights."
        )
    return isinstance(qk_norm, str) and qk_norm == "all"


def read_biases(use_qkv_bias: Any) -> tuple[bool, bool, bool]:
    """The flags of queries, keys and values."""
    flags = use_qkv_bias if isinstance(use_qkv_bias, tuple) else (use_qkv_bias,) * 3
    if len(flags) != 3 or not all(isinstance(flag, bool | np.bool_) for flag in flags):
        raise ValueError(
            f"use_qkv_bias: expected True or False, or a tuple of three for queries, keys and values, received {use_qkv_bias!r}; they are "
            "static flags."
        )
    return flags


def check_keys_as_values(flag: bool, keys: tuple[int, int], values: tuple[int, int]) -> None:
    """`keys` and `values` are the features of a head and of the input."""
    if flag and keys != values:
        raise ValueError(
            f"keys_as_values: expected keys and values of the same features, and of the same input, received {keys} and {values}; leave out "
            "v_head_dim and v_embed_dim."
        )


def check_forget_gate(flag: bool, is_possible: bool) -> None:
    if flag and not is_possible:
        raise ValueError(
            "forget_gate: expected False but in a causal layer without alibi and sequence_axis, received True; leave out the others."
        )


def check_chunk(size: int | None, is_possible: bool) -> None:
    if size is not None and not is_possible:
        raise ValueError(
            f"chunk_size: expected None but in a causal layer without sliding_window and sequence_axis, received {size}; leave out the others."
        )


def read_temperature(value: Any, rope: Any, sequence_axis: str | None) -> tuple[float, int, int] | None:
    if value is None:
        return None
    if not isinstance(value, tuple) or len(value) != 3:
        raise ValueError(
            f"temperature: expected a strength, a length and an offset, received {value!r}; (0.1, 8192, 1) is one."
        )
    strength, length, ahead = value
    check_numbers(temperature=strength)
    (length,) = read_sizes(temperature=length)
    if (rope is None and sequence_axis is not None) or (rope is not None and rope.num_axes is not None):
        raise ValueError(
            "temperature: expected None with sequence_axis and no rotation, or with positions along several axes, received one; it takes the "
            "positions of the rotation."
        )
    return float(strength), length, int(ahead)


def check_call(layer: Any, x: Any, cache: Any, given: CallInputs) -> tuple[CallInputs, Array]:
    """The arguments of a valid call without a batch, with inputs as arrays."""
    _check_kind(cache, (KVCache, RollingKVCache), PagedKVCache)
    x = read_tokens(x, layer.embed_dim, given.padding_mask, given.segment_ids)
    if given.positions is not None:
        axes = None if layer.rope is None else layer.rope.num_axes
        check_positions(given.positions, x.shape[:-1], axes)
    _check_scores("mask", given.mask, "booleans", x.shape[:-2], layer.num_heads)
    _check_scores("bias", given.bias, "floats", x.shape[:-2], layer.num_heads)
    if given.key is not None:
        check_key(given.key)
    if given.inference is not None:
        check_flags(inference=given.inference)
    if given.cu_seqlens is not None:
        check_packed(x, cache, given)
    if given.kv_input is not None:
        kv_input = read_features("kv_input", given.kv_input, "[..., S, C]", "C", layer.kv_embed_dim)
        check_tokens("kv_padding_mask", given.kv_padding_mask, "booleans", "kv_input", kv_input)
        _check_cross(layer, x, kv_input, cache, given.segment_ids)
        return given._replace(kv_input=kv_input, v_input=_read_values(layer, given.v_input, kv_input)), x
    remedies = {"kv_padding_mask": "padding_mask= for the padding of x", "v_input": "kv_input= as well"}
    for name, remedy in remedies.items():
        if getattr(given, name) is not None:
            raise ValueError(f"{name}: expected None without kv_input, received an array; pass {remedy}.")
    for name in ("kv_embed_dim", "v_embed_dim"):
        if (size := getattr(layer, name)) != layer.embed_dim:
            raise ValueError(
                f"kv_input: expected [..., S, {layer.kv_embed_dim}], received None; this layer was built for cross attention, with {name}="
                f"{size}."
            )
    attention = layer.attention
    if not isinstance(attention, RingAttention) or attention.split.order == "contiguous":
        check_side_by_side(given.padding_mask)
    if cache is not None:
        _check_cache(layer, x, cache, given.segment_ids)
    if isinstance(cache, RollingKVCache):
        _check_rolling(layer, cache, given)
    return given, x


def check_rows(embed_dim: int, kinds: tuple[type, type], x: Any, cache: Any, given: CallInputs) -> Array:
    """The tokens of a valid call without a batch, of a layer whose caches are of these kinds: of rows, and of pages."""
    dense, paged = kinds
    _check_kind(cache, (dense,), paged)
    x = read_tokens(x, embed_dim, given.padding_mask, given.segment_ids)
    if given.positions is not None:
        check_positions(given.positions, x.shape[:-1], None)
    if given.cu_seqlens is not None:
        check_packed(x, cache, given)
    check_side_by_side(given.padding_mask)
    if cache is None:
        return x
    for name in ("segment_ids", "mask"):
        if getattr(given, name) is not None:
            raise ValueError(
                f"{name}: expected None with a cache, received both; put each sequence in its own row."
            )
    _check_batch_shape(x, cache)
    return x


def _check_kind(cache: Any, dense: tuple[type, ...], paged: type) -> None:
    """The cache of a call without a batch."""
    if isinstance(cache, paged):
        raise ValueError(
            f"batch: expected a RaggedBatch with a {paged.__name__}, received None; it holds the tables that assign pages to sequences."
        )
    if cache is not None and not isinstance(cache, dense):
        names = ", ".join(f"a {kind.__name__}" for kind in dense)
        raise ValueError(
            f"cache: expected {names} or None, received {type(cache).__name__}; build it with init_cache."
        )


def _read_values(layer: Any, v_input: Any, kv_input: Array) -> Array | None:
    if v_input is None:
        if layer.v_embed_dim != layer.kv_embed_dim:
            raise ValueError(
                f"v_input: expected [..., S, {layer.v_embed_dim}], received None; this layer was built with v_embed_dim=, so values need "
                "a separate input."
            )
        return None
    v_input = read_features("v_input", v_input, "[..., S, Cv]", "Cv", layer.v_embed_dim)
    if v_input.shape[:-1] != kv_input.shape[:-1]:
        raise ValueError(
            f"v_input: expected the tokens of kv_input, {kv_input.shape[:-1]}, received shape {v_input.shape}; pass one value per key."
        )
    return v_input


def check_packed(x: Array, cache: Any, given: CallInputs) -> None:
    others = {name: getattr(given, name) for name in ("padding_mask", "segment_ids", "kv_input")}
    remedy = "packed sequences are complete, and tokens past the last offset are padding"
    read_packed(x, given.cu_seqlens, others | {"cache": cache}, remedy)


def _check_scores(name: str, value: Any, kind: str, lead: tuple[int, ...], heads: int) -> None:
    """A mask or bias of scores. Without the axis of the heads, `[..., T, S]` could be mistaken for `[H, T, S]`."""
    if value is None or (name == "mask" and isinstance(value, Mask)):
        return
    shape = read_array(name, value, kind, "[..., H, T, S]").shape
    if lead and shape[:-2] == lead and max(lead) > 1:
        raise ValueError(
            f"{name}: expected [..., H, T, S] with H = {heads} or 1, received shape {shape}, with the leading axes {lead} of x but no "
            f"axis for the heads; add it with {name}[..., None, :, :]."
        )


def check_side_by_side(padding_mask: AnyArray | None) -> None:
    """Real tokens are contiguous in each row, if the values are known."""

    def check(values: Any) -> None:
        real = np.asarray(values).reshape(-1, values.shape[-1])
        starts = real[:, :1].sum(1) + (real[:, 1:] & ~real[:, :-1]).sum(1)
        if np.any(starts > 1):
            row = int(np.argmax(starts > 1))
            raise ValueError(
                f"padding_mask: expected contiguous real tokens in each row, received padding between them in row {row}; use mask= or "
                "segment_ids= to exclude tokens in between."
            )

    if padding_mask is not None and np.size(padding_mask):
        check_known(padding_mask, check)


def window_of(layer: Any) -> int:
    """The number of keys that a rolling cache of this layer holds."""
    left, right = layer.attention.window
    if layer.sliding_window is not None or left is None or not (layer.attention.causal or right == 0):
        by_flags = f"causal={layer.attention.causal} and {(left, right)}"
        found = by_flags if layer.sliding_window is None else "an array"
        raise ValueError(
            f"rolling: expected a causal layer with a static sliding_window, received one with {found}; other layers need "
            "keys beyond one window, so use a KVCache."
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
                f"{name}: expected None with a RollingKVCache, received an array; it would have to cover the whole sequence, so use a KVCache."
            )


def _check_cache(layer: Any, x: Array, cache: KVCache | RollingKVCache, segment_ids: AnyArray | None) -> None:
    if segment_ids is not None:
        raise ValueError(
            "segment_ids: expected None with a cache, received an array; put each sequence in its own row."
        )
    if not layer.attention.causal and layer.attention.window[1] != 0:
        raise ValueError(
            "cache: expected None in a layer with causal=False, received a KVCache; outputs depend on later tokens, so pass the whole "
            "sequence at once, or build the layer with causal=True."
        )
    _check_batch_shape(x, cache)


def _check_batch_shape(x: Array, cache: Any) -> None:
    if cache.batch_shape != x.shape[:-2]:
        raise ValueError(
            f"cache: expected the batch shape {x.shape[:-2]} of x, received {cache.batch_shape}; "
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
            "positions in two different sequences cannot be compared, so build layers for cross attention without them."
        )
    if kv_input.shape[:-2] != x.shape[:-2]:
        raise ValueError(
            f"kv_input: expected the leading axes {x.shape[:-2]} of x, received shape {kv_input.shape}; broadcast it first."
        )


def check_pages(layer: Any, x: Any, cache: Any, batch: Any, given: CallInputs) -> tuple[Array, PagedKVCache]:
    """The packed tokens and the pages of a valid call with a batch."""
    axes = None if layer.rope is None else layer.rope.num_axes
    others = given._replace(key=None, inference=None, **({} if axes is None else {"positions": None}))
    x = check_ragged(x, batch, layer.embed_dim, others._asdict())
    if axes is not None and given.positions is not None:
        check_positions(given.positions, x.shape[:-1], axes)
    sizes = lambda of: (of.num_kv_heads, of.head_dim, of.v_head_dim)
    check_pool(cache, PagedKVCache, "heads (K, D, V)", sizes(layer), sizes)
    if given.inference is not None:
        check_flags(inference=given.inference)
    if not layer.attention.causal or layer.kv_embed_dim != layer.embed_dim:
        raise ValueError(
            "batch: expected a causal layer for self attention, received one with causal=False or kv_embed_dim=; "
            "only those decode from pages."
        )
    drops = layer.attention.options.dropout_rate > 0
    if drops and not (layer.attention.inference if given.inference is None else given.inference):
        raise ValueError(
            "inference: expected True with a batch in a layer with dropout, received False; use equinox.nn.inference_mode."
        )
    return x, cache
