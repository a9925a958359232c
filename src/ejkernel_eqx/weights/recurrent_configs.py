"""The arguments of recurrent layers for a layer of a published model; each function as `attention_options`."""

import math
from typing import Any

from .._entries import Entries
from .configs import check_type, Config, head_width, layer_type, read_model, refuse, take

_LINEAR = "linear_attention"


def mamba1_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """The arguments of `Mamba1Mixer` (`mamba`, `falcon_mamba`)."""
    defaults = {
        "state_size": 16,
        "expand": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": "auto",
    }
    known = {"mamba": defaults, "falcon_mamba": {**defaults, "mixer_rms_eps": 1e-6}}
    config = read_model(config, known, "Mamba1Mixer")
    _check_place(config, layer_index, lambda index: _LINEAR, "Mamba1Mixer")
    _check_silu(config)
    width, rank = take(config, "hidden_size"), take(config, "time_step_rank")
    options = {
        "embed_dim": width,
        "state_size": take(config, "state_size"),
        "conv_width": take(config, "conv_kernel"),
        "inner_dim": config.get("intermediate_size") or _expanded(config, width),
        "dt_rank": math.ceil(width / 16) if rank == "auto" else rank,
        "use_conv_bias": bool(config["use_conv_bias"]),
        "use_bias": bool(config["use_bias"]),
    }
    if config["model_type"] == "falcon_mamba":
        options |= {"inner_norms": True, "inner_norm_eps": take(config, "mixer_rms_eps")}
    return options


def mamba2_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """The arguments of `Mamba2Mixer` (`mamba2`)."""
    defaults = {
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": (0.0, math.inf),
    }
    config = read_model(config, {"mamba2": defaults}, "Mamba2Mixer")
    _check_place(config, layer_index, lambda index: _LINEAR, "Mamba2Mixer")
    _check_silu(config)
    config.check_divides("n_groups", "num_heads")
    low, high = take(config, "time_step_limit")
    return {
        "embed_dim": take(config, "hidden_size"),
        "state_size": take(config, "state_size"),
        "head_dim": take(config, "head_dim"),
        "inner_dim": take(config, "num_heads") * take(config, "head_dim"),
        "num_groups": take(config, "n_groups"),
        "conv_width": take(config, "conv_kernel"),
        "dt_limit": None if (low, high) == (0, math.inf) else (float(low), float(high)),
        "norm_eps": take(config, "layer_norm_epsilon"),
        "use_conv_bias": bool(config["use_conv_bias"]),
        "use_bias": bool(config["use_bias"]),
    }


def gated_delta_net_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """The arguments of `GatedDeltaNet` (`qwen3_next`, `qwen3_5_text`)."""
    defaults = {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "full_attention_interval": 4,
    }
    config = read_model(config, {"qwen3_next": defaults, "qwen3_5_text": defaults}, "GatedDeltaNet")
    by_default = lambda index: (
        _LINEAR if (index + 1) % config["full_attention_interval"] else "full_attention"
    )
    _check_place(config, layer_index, by_default, "GatedDeltaNet")
    _check_silu(config)
    config.check_divides("linear_num_key_heads", "linear_num_value_heads")
    return {
        "embed_dim": take(config, "hidden_size"),
        "num_k_heads": take(config, "linear_num_key_heads"),
        "num_v_heads": take(config, "linear_num_value_heads"),
        "head_dim": take(config, "linear_key_head_dim"),
        "v_head_dim": take(config, "linear_value_head_dim"),
        "conv_width": take(config, "linear_conv_kernel_dim"),
        "norm_eps": take(config, "rms_norm_eps"),
    }


def lightning_attention_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """The arguments of `LightningAttention` (`minimax`)."""
    config = read_model(config, {"minimax": {}}, "LightningAttention")
    by_default = lambda index: _LINEAR if index % 2 else "full_attention"
    _check_place(config, layer_index, by_default, "LightningAttention")
    _check_silu(config)
    width, heads = take(config, "hidden_size"), take(config, "num_attention_heads")
    return {
        "embed_dim": width,
        "num_heads": heads,
        "head_dim": head_width(config),
        "layer_index": layer_index,
        "num_layers": take(config, "num_hidden_layers"),
        "norm_eps": 1e-6,  # published code does not read the configuration's for this norm
    }


def kimi_delta_attention_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """The arguments of `KimiDeltaAttention` (`kimi_linear`)."""
    defaults = {
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-5,
    }
    config = read_model(config, {"kimi_linear": defaults}, "KimiDeltaAttention")
    nested = config.inner("linear_attn_config")
    kda_layers = nested.get("kda_layers")  # counted from 1
    listed = lambda index: _LINEAR if index + 1 in kda_layers else "full_attention"
    by_default = lambda index: "full_attention" if index and index % 4 == 0 else _LINEAR
    _check_place(config, layer_index, by_default if kda_layers is None else listed, "KimiDeltaAttention")
    _check_silu(config)
    return {
        "embed_dim": take(config, "hidden_size"),
        "num_heads": nested.get("num_heads") or config["linear_num_heads"],
        "head_dim": nested.get("head_dim") or config["linear_head_dim"],
        "conv_width": nested.get("short_conv_kernel_size") or config["linear_conv_kernel_dim"],
        "norm_eps": take(config, "rms_norm_eps"),
    }


def gated_linear_attention_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """The arguments of `GatedLinearAttention` (flash-linear-attention's `gla`)."""
    defaults = {
        "hidden_size": 2048,
        "num_heads": 4,
        "expand_k": 0.5,
        "expand_v": 1,
        "use_short_conv": False,
        "conv_size": 4,
        "use_output_gate": True,
        "norm_eps": 1e-6,
    }
    config = read_model(config, {"gla": defaults}, "GatedLinearAttention")
    hybrid = config.inner("attn").get("layers") or ()
    kind = lambda index: "attention" if index in hybrid else _LINEAR
    _check_place(config, layer_index, kind, "GatedLinearAttention")
    _check_silu(config)
    config.check_divides("num_kv_heads", "num_heads")
    refuse(config, feature_map=(), elementwise_affine=True, use_gk=True, use_gv=False)
    return {
        "embed_dim": take(config, "hidden_size"),
        "num_heads": take(config, "num_heads"),
        "num_kv_heads": config.get("num_kv_heads"),
        "expand_k": take(config, "expand_k"),
        "expand_v": take(config, "expand_v"),
        "use_short_conv": bool(config["use_short_conv"]),
        "conv_width": take(config, "conv_size"),
        "output_gate": bool(config["use_output_gate"]),
        "gate_min": config.get("clamp_min"),
        "norm_eps": take(config, "norm_eps"),
    }


def _expanded(config: Entries, width: int) -> int:
    inner = int(take(config, "expand") * width)
    if not 1 <= inner <= 2**20:
        raise config.wrong("expand", f"a factor by which the {width} features become 1 to {2**20}")
    return inner


def _check_place(config: Config, layer_index: int, default: Any, layer: str) -> None:
    check_type(config, layer_index, layer_type(config, layer_index, default), (_LINEAR,), layer)


def _check_silu(config: Config) -> None:
    refuse(config, hidden_act=("silu", "swish"))
