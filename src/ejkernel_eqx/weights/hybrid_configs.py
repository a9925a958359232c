"""Renames the entries of hybrid models to those that the readers of layers know."""

import math
from collections.abc import Callable
from typing import Any

from .._entries import Entries

_LINEAR, _FULL = "linear_attention", "full_attention"
_TYPES = {"mamba": _LINEAR, "conv": _LINEAR, "attention": _FULL}
_BLOCKS = {"M": _LINEAR, "*": _FULL, "-": "mlp", "E": "moe"}
_MLP_TYPES = {"mlp": "dense", "moe": "sparse"}


def hybrid_entries(config: Entries) -> Entries:
    """The same configuration with renamed entries. A configuration that was renamed before stays as it is."""
    kind = config.get("model_type")
    renamed = {new: config.get(old) for new, old in _RENAMED.get(kind, {}).items()}
    config = config.changed(**{name: value for name, value in renamed.items() if value is not None})
    if kind in _OTHERS:
        config = _OTHERS[kind](config)
    types = config.get("layer_types") if kind in _TYPED else None
    return config if types is None else config.changed(layer_types=[_TYPES.get(name, name) for name in types])


def hybrid_layer_type(config: Entries, index: int) -> str | None:
    """The type of a layer, for hybrid models without a list of types; `None` for other models."""
    is_full = _IS_FULL.get(config["model_type"])
    if is_full is None:
        return None
    return _FULL if is_full(config, index) else _LINEAR


def _is_full_in_kimi(config: Entries, index: int) -> bool:
    layers = config.inner("linear_attn_config").get("kda_layers")  # counted from 1
    return index > 0 and (index % 4 == 0 if layers is None else index + 1 not in layers)


def _lfm2(config: Entries) -> Entries:
    if not config.get("block_auto_adjust_ff_dim", config["model_type"] == "lfm2"):
        return config
    size = int(2 * config.get("intermediate_size", 12288) / 3)
    if (factor := config.get("block_ffn_dim_multiplier", 1.0)) is not None:
        multiple = config.get("block_multiple_of", 256)
        size = -(-int(factor * size) // multiple) * multiple
    return config.changed(intermediate_size=size, block_auto_adjust_ff_dim=False)


def _nemotron_h(config: Entries) -> Entries:
    """The blocks of Nemotron-H, each a mixer or an MLP, as layers of a mixer and the MLP after it."""
    if config.get("mlp_layer_types"):
        return config
    name = "layers_block_type"
    if (blocks := config.get(name)) is None:
        name, pattern = "hybrid_override_pattern", config.get("hybrid_override_pattern") or "ME*-"
        blocks = [_BLOCKS.get(letter, letter) for letter in pattern]
    mixers: list[str] = []
    mlps: list[str] = []
    for block in (_TYPES.get(block, block) for block in blocks):
        if block in (_LINEAR, _FULL):
            mixers.append(block)
            mlps.append("none")
        elif block in _MLP_TYPES and mlps and mlps[-1] == "none":
            mlps[-1] = _MLP_TYPES[block]
        else:
            raise config.wrong(name, "Mamba-2, attention, and each MLP or mixture behind one of them")
    # Published code does not read time_step_limit for this model.
    limit = [config.get("time_step_min", 1e-3), math.inf]
    types = {"layer_types": mixers, "mlp_layer_types": mlps}
    return config.changed(**types, num_hidden_layers=len(mixers), time_step_limit=limit)


def _zamba2(config: Entries) -> Entries:
    """With what published code computes. Attention takes tokens and their embeddings side by side."""
    limit = [config.get("time_step_min", 1e-3), math.inf]
    config = config.changed(time_step_limit=limit, mamba_d_head="auto")
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not width or not heads:
        return config
    if 2 * width % heads:
        raise config.wrong(
            "num_attention_heads", f"a divisor of the {2 * width} features of hidden_size, twice"
        )
    size = config.get("intermediate_size") or 4 * width
    return config.changed(head_dim=2 * width // heads, intermediate_size=size)


_IS_FULL: dict[Any, Callable[[Entries, int], bool]] = {
    **dict.fromkeys(("falcon_mamba", "granitemoehybrid", "mamba", "mamba2"), lambda config, index: False),
    "bamba": lambda config, index: index in (config.get("attn_layer_indices") or ()),
    "jamba": lambda config, index: index % config["attn_layer_period"] == config["attn_layer_offset"],
    "kimi_linear": _is_full_in_kimi,
    "lfm2": lambda config, index: config.get("full_attn_idxs") is None or index in config["full_attn_idxs"],
    # Every fourth layer has attention; in a smaller model, the last one.
    "olmo_hybrid": lambda config, index: (
        index % 4 == 3 or index == config.get("num_hidden_layers", 4) - 1 < 3
    ),
}
_TYPED = ("granitemoehybrid", "lfm2", "lfm2_moe", "zamba2")
"""Models that list the types of layers, some of them by names of their own."""
_LFM2 = {
    "rms_norm_eps": "norm_eps",
    "intermediate_size": "block_ff_dim",
    "tie_word_embeddings": "tie_embedding",
}
_RENAMED: dict[Any, dict[str, str]] = {
    "falcon_h1": {"logit_scale": "lm_head_multiplier"},
    "jamba": {
        "state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "time_step_rank": "mamba_dt_rank",
        "mixer_rms_eps": "rms_norm_eps",
        "use_conv_bias": "mamba_conv_bias",
        "use_bias": "mamba_proj_bias",
    },
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2 | {"first_k_dense_replace": "num_dense_layers"},
    "nemotron_h": {
        "conv_kernel": "mamba_d_conv",
        "n_groups": "mamba_n_groups",
        "state_size": "ssm_state_size",
        "time_step_min": "mamba_dt_min",
        "use_conv_bias": "mamba_conv_bias",
    },
    "zamba2": {
        "layer_types": "layers_block_type",
        "mamba_n_groups": "mamba_ngroups",
        "mamba_n_heads": "n_mamba_heads",
        "mamba_proj_bias": "add_bias_linear",
    },
}
_OTHERS: dict[Any, Callable[[Entries], Entries]] = {
    "lfm2": _lfm2,
    "nemotron_h": _nemotron_h,
    "zamba2": _zamba2,
}
