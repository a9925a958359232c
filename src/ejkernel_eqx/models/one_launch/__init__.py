"""A layer of attention and an MLP for one token of one sequence, in one launch on GPUs."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax import Array

from ...dispatch import Backend, facts_of_calls, Platform
from ...nn.attention_places import places_over_pages
from ...nn.few_rows import plain_norms
from ...paged import RaggedBatch
from ...rotary import RotaryEmbedding
from . import launch
from .launch import LayerTile, Sizes, tile_of

_INTERPRETED = {"programs": 8, "warps": 4}
_MOST_BYTES, _MOST_KEYS = 2**26, 2048
"""Weights of a layer, and places for keys of a sequence, from which on launches of their own are as fast."""


def in_one_launch(layer: Any, x: Array, cache: Any, batch: RaggedBatch, otherwise: Callable[..., Any]) -> Any:
    """`otherwise(layer, x, cache, batch)`: the features and the pages after the layer. In one launch where it can be, and is faster so."""
    tile = _tile(layer, x, cache, batch)
    if tile is None:
        return otherwise(layer, x, cache, batch)
    arrays, static = eqx.partition((layer, x, cache, batch), eqx.is_array)
    whole = lambda run, arrays: run(*eqx.combine(arrays, static))
    call = jax.custom_batching.custom_vmap(functools.partial(whole, functools.partial(_launched, tile)))

    @call.def_vmap
    def _(size: int, mapped: Any, arrays: Any) -> Any:
        axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, mapped[0])
        results = jax.vmap(functools.partial(whole, otherwise), in_axes=(axes,), axis_size=size)(arrays)
        return results, jax.tree.map(lambda _: True, results)

    return call(arrays)


def _is_interpreted(layer: Any) -> bool:
    return layer.matmul.plan.here.asked[0][1].platform is Platform.TRITON_INTERPRET


def _tile(layer: Any, x: Array, cache: Any, batch: RaggedBatch) -> LayerTile | None:
    """The tile of the launch; `None` if the kernel does not compute this layer."""
    mixer, mlp, interpreted = layer.mixer, layer.mlp, _is_interpreted(layer)
    device = facts_of_calls()
    on_gpu = device.backend is Backend.GPU and device.vendor == "nvidia" and device.capability >= (9, 0)
    if not interpreted:
        asked = layer.matmul.plan.here.asked[0][1].platform
        if not on_gpu or asked is not Platform.TRITON or device.num_multiprocessors < launch.PROGRAMS:
            return None
    if x.shape[0] > 1 or not (batch.of_rows and _is_plain(layer, mixer, mlp, cache)):
        return None
    linears = [
        mixer.q_proj,
        mixer.k_proj,
        mixer.v_proj,
        mixer.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
    ]
    if any(type(one) is not eqx.nn.Linear or one.bias is not None for one in linears):
        return None
    arrays = [one.weight for one in linears]
    if any(not eqx.is_array(w) or w.ndim != 2 or w.dtype != x.dtype for w in arrays) or x.dtype.name not in (
        "bfloat16",
        "float32",
    ):
        return None
    keys = batch.page_table.shape[-1] * batch.page_size
    if (
        cache.k.dtype != x.dtype
        or cache.v.dtype != x.dtype
        or sum(w.nbytes for w in arrays) > _MOST_BYTES
        or keys > _MOST_KEYS
    ):
        return None
    return tile_of(_sizes(layer), keys, **(_INTERPRETED if interpreted else {}))


def _sizes(layer: Any) -> Sizes:
    mixer = layer.mixer
    return Sizes(
        mixer.embed_dim, layer.mlp.config.hidden_dim, mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    )


def _is_plain(layer: Any, mixer: Any, mlp: Any, cache: Any) -> bool:
    """Returns whether the layer has norms before both branches, rotated heads, a gate of SiLU, and none of the further options."""
    scales, rope = (layer.config.mixer_scales, layer.config.mlp_scales), mixer.rope
    further = (
        layer.mixer_out_norm,
        layer.mlp_out_norm,
        layer.layer_scalar,
        layer.per_layer_input_gate,
        mixer.v_norm,
        mixer.sinks,
        mixer.alibi,
    )
    further += (mixer.sliding_window, mixer.chunk_size, mixer.temperature, mixer.fgate_proj, cache.k_scale)
    options = mixer.paged_attention.options
    further += (options.left, options.logits_soft_cap)
    norms = [norm for norm in (layer.mixer_norm, layer.mlp_norm) if type(norm) is eqx.nn.RMSNorm]
    plain = (
        len(norms) == 2
        and norms[0].eps == norms[1].eps
        and all(n.weight is not None and n.bias is None for n in norms)
    )
    if not plain or scales != ((1, 1), (1, 1)) or any(x is not None for x in further) or mixer.v_proj is None:
        return False
    if (
        mlp.gate_proj is None
        or mlp.config.activation != "silu"
        or mlp.config.gate_scale != 1
        or mixer.output_gate
    ):
        return False
    turns = (
        isinstance(rope, RotaryEmbedding)
        and not rope.interleaved
        and rope.rotary_dim == mixer.head_dim == mixer.v_head_dim
    )
    return turns and plain_norms(mixer.q_norm, mixer.k_norm, mixer.norm_over_all) is not None


def _launched(tile: LayerTile, layer: Any, x: Array, cache: Any, batch: RaggedBatch) -> tuple[Array, Any]:
    """The results of the launch."""
    mixer, mlp = layer.mixer, layer.mlp
    heads = jax.ShapeDtypeStruct((x.shape[0], mixer.num_heads, mixer.head_dim), x.dtype)
    places: Any = places_over_pages(mixer.rope, batch, None)
    cos, sin = places.tables(mixer.rope, heads)
    norms: dict[str, Any] = plain_norms(mixer.q_norm, mixer.k_norm, mixer.norm_over_all) or {}
    arrays = {
        "x": x, "norm": layer.mixer_norm.weight, "mlp_norm": layer.mlp_norm.weight, "cos": cos, "sin": sin, "table": batch.page_table,
        "lengths": batch.lengths, "k": cache.k, "v": cache.v, "q_norm": norms.get("q_norm"), "k_norm": norms.get("k_norm"),
        "q_weight": mixer.q_proj.weight, "k_weight": mixer.k_proj.weight, "v_weight": mixer.v_proj.weight, "o_weight": mixer.o_proj.weight,
        "gate_weight": mlp.gate_proj.weight, "up_weight": mlp.up_proj.weight, "down_weight": mlp.down_proj.weight,
    }  # fmt: skip
    scale = mixer.paged_attention.options.softmax_scale
    numbers = {
        "PAGE": batch.page_size, "NORM": bool(norms), "EPS": layer.mixer_norm.eps,
        "HEAD_EPS": norms.get("norm_eps", 0.0), "SCALE": mixer.head_dim**-0.5 if scale is None else scale,
    }  # fmt: skip
    interpreted = _is_interpreted(layer)
    programs = _INTERPRETED["programs"] if interpreted else launch.PROGRAMS
    with jax.named_scope("ejx.models.one_launch"):
        out, k, v = launch.launch_layer(arrays, _sizes(layer), tile, numbers, programs, interpreted)
    return out, eqx.tree_at(lambda cache: (cache.k, cache.v), cache, (k, v))
