"""The arguments of `MultiHeadAttention` for a layer of a published model."""

from collections.abc import Callable
from typing import Any

from ..rotary import RotaryEmbedding
from .configs import check_type, Config, head_width, layer_type, read_model, refuse, take

_FULL, _SLIDING = "full_attention", "sliding_attention"
_QWEN3_NEXT = {"head_dim": 256, "attention_bias": False, "rms_norm_eps": 1e-6, "full_attention_interval": 4}
# What `transformers` takes where the configuration says nothing.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"num_key_value_heads": 16, "head_dim": 256, "attention_bias": False},
    "gemma2": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "sliding_window": 4096,
    },
    "gemma3_text": {
        "hidden_size": 2304,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gpt2": {},
    "gpt_neox": {"attention_bias": True},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "attention_bias": True, "sliding_window": 128},
    "llama": {"attention_bias": False},
    "minimax": {"num_key_value_heads": 8},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
    "olmo2": {"attention_bias": False, "rms_norm_eps": 1e-5},
    "olmoe": {"attention_bias": False, "rms_norm_eps": 1e-5},
    "phi3": {},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen2_moe": {
        "num_key_value_heads": 16,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "qkv_bias": True,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
    "qwen3_next": {**_QWEN3_NEXT, "num_key_value_heads": 2},
    "qwen3_5_text": {**_QWEN3_NEXT, "num_key_value_heads": 4},
}
_LAYER = "MultiHeadAttention"


def attention_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """The arguments of `MultiHeadAttention`, but for `key`, for one layer of a published model.

    Dropout is left out: a layer that has it needs a key in every call outside of inference mode.

    **Arguments:**

    - `config`: the dictionary of its `config.json`; that of the language model is taken out of one with a `text_config`.
    - `layer_index`: which layer, from 0: windows and the rotation may depend on it.

    **Returns:** a dictionary. Raises `ValueError` for a `model_type` or an option that is not known here, and a layer of another kind;
    `CheckpointError` for entries that are missing, of another type or out of bounds.
    """
    config = read_model(config, _DEFAULTS, _LAYER)
    kind = config["model_type"]
    heads, width = take(config, "num_attention_heads", "n_head"), take(config, "hidden_size", "n_embd")
    config.check_divides("num_key_value_heads", "num_attention_heads")
    found = layer_type(config, layer_index, lambda i: default_type(config, i))
    check_type(config, layer_index, found, (_FULL, _SLIDING), _LAYER)
    options: dict[str, Any] = {
        "embed_dim": width,
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": head_width(config),
        "sliding_window": _window(config, found),
        "use_qkv_bias": bool(config.get("attention_bias", False)),
        "use_output_bias": bool(config.get("attention_bias", False)),
    }
    options |= _OTHERS.get(kind, _nothing)(config, layer_index)
    if kind != "gpt2":
        options["rope"] = RotaryEmbedding.from_config(config, layer_type=found)
    return options


def default_type(config: Config, index: int) -> str:
    """The type of a layer in a configuration that lists none."""
    kind = config["model_type"]
    sliding = {
        "gemma2": index % 2 == 0,
        "gpt_oss": index % 2 == 0,
        "gemma3_text": (index + 1) % config.get("sliding_window_pattern", 1) != 0,
        "qwen2": index >= config.get("max_window_layers", 0),
        "qwen2_moe": index % 2 == 0 and index < config.get("max_window_layers", 0),
        "qwen3": index >= config.get("max_window_layers", 0),
    }
    linear = {
        "qwen3_next": (index + 1) % config.get("full_attention_interval", 1) != 0,
        "qwen3_5_text": (index + 1) % config.get("full_attention_interval", 1) != 0,
        "minimax": index % 2 == 1,
    }
    if linear.get(kind, False):
        return "linear_attention"
    return _SLIDING if sliding.get(kind, False) else _FULL


def _window(config: Config, found: str) -> int | None:
    kind, window = config["model_type"], config.get("sliding_window")
    if kind.startswith("qwen") and not config.get("use_sliding_window", False):
        return None
    if kind in ("mistral", "mixtral", "phi3", "minimax", "qwen3_moe"):  # all layers alike
        return window
    return window if found == _SLIDING else None


def _nothing(config: Config, layer_index: int) -> dict[str, Any]:
    return {}


def _no_bias(config: Config, layer_index: int) -> dict[str, Any]:
    return {"use_qkv_bias": False, "use_output_bias": False}


def _qwen2(config: Config, layer_index: int) -> dict[str, Any]:
    return {"use_qkv_bias": True, "use_output_bias": False}


def _qwen2_moe(config: Config, layer_index: int) -> dict[str, Any]:
    return {"use_qkv_bias": bool(config["qkv_bias"]), "use_output_bias": False}


def _qk_norm(config: Config, layer_index: int) -> dict[str, Any]:
    return {"qk_norm": True, "qk_norm_eps": take(config, "rms_norm_eps")}


def _gemma(config: Config, layer_index: int) -> dict[str, Any]:
    refuse(config, use_bidirectional_attention=False)
    return {}


def _gemma2(config: Config, layer_index: int) -> dict[str, Any]:
    scale, cap = take(config, "query_pre_attn_scalar") ** -0.5, config["attn_logit_softcapping"]
    return _gemma(config, layer_index) | {"softmax_scale": scale, "logits_soft_cap": cap}


def _gemma3(config: Config, layer_index: int) -> dict[str, Any]:
    refuse(config, attn_logit_softcapping=())
    scale = take(config, "query_pre_attn_scalar") ** -0.5
    return _gemma(config, layer_index) | _qk_norm(config, layer_index) | {"softmax_scale": scale}


def _gpt_oss(config: Config, layer_index: int) -> dict[str, Any]:
    return {"sinks": True}


def _gpt2(config: Config, layer_index: int) -> dict[str, Any]:
    scale = head_width(config) ** -0.5
    if not config.get("scale_attn_weights", True):
        scale = 1.0
    if config.get("scale_attn_by_inverse_layer_idx", False):
        scale /= layer_index + 1
    return {"softmax_scale": scale, "use_qkv_bias": True, "use_output_bias": True}


def _olmo2(config: Config, layer_index: int) -> dict[str, Any]:
    return {"qk_norm": "all", "qk_norm_eps": take(config, "rms_norm_eps")}


def _olmoe(config: Config, layer_index: int) -> dict[str, Any]:
    refuse(config, clip_qkv=(), sliding_window=())
    return _olmo2(config, layer_index)


def _qwen3_next(config: Config, layer_index: int) -> dict[str, Any]:
    refuse(config, attn_output_gate=True)
    return _qk_norm(config, layer_index) | {"output_gate": True}


_OTHERS: dict[str, Callable[[Config, int], dict[str, Any]]] = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "gpt_oss": _gpt_oss,
    "minimax": _no_bias,
    "mistral": _no_bias,
    "mixtral": _no_bias,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "phi3": _no_bias,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qk_norm,
    "qwen3_moe": _qk_norm,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_next,
}
