"""Reads published recurrent layers. These are the forms whose names differ from the names of the fields:

| layer | form |
|---|---|
| `GatedLinearAttention` | `g_norm_swish_gate` for `g_norm` (flash-linear-attention, with an output gate) |
| `LightningAttention` | also buffers, which are not read: `slope_rate`, `*_decay` |
| `KimiDeltaAttention` | `A_log` `[1, 1, H, 1]`; `f_proj.0`, `f_proj.1`, `g_proj.0`, `g_proj.1` (flash-linear-attention) |
| | the decay's parameters in `forget_gate`, and one `conv1d` (transformers, after loading) |
| `GatedDeltaNet` | `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`, not grouped by key head (Qwen3.5) |
| | `q_proj`, `k_proj`, `v_proj`, `g_proj`, `b_proj`, `a_proj`, `o_norm`, `o_proj`; `conv1d` in one or three (OLMo-hybrid, flash-linear-attention) |

`Mamba1Mixer`, `Mamba2Mixer` and `Mamba3Mixer` are published under the names of their fields.
"""

import itertools
import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from .fill import fill, fill_fields, replaced
from .quantised.values import rows_of, rows_together
from .view import Weights


def gated_linear_attention(layer: Any, weights: Weights) -> Any:
    fused = weights.has("g_norm_swish_gate.weight")
    return fill_fields(layer, weights, {"g_norm": "g_norm_swish_gate"} if fused else {})


def lightning_attention(layer: Any, weights: Weights) -> Any:
    weights.skip("slope_rate", "*_decay")
    return fill_fields(layer, weights)


def kimi_delta_attention(layer: Any, weights: Weights) -> Any:
    gate = weights.at("forget_gate") if weights.has("forget_gate.A_log") else weights
    sequential = weights.has("f_proj.0.weight")
    a, b = ("f_proj.0", "f_proj.1") if sequential else ("f_a_proj", "f_b_proj")
    new = {
        "A_log": _take_rates(layer.A_log, gate),
        "dt_bias": gate.take("dt_bias", layer.dt_bias.shape, layer.dt_bias.dtype),
        "f_a_proj": fill(layer.f_a_proj, gate.at(a)),
        "f_b_proj": fill(layer.f_b_proj, gate.at(b)),
    }
    if weights.has("conv1d.weight"):
        new |= _split_convolution(layer, weights)
    renamed = {"g_a_proj": "g_proj.0", "g_b_proj": "g_proj.1"} if sequential else {}
    return fill_fields(replaced(layer, new), weights, renamed, skip=tuple(new))


def _take_rates(rates: Any, weights: Weights) -> Array:
    """`A_log` `[H]`, which may be published with further axes of size 1."""
    shape = weights.shape("A_log") if weights.has("A_log") else rates.shape
    # If only the axis of the heads is longer than 1, a reshape keeps the order of the values.
    spread = math.prod(shape) == max(shape, default=0) == rates.shape[0]
    return weights.take("A_log", shape if spread else rates.shape, rates.dtype).reshape(rates.shape)


def _split_convolution(layer: Any, weights: Weights) -> dict[str, Any]:
    names = ("q_conv1d", "k_conv1d", "v_conv1d")
    parts = [getattr(layer, name) for name in names]
    channels, first = [part.channels for part in parts], parts[0]
    ends = [channels[0], channels[0] + channels[1]]
    arrays = ["weight"] if first.bias is None else ["weight", "bias"]
    new: list[dict[str, Array]] = [{}, {}, {}]
    for array in arrays:
        like = getattr(first, array)
        found = weights.take(f"conv1d.{array}", (sum(channels), *like.shape[1:]), like.dtype)
        for part, split in zip(new, jnp.split(found, ends)):
            part[array] = split
    return {name: replaced(part, values) for name, part, values in zip(names, parts, new)}


def gated_delta_net(layer: Any, weights: Weights) -> Any:
    apart = weights.has("q_proj.weight")
    if not apart and not weights.has("in_proj_qkv.weight"):
        return fill_fields(layer, weights)
    heads, features = layer.num_k_heads, layer.embed_dim
    key_dim, value_dim = heads * layer.head_dim, layer.num_v_heads * layer.v_head_dim

    dtype, writes, rows = layer.in_proj_qkvz.weight.dtype, layer.num_householder, layer.num_v_heads
    # Published code has the parts of several writes one after the other.
    each = {"q_proj": [key_dim], "k_proj": [key_dim] * writes, "v_proj": [value_dim] * writes}
    each = each if apart else {"in_proj_qkv": [size for sizes in each.values() for size in sizes]}
    parts = []
    for name, sizes in each.items():
        matrix = weights.take_matrix(f"{name}.weight", (sum(sizes), features), dtype)
        ends = [*itertools.accumulate(sizes)]
        parts += [rows_of(matrix, slice(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    z = weights.take_matrix(f"{'g_proj' if apart else 'in_proj_z'}.weight", (value_dim, features), dtype)
    # These rows are so few that they are floats even in a quantised checkpoint.
    names = ("b_proj", "a_proj") if apart else ("in_proj_b", "in_proj_a")
    b, a = (
        weights.take(f"{name}.weight", (count * rows, features), dtype)
        for name, count in zip(names, (writes, 1), strict=True)
    )
    name = f"{weights.prefix}in_proj_qkv.weight"
    qkvz, ba = rows_together([*parts, z], heads, name), rows_together([*jnp.split(b, writes), a], heads, name)
    new = {
        "in_proj_qkvz": replaced(layer.in_proj_qkvz, {"weight": qkvz}),
        "in_proj_ba": replaced(layer.in_proj_ba, {"weight": ba}),
    }
    if weights.has("q_conv1d.weight"):
        # The cuts may be anywhere: `transformers` saves three parts of nearly the same size.
        names, dtype = [f"{part}_conv1d.weight" for part in "qkv"], layer.conv1d.weight.dtype
        there = lambda name: weights.shape(name) if weights.has(name) else layer.conv1d.weight.shape
        parts = [weights.take(name, there(name), dtype) for name in names]
        new["conv1d"] = replaced(layer.conv1d, {"weight": jnp.concatenate(parts)})
    renamed = {"norm": "o_norm", "out_proj": "o_proj"} if apart else {}
    return fill_fields(replaced(layer, new), weights, renamed, skip=tuple(new))
