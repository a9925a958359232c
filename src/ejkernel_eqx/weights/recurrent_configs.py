"""Reads the arguments of recurrent layers from the configuration of a published model. Arguments and errors are those of `attention_options`."""

import math
from collections.abc import Callable
from typing import Any

from .._entries import Entries
from .attention_configs import default_type
from .configs import check_type, Config, head_width, layer_type, read_model, refuse, take, taken

LINEAR = "linear_attention"


def mamba1_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """Reads the arguments of `Mamba1Mixer` (`mamba`, `falcon_mamba`, `jamba`), as [`attention_options`][ejkernel_eqx.weights.attention_options] does
    for attention."""
    config = _read(config, layer_index, "Mamba1Mixer")
    options = taken(config, "embed_dim=hidden_size dt_rank=time_step_rank state_size conv_width=conv_kernel")
    width, is_jamba = options["embed_dim"], config["model_type"] == "jamba"
    # Mamba's own code computes this rank for "auto".
    if options["dt_rank"] == "auto":
        options["dt_rank"] = math.ceil(width / 16)
    # Jamba's intermediate_size is that of its MLPs.
    inner = None if is_jamba else config.get("intermediate_size")
    options["inner_dim"] = inner or _expanded(config, width, "mamba_expand" if is_jamba else "expand")
    options |= _flags(config, "use_conv_bias use_bias")
    if config["model_type"] != "mamba":
        norms = {"inner_norms": "weighted" if is_jamba else True}
        options |= norms | taken(config, "inner_norm_eps=mixer_rms_eps")
    return options


def mamba2_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """Reads the arguments of `Mamba2Mixer` (`mamba2`, `bamba`, `falcon_h1`, `granitemoehybrid`, `nemotron_h`, `zamba2`), as
    [`attention_options`][ejkernel_eqx.weights.attention_options] does for attention."""
    config = _read(config, layer_index, "Mamba2Mixer")
    if config["model_type"] == "falcon_h1":
        return _granite_mamba2(config) | _falcon_mamba2(config)
    if config["model_type"] == "zamba2":
        # Its published code does not read the configuration's epsilon for this norm.
        return _granite_mamba2(config) | {"norm_eps": 1e-5}
    if config["model_type"] in ("bamba", "granitemoehybrid"):
        return _granite_mamba2(config)
    of_mamba = "mamba_" if config["model_type"] == "nemotron_h" else ""
    config.check_divides("n_groups", f"{of_mamba}num_heads")
    return {
        **taken(config, f"embed_dim=hidden_size state_size head_dim={of_mamba}head_dim num_groups=n_groups"),
        **taken(config, "conv_width=conv_kernel norm_eps=layer_norm_epsilon"),
        "inner_dim": take(config, f"{of_mamba}num_heads") * take(config, f"{of_mamba}head_dim"),
        "dt_limit": _time_steps(config),
        **_flags(config, "use_conv_bias use_bias"),
    }


def _time_steps(config: Entries) -> tuple[float, float] | None:
    low, high = take(config, "time_step_limit")
    return None if (low, high) == (0, math.inf) else (float(low), float(high))


