"""The layers of RWKV, as they are published: by the names of flash-linear-attention, and by those of the models' author.

| layer | flash-linear-attention | the author |
|---|---|---|
| `RWKV7TimeMix` | `x_x`, or `x_r` to `x_g`; `w_lora.lora.0` and `.2` | `receptance`, `key`, `value`, `output`, `ln_x`; `w0`, `w1`, `w2` |
| `RWKV7ChannelMix` | the names of its fields | the same |
| `RWKV6TimeMix` | `x_proj.0`, `x_proj.2`, `r_proj.linear` | `time_maa_x`, `time_maa_w1`, `time_decay`, `time_faaaa`, `receptance` |

The author's matrices of low rank are `[in, out]`. Vectors may have axes of size 1 before the last one.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from .._entries import Entries
from .configs import check_type, Config, layer_type, read_model, refuse, take, taken
from .fill import fill, fill_fields, replaced
from .recurrent_configs import LINEAR, type_by_attn
from .view import Weights

_AUTHORS = {"r_proj": "receptance", "k_proj": "key", "v_proj": "value", "o_proj": "output", "g_norm": "ln_x"}


def low_rank(layer: Any, weights: Weights) -> Any:
    published = weights.has("lora.0.weight")
    return fill_fields(layer, weights, {"down": "lora.0", "up": "lora.2"} if published else {})


def rwkv7_time_mix(layer: Any, weights: Weights) -> Any:
    by_author, new = weights.has("receptance.weight"), {}
    if weights.has("x_r"):
        new["x_mix"] = jnp.stack([_vector(layer.x_mix, f"x_{name}", weights) for name in "rwkvag"])
    new |= {name: _vector(getattr(layer, name), name, weights) for name in ("k_k", "k_a")}
    if by_author:
        new |= {f"{name}_lora": _by_author(getattr(layer, f"{name}_lora"), name, weights) for name in "wavg"}
    named = (_AUTHORS if by_author else {}) | ({"x_mix": "x_x"} if weights.has("x_x") else {})
    return fill_fields(replaced(layer, new), weights, named, skip=tuple(new))


def rwkv7_channel_mix(layer: Any, weights: Weights) -> Any:
    new = {"x_k": _vector(layer.x_k, "x_k", weights)}
    return fill_fields(replaced(layer, new), weights, skip=tuple(new))


def rwkv6_time_mix(layer: Any, weights: Weights) -> Any:
    _, ranks, width = layer.x_up.shape
    if weights.has("x_proj.0.mu"):
        first, matrix = weights.at("x_proj.0"), layer.x_up
        up = weights.take("x_proj.2.weight", (width, 5 * ranks), matrix.dtype)
        new = {
            "x_mu": first.take("mu", layer.x_mu.shape, layer.x_mu.dtype),
            "x_down": fill(layer.x_down, first.at("linear")),
            "x_up": jnp.transpose(up.reshape(width, 5, ranks), (1, 2, 0)),
            "w_lora": fill(layer.w_lora, weights.at("w_proj.linear")),
        }
        named = {f"{name}_proj": f"{name}_proj.linear" for name in "rkvg"}
        return fill_fields(replaced(layer, new), weights, named, skip=tuple(new))
    if not weights.has("time_maa_x"):
        return fill_fields(layer, weights)
    # The author's order is w, k, v, r, g.
    place = jnp.asarray(["wkvrg".index(name) for name in "rwkvg"])
    down = weights.take("time_maa_w1", (width, 5 * ranks), layer.x_down.weight.dtype)
    down = down.T.reshape(5, ranks, width)[place].reshape(5 * ranks, width)
    new = {
        "x_mu": _vector(layer.x_mu, "time_maa_x", weights),
        "x_bias": jnp.stack([_vector(layer.x_mu, f"time_maa_{name}", weights) for name in "rwkvg"]),
        "x_down": replaced(layer.x_down, {"weight": down}),
        "x_up": weights.take("time_maa_w2", layer.x_up.shape, layer.x_up.dtype)[place],
        "w_lora": _by_author(layer.w_lora, "w", weights, ("time_decay", "time_decay_w1", "time_decay_w2")),
        "bonus": weights.take("time_faaaa", layer.bonus.shape, layer.bonus.dtype),
    }
    return fill_fields(replaced(layer, new), weights, _AUTHORS | {"g_proj": "gate"}, skip=tuple(new))


def _vector(like: Any, name: str, weights: Weights) -> Array:
    """A vector with the last axis of `like`, also where it is published with axes to broadcast by."""
    size, found = like.shape[-1], weights.shape(name) if weights.has(name) else like.shape[-1:]
    spread = found[-1:] == (size,) and math.prod(found) == size
    return weights.take(name, found if spread else (size,), like.dtype).reshape(size)


def _transposed(linear: Any, name: str, weights: Weights) -> Any:
    """An `equinox.nn.Linear` whose weight is published as `[in, out]`."""
    weight = weights.take(name, linear.weight.shape[::-1], linear.weight.dtype).T
    return replaced(linear, {"weight": weight})


def _by_author(layer: Any, name: str, weights: Weights, names: tuple[str, ...] | None = None) -> Any:
    """A projection of low rank in three arrays: the bias, if there is one, and both matrices."""
    bias, first, second = names or [f"{name}{part}" for part in range(3)]
    if layer is None:
        # A first layer has the arrays, but no use for them.
        weights.skip(bias, first, second)
        return None
    up = _transposed(layer.up, second, weights)
    if up.bias is not None:
        up = replaced(up, {"bias": _vector(up.bias, bias, weights)})
    return replaced(layer, {"down": _transposed(layer.down, first, weights), "up": up})


def rwkv7_time_mix_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """The arguments of `RWKV7TimeMix` (flash-linear-attention's `rwkv7`)."""
    config = _read(config, layer_index, "RWKV7TimeMix")
    width, heads = take(config, "hidden_size"), config.get("num_heads")
    head_dim = config.get("head_dim") or (width // heads if heads else 64)
    values = config.get("value_dim")
    values = values[layer_index] if isinstance(values, list | tuple) else values
    heads = max(width // head_dim, 1)
    if values is not None and values % heads:
        raise config.wrong("value_dim", f"multiples of the {heads} heads")
    ranks = [f"{name}_low_rank_dim" for name in ("decay", "a", "v", "gate")]
    return {
        "embed_dim": width,
        "head_dim": head_dim,
        "v_head_dim": None if values is None else values // heads,
        "value_residual": layer_index != 0,
        "norm_eps": head_dim * take(config, "norm_eps"),
        **{name: config.get(name) for name in ranks},
    }


def rwkv7_channel_mix_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """The arguments of `RWKV7ChannelMix` (flash-linear-attention's `rwkv7`)."""
    config = read_model(config, "RWKV7ChannelMix")
    refuse(config, hidden_act="sqrelu")
    width = take(config, "hidden_size")
    inner = config.get("intermediate_size") or 32 * -(-int(width * take(config, "hidden_ratio")) // 32)
    return {"embed_dim": width, "inner_dim": inner}


def rwkv6_time_mix_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """The arguments of `RWKV6TimeMix` (flash-linear-attention's `rwkv6`)."""
    config = _read(config, layer_index, "RWKV6TimeMix")
    sizes = "num_heads expand_k expand_v proj_low_rank_dim gate_low_rank_dim norm_eps"
    return taken(config, f"embed_dim=hidden_size {sizes}")


def _read(config: Config, layer_index: int, layer: str) -> Entries:
    """The configuration of a model whose layer at this place is not one of attention."""
    entries = read_model(config, layer)
    kind = layer_type(entries, layer_index, type_by_attn)
    check_type(entries, layer_index, kind, (LINEAR,), layer)
    return entries
