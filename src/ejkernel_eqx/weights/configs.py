"""Functions that all readers of published configurations (`config.json`) share."""

import functools
import importlib.resources
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._entries import Entries, entries_of, shown
from .._errors import CheckpointError
from .hybrid_configs import hybrid_entries

Config = Mapping[str, Any]
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh"}
ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
"""The activations by their published names."""
_UNIT_OFFSET = ("gemma", "gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_QWEN2_VL = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8, "max_window_layers": 80}
_QWEN3_VL_MOE = {"num_local_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
_QWEN3_VL_MOE |= {"num_key_value_heads": 16, "head_dim": 128, "rope_theta": 5e5, "norm_topk_prob": True}
_KIMI_LINEAR = {"n_group": "num_expert_group", "norm_topk_prob": "moe_renormalize"}
_KIMI_LINEAR |= {"num_experts_per_tok": "num_experts_per_token", "n_shared_experts": "num_shared_experts"}
_KIMI_LINEAR |= {"scoring_func": "moe_router_activation_func"}
_RENAMED = {
    "gpt2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "hidden_act": "activation_function",
        "max_position_embeddings": "n_positions",
    },
    "opt": {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
    "falcon": {"intermediate_size": "ffn_hidden_size", "hidden_act": "activation", "attention_bias": "bias"},
}
"""Entries under another name, by `model_type`."""
ALIASES: dict[str, tuple[str, Config]] = {
    "kimi_k2": ("deepseek_v3", {}),
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), ("qwen2", _QWEN2_VL)),
    "qwen3_vl_text": ("qwen3", {"rope_theta": 5e5}),
    "qwen3_vl_moe_text": ("qwen3_moe", _QWEN3_VL_MOE),
}
"""Models that are others under another `model_type`, and the entries that they leave out otherwise."""


@functools.cache
def defaults_of(layer: str) -> Mapping[str, Mapping[str, Any]]:
    """The default entries of `transformers`, by `model_type`, for all models that have this layer."""
    file = importlib.resources.files("ejkernel_eqx.weights").joinpath("defaults.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))[layer]


def read_model(config: Any, layer: str) -> Entries:
    """The configuration of the language model, with the defaults of `transformers`. A model without this layer is refused."""
    entries, known = text_entries(config), defaults_of(layer)
    kind = entries.get("model_type")
    if kind is None or kind not in known:
        raise ValueError(
            f"config: expected a model_type with a counterpart of {layer}, one of {', '.join(sorted(known))}, received {shown(kind)}; build the "
            "layer from its own arguments."
        )
    return entries.over(known[kind])


def text_entries(config: Any) -> Entries:
    """The entries of the language model, which may be a part of the configuration."""
    entries = entries_of(config)
    entries = entries.inner("text_config") if entries.get("text_config") else entries
    kind = entries.get("model_type")
    if kind == "kimi_linear":
        renamed = {name: entries.raw(other) for name, other in _KIMI_LINEAR.items()}
        return entries.changed(**{name: value for name, value in renamed.items() if value is not None})
    if kind == "gemma4_text" and (types := entries.get("layer_types")):
        return entries.changed(layer_types=[*types[:-1], "full_attention"])  # as transformers has it
    if kind in _RENAMED:
        return _renamed(entries, kind)
    if kind not in ALIASES:
        return hybrid_entries(entries)
    kind, defaults = ALIASES[kind]
    return entries.changed(model_type=kind).over(defaults)


def _renamed(entries: Entries, kind: str) -> Entries:
    """The entries by the names that most models use. Entries that are left out are derived from others."""
    own = {name: entries.get(other) for name, other in _RENAMED[kind].items() if entries.raw(name) is None}
    own = {name: value for name, value in own.items() if value is not None}
    entries = entries.changed(**own)
    if kind in ("gpt2", "falcon") and entries.get("hidden_size"):
        entries = entries.over({"intermediate_size": 4 * entries["hidden_size"]})
    if kind == "falcon" and not entries.get("new_decoder_architecture") and entries.get("multi_query", True):
        return entries.changed(num_key_value_heads=1)
    return entries.changed(num_key_value_heads=entries.get("num_kv_heads")) if kind == "falcon" else entries


def take(config: Config, *names: str) -> Any:
    """The value of the first of these entries that is there."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise CheckpointError(
        f"config: expected an entry {' or '.join(map(repr, names))} for model_type {config.get('model_type')!r}, received none; pass the whole "
        "config.json."
    )


def taken(config: Config, names: str) -> dict[str, Any]:
    """The arguments in `names`. Each has the entry of its own name, or of the name after `=`."""
    pairs = (name.partition("=") for name in names.split())
    return {argument: take(config, entry or argument) for argument, _, entry in pairs}


def head_width(config: Config) -> int:
    """The features of a head. `head_dim` may be left out."""
    if config.get("head_dim"):
        return config["head_dim"]
    width, heads = take(config, "hidden_size", "n_embd"), take(config, "num_attention_heads", "n_head")
    if width % heads:
        name = "num_attention_heads" if config.get("num_attention_heads") else "n_head"
        raise entries_of(config).wrong(name, f"a divisor of the {width} features, as there is no head_dim")
    return width // heads


def refuse(config: Config, **unknown: Any) -> None:
    """Refuses entries that would change the result, unless they have one of these values."""
    for name, values in unknown.items():
        found = config.get(name)
        allowed = values if isinstance(values, tuple) else (values,)
        if found is not None and found not in allowed:
            raise ValueError(
                f"config: expected {name} to be {' or '.join(map(repr, allowed)) or 'null'} for model_type {config.get('model_type')!r}, received "
                f"{found!r}; this layer has no such option."
            )


def layer_type(config: Config, layer_index: Any, default: Callable[[Any, int], str]) -> str:
    """The type of a layer in the list of the configuration; without a list, `default(config, layer_index)`."""
    count = config.get("num_hidden_layers", config.get("n_layer"))
    if isinstance(layer_index, bool) or not isinstance(layer_index, int) or layer_index < 0:
        raise ValueError(
            f"layer_index: expected a whole number from 0 on, received {layer_index!r}; layers are counted from 0."
        )
    types: Sequence[str] | None = config.get("layer_types")
    count = len(types) if types is not None else count
    if count is not None and layer_index >= count:
        raise ValueError(
            f"layer_index: expected a layer of the {count} that the model has, received {layer_index}; they are counted from 0."
        )
    return default(config, layer_index) if types is None else types[layer_index]


def check_type(config: Config, layer_index: int, found: str, expected: Sequence[str], layer: str) -> None:
    if found not in expected:
        raise ValueError(
            f"layer_index: expected a layer of type {' or '.join(map(repr, expected))} for {layer}, received {layer_index}, which is of type "
            f"{found!r} in this {config.get('model_type')} model; another layer of ejkernel_eqx.nn is its counterpart."
        )


def unit_offset_norms(config: Config) -> bool:
    """Returns whether the RMS norms of a model multiply by `1 + weight`. [`ejkernel_eqx.load_published`][] needs to know that."""
    return text_entries(config).get("model_type") in _UNIT_OFFSET