def _granite_mamba2(config: Entries) -> dict[str, Any]:
    width, heads = take(config, "hidden_size"), take(config, "mamba_n_heads")
    given = "mamba_d_ssm" if config.get("mamba_d_ssm") else "mamba_expand"
    inner = config.get("mamba_d_ssm") or _expanded(config, width, given)
    if inner % heads or config["mamba_d_head"] not in ("auto", inner // heads):
        raise config.wrong(
            "mamba_d_head", f"'auto' or the {inner} features of {given} over mamba_n_heads={heads}"
        )
    config.check_divides("mamba_n_groups", "mamba_n_heads")
    sizes = "state_size=mamba_d_state num_groups=mamba_n_groups conv_width=mamba_d_conv norm_eps=rms_norm_eps"
    return {
        **taken(config, f"embed_dim=hidden_size {sizes}"),
        "head_dim": inner // heads,
        "inner_dim": inner,
        "dt_limit": _time_steps(config),
        **_flags(config, "use_conv_bias=mamba_conv_bias use_bias=mamba_proj_bias"),
    }


def _falcon_mamba2(config: Entries) -> dict[str, Any]:
    refuse(config, projectors_bias=bool(config["mamba_proj_bias"]))
    if (factor := config["ssm_in_multiplier"]) != 1:
        refuse(config, mamba_proj_bias=False)
    multipliers = tuple(factor * each for each in config.get("ssm_multipliers") or (1.0,) * 5)
    flags = _flags(config, "use_norm=mamba_rms_norm norm_before_gate=mamba_norm_before_gate")
    return {"multipliers": multipliers, **flags}


def gated_short_convolution_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """Reads the arguments of `GatedShortConvolution` (`lfm2`, `lfm2_moe`), as [`attention_options`][ejkernel_eqx.weights.attention_options] does for
    attention."""
    config = _read(config, layer_index, "GatedShortConvolution")
    return taken(config, "embed_dim=hidden_size conv_width=conv_L_cache") | _flags(
        config, "use_bias=conv_bias"
    )


def _olmo_delta_net(config: Entries) -> dict[str, Any]:
    width, heads = take(config, "hidden_size"), take(config, "num_attention_heads")
    k_heads = config.get("linear_num_key_heads") or heads
    head_dim = config.get("linear_key_head_dim") or int(0.75 * width / k_heads)
    return {
        **taken(config, "embed_dim=hidden_size conv_width=linear_conv_kernel_dim"),
        "num_k_heads": k_heads,
        "num_v_heads": config.get("linear_num_value_heads") or heads,
        "head_dim": head_dim,
        "v_head_dim": config.get("linear_value_head_dim") or 2 * head_dim,
        "norm_eps": 1e-5,  # published code does not read the configuration's for this norm
        **_flags(config, "allow_neg_eigval=linear_allow_neg_eigval"),
    }


def _delta_product(config: Entries) -> dict[str, Any]:
    refuse(config, use_output_gate=True, use_short_conv=True, use_forget_gate=True)
    head_dim = take(config, "head_dim")
    return {
        **taken(
            config,
            "embed_dim=hidden_size num_k_heads=num_heads num_householder conv_width=conv_size norm_eps",
        ),
        "head_dim": head_dim,
        "v_head_dim": _expanded(config, head_dim, "expand_v"),
        **_flags(config, "allow_neg_eigval"),
    }


def gated_delta_net_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """Reads the arguments of `GatedDeltaNet` (`qwen3_next`, `qwen3_5_text`, `olmo_hybrid`, flash-linear-attention's `gated_deltaproduct`), as
    [`attention_options`][ejkernel_eqx.weights.attention_options] does for attention."""
    is_product = lambda entries: entries["model_type"] == "gated_deltaproduct"
    kind = lambda entries, index: (type_by_attn if is_product(entries) else default_type)(entries, index)
    config = _read(config, layer_index, "GatedDeltaNet", kind)
    if is_product(config):
        return _delta_product(config)
    if config["model_type"] == "olmo_hybrid":
        config.check_divides("linear_num_key_heads", "linear_num_value_heads")
        return _olmo_delta_net(config)
    config.check_divides("linear_num_key_heads", "linear_num_value_heads")
    heads = "num_k_heads=linear_num_key_heads num_v_heads=linear_num_value_heads"
    dims = "head_dim=linear_key_head_dim v_head_dim=linear_value_head_dim conv_width=linear_conv_kernel_dim"
    return taken(config, f"embed_dim=hidden_size {heads} {dims} norm_eps=rms_norm_eps")


def lightning_attention_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """Reads the arguments of `LightningAttention` (`minimax`), as [`attention_options`][ejkernel_eqx.weights.attention_options] does for
    attention."""
    config = _read(config, layer_index, "LightningAttention")
    return {
        **taken(config, "embed_dim=hidden_size num_heads=num_attention_heads num_layers=num_hidden_layers"),
        "head_dim": head_width(config),
        "layer_index": layer_index,
        "norm_eps": 1e-6,  # published code does not read the configuration's for this norm
    }


def kimi_delta_attention_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """Reads the arguments of `KimiDeltaAttention` (`kimi_linear`), as [`attention_options`][ejkernel_eqx.weights.attention_options] does for
    attention."""
    config = _read(config, layer_index, "KimiDeltaAttention")
    nested = config.inner("linear_attn_config")
    return {
        **taken(config, "embed_dim=hidden_size norm_eps=rms_norm_eps"),
        "num_heads": nested.get("num_heads") or config["linear_num_heads"],
        "head_dim": nested.get("head_dim") or config["linear_head_dim"],
        "conv_width": nested.get("short_conv_kernel_size") or config["linear_conv_kernel_dim"],
    }


def gated_linear_attention_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """Reads the arguments of `GatedLinearAttention` (flash-linear-attention's `gla`), as
    [`attention_options`][ejkernel_eqx.weights.attention_options] does for attention."""
    config = _read(config, layer_index, "GatedLinearAttention", type_by_attn)
    config.check_divides("num_kv_heads", "num_heads")
    refuse(config, feature_map=(), elementwise_affine=True, use_gk=True, use_gv=False)
    return {
        **taken(config, "embed_dim=hidden_size num_heads expand_k expand_v conv_width=conv_size norm_eps"),
        "num_kv_heads": config.get("num_kv_heads"),
        "gate_min": config.get("clamp_min"),
        **_flags(config, "use_short_conv output_gate=use_output_gate"),
    }


def type_by_attn(config: Entries, index: int) -> str:
    """The type of a layer in flash-linear-attention's configurations."""
    return "attention" if index in (config.inner("attn").get("layers") or ()) else LINEAR


def _expanded(config: Entries, width: int, name: str = "expand") -> int:
    inner = int(take(config, name) * width)
    if not 1 <= inner <= 2**20:
        raise config.wrong(name, f"a factor by which the {width} features become 1 to {2**20}")
    return inner


def _flags(config: Config, names: str) -> dict[str, bool]:
    """The flags in `names`, as `taken` reads them. Null is false."""
    pairs = (name.partition("=") for name in names.split())
    return {argument: bool(config[entry or argument]) for argument, _, entry in pairs}


def _read(
    config: Config,
    layer_index: int,
    layer: str,
    default: Callable[[Entries, int], str] = default_type,
) -> Entries:
    """The configuration of a model whose layer with this index is recurrent. `default` gives the type of a layer, if the configuration has no
    list."""
    entries = read_model(config, layer)
    kind = layer_type(entries, layer_index, default)
    if entries["model_type"] != "falcon_h1":  # whose layers have attention and Mamba-2 each
        types = (LINEAR, "hybrid") if entries["model_type"] == "zamba2" else (LINEAR,)
        check_type(entries, layer_index, kind, types, layer)
    if entries["model_type"] != "zamba2":  # where it is that of the MLPs
        refuse(entries, hidden_act=("silu", "swish"))
    refuse(entries, mamba_hidden_act=("silu", "swish"))
    return entries
