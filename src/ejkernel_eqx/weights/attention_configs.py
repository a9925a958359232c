"""Reads the arguments of `MultiHeadAttention` from the configuration of a published model."""

from collections.abc import Callable
from typing import Any

from .._entries import Entries, entries_of
from ..rotary import RotaryEmbedding
from .configs import check_type, Config, head_width, layer_type, read_model, refuse, take
from .hybrid_configs import hybrid_layer_type

_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_ONE_WINDOW = ("mistral", "ministral3", "mixtral", "phi3", "minimax", "qwen3_moe", "starcoder2")
"""Models whose layers are all alike."""
_TYPES = {"llama4_text": (_FULL, _CHUNKED), "zamba2": ("hybrid",)}
"""The types of layers with attention, where they are not full and sliding."""
_ORIGINAL = "original_max_position_embeddings"
_INTERLEAVED = ("cohere", "cohere2", "ernie4_5", "glm4", "helium", "llama4_text")
_LAYER = "MultiHeadAttention"
BERTS = ("bert", "roberta", "xlm-roberta")


def attention_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """Reads the arguments of `MultiHeadAttention` for one layer of a published model.

    Dropout is not read: a layer with dropout needs a key in every call outside of inference mode.

    **Arguments:**

    - `config`: the content of its `config.json`. Of a model with a `text_config`, that part is read.
    - `layer_index`: the index of the layer, from 0. Windows and rotations may depend on it.

    **Returns:** a dictionary of all arguments except `key`.

    **Raises:** `ValueError` for a `model_type` or an option that is not supported, and for a layer of another type. `CheckpointError`, which is a
    `ValueError`, for entries that are missing, of another type or out of bounds.
    """
    config = read_model(config, _LAYER)
    kind = config["model_type"]
    if (source := source_of_keys(config, layer_index)) is not None:
        raise ValueError(
            f"layer_index: expected a layer with keys of its own, received {layer_index}, which reads those of layer {source} "
            "(num_kv_shared_layers); ejx.models builds such layers."
        )
    found = type_of(config, layer_index)
    if kind == "gemma4_text":
        config = _of_one_layer(config, layer_index, found)
    heads, width = take(config, "num_attention_heads", "n_head"), take(config, "hidden_size", "n_embd")
    config.check_divides("num_key_value_heads", "num_attention_heads")
    types = _TYPES.get(kind, (_FULL, _SLIDING))
    check_type(config, layer_index, found, types, _LAYER)
    refuse(config, **_REFUSED.get(kind, {}))
    options: dict[str, Any] = {
        "embed_dim": width,
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": head_width(config),
        "sliding_window": _window(config, found),
    }
    options["use_qkv_bias"], options["use_output_bias"] = _biases(config)
    # Options of the model type come after the general ones, and may replace them.
    if kind in _OTHERS:
        options |= _OTHERS[kind](config, layer_index)
    if _rotates(config, layer_index, found):
        interleaved = kind in _INTERLEAVED
        options["rope"] = RotaryEmbedding.from_config(
            _rotation(config), layer_type=found, interleaved=interleaved
        )
    return options


def cross_layer_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """The arguments of `CrossLayerAttention`, for a layer that reads the keys and values of another one."""
    config = entries_of(config)
    options = attention_options(config.changed(num_kv_shared_layers=0), layer_index)
    return {name: value for name, value in options.items() if name not in ("v_norm", "keys_as_values")}


def source_of_keys(config: Entries, layer_index: int) -> int | None:
    """The index of the layer whose keys and values this one reads: the last layer of its type that has its own. `None` if it has its own."""
    count, shared = config.get("num_hidden_layers"), config.get("num_kv_shared_layers") or 0
    if not shared or count is None or layer_index < count - shared:
        return None
    is_alike = lambda index: type_of(config, index) == type_of(config, layer_index)
    found = [index for index in range(count - shared) if is_alike(index)]
    if not found:
        raise config.wrong("num_kv_shared_layers", f"a layer of the type of layer {layer_index} before those")
    return found[-1]


def _rotates(config: Entries, index: int, found: str) -> bool:
    kind, listed = config["model_type"], config.get("no_rope_layers")
    if kind in ("smollm3", "llama4_text"):  # where 0 stands for none
        if listed and index >= len(listed):
            raise config.wrong("no_rope_layers", f"a number for each layer, also for layer {index}")
        return bool(listed[index] if listed else (index + 1) % config["no_rope_layer_interval"])
    if kind == "granitemoehybrid":
        return config.get("position_embedding_type") == "rope"
    if kind == "cohere2":
        return found == _SLIDING and config.get("sliding_window") is not None
    if kind == "exaone4":
        return found == _SLIDING or config.get("sliding_window") is None
    if kind == "zamba2":
        return bool(config["use_mem_rope"])
    if kind == "olmo_hybrid":  # where a base of null stands for none
        rope = config.inner("rope_parameters")
        named = rope if "rope_theta" in set(rope) else config
        return "rope_theta" not in set(named) or named.get("rope_theta") is not None
    # GPT-2, OPT and BERT have embeddings of positions. In the others, the states of recurrent layers carry the order of the tokens.
    return kind not in ("gpt2", "opt", *BERTS, "jamba", "nemotron_h")


def type_of(config: Entries, index: int) -> str:
    """The type of a layer."""
    return layer_type(config, index, default_type)


def default_type(config: Entries, index: int) -> str:
    """The type of a layer, for configurations without a list of types."""
    kind, has_window = config["model_type"], config.get("sliding_window") is not None
    by_pattern = (index + 1) % config.get("sliding_window_pattern", 1) != 0
    by_interval = (index + 1) % config.get("full_attention_interval", 1) != 0
    sliding = {
        "gemma2": index % 2 == 0,
        "gpt_oss": index % 2 == 0,
        "modernbert": index % config.get("global_attn_every_n_layers", 3) != 0,
        "gemma3_text": by_pattern,
        "gemma4_text": by_pattern and index + 1 != config.get("num_hidden_layers"),
        "olmo3": (index + 1) % 4 != 0,
        "cohere2": by_pattern,
        "exaone4": has_window and by_pattern,
        "smollm3": kind == "smollm3" and has_window and not _rotates(config, index, _FULL),
        "qwen2": index >= config.get("max_window_layers", 0),
        "qwen2_moe": index % 2 == 0 and index < config.get("max_window_layers", 0),
        "qwen3": index >= config.get("max_window_layers", 0),
        "dots1": has_window and index >= config.get("max_window_layers", 0),
    }
    linear = {
        "qwen3_next": by_interval,
        "qwen3_5_text": by_interval,
        "qwen3_5_moe_text": by_interval,
        "minimax": index % 2 == 1,
    }
    if (found := hybrid_layer_type(config, index)) is not None:
        return found
    if kind == "llama4_text":
        has_chunks = config.get("attention_chunk_size") is not None
        return _CHUNKED if has_chunks and _rotates(config, index, _FULL) else _FULL
    if linear.get(kind, False):
        return "linear_attention"
    return _SLIDING if sliding.get(kind, False) else _FULL


def _window(config: Config, found: str) -> int | None:
    kind, window = config["model_type"], config.get("sliding_window")
    # Qwen's configuration has a window even if it is switched off.
    if kind.startswith(("qwen", "smollm3")) and not config.get("use_sliding_window", False):
        return None
    if kind in _ONE_WINDOW:
        return window
    return window if found == _SLIDING else None


def _biases(config: Config) -> tuple[bool, bool]:
    """Returns whether the projections of the input and that of the output have biases."""
    said = _BIASES.get(config["model_type"], ("attention_bias", "attention_bias"))
    inputs, output = (bool(config.get(it, False)) if isinstance(it, str) else it for it in said)
    return inputs, output


def _qk_norm(config: Config, layer_index: int) -> dict[str, Any]:
    return {"qk_norm": True, "qk_norm_eps": take(config, "rms_norm_eps")}


def _gemma2(config: Config, layer_index: int) -> dict[str, Any]:
    scale, cap = take(config, "query_pre_attn_scalar") ** -0.5, config["attn_logit_softcapping"]
    return {"softmax_scale": scale, "logits_soft_cap": cap}


def _gemma3(config: Entries, layer_index: int) -> dict[str, Any]:
    refuse(config, attn_logit_softcapping=(), use_bidirectional_attention=(False, True))
    options = {"softmax_scale": take(config, "query_pre_attn_scalar") ** -0.5}
    if config.get("use_bidirectional_attention"):
        options |= _both_ways(config, layer_index, config["sliding_window"])
    return options | _qk_norm(config, layer_index)


def _both_ways(config: Entries, layer_index: int, window: int | None) -> dict[str, Any]:
    """Attention of an encoder. Its windows are on both sides, and their published size is that of both together."""
    if window is None or type_of(config, layer_index) == _FULL:
        return {"causal": False, "sliding_window": None}
    return {"causal": False, "sliding_window": (window // 2, window // 2)}


def _of_one_layer(config: Entries, index: int, found: str) -> Entries:
    """The configuration of Gemma 4 for one layer. Layers with full attention have sizes of their own."""
    sizes = {"head_dim": config["global_head_dim"]}
    if config["attention_k_eq_v"] and config.get("num_global_key_value_heads"):
        sizes["num_key_value_heads"] = config["num_global_key_value_heads"]
    if config.get(
        "per_layer_config"
    ):  # as newer versions of transformers write it, of the layers that differ
        listed = config.inner("per_layer_config")
        sizes = listed.inner(str(index)).known() if str(index) in set(listed) else {}
    elif found != _FULL:
        sizes = {}
    return config.changed(**sizes, global_head_dim=None)


def _gemma4(config: Entries, layer_index: int) -> dict[str, Any]:
    refuse(config, use_bidirectional_attention="vision")
    take(config, "rope_parameters")
    options = _qk_norm(config, layer_index) | {"v_norm": True, "softmax_scale": 1.0}
    is_full = type_of(config, layer_index) == _FULL
    return options | {"keys_as_values": bool(config["attention_k_eq_v"]) and is_full}


def _opt(config: Config, layer_index: int) -> dict[str, Any]:
    refuse(config, word_embed_proj_dim=config["hidden_size"])
    return {}


def _gpt2(config: Config, layer_index: int) -> dict[str, Any]:
    scale = head_width(config) ** -0.5
    if not config.get("scale_attn_weights", True):
        scale = 1.0
    if config.get("scale_attn_by_inverse_layer_idx", False):
        scale /= layer_index + 1
    return {"softmax_scale": scale}


def _llama4(config: Entries, layer_index: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if type_of(config, layer_index) == _CHUNKED:
        options["chunk_size"] = take(config, "attention_chunk_size")
    if not _rotates(config, layer_index, _FULL):
        has_temperature = bool(config["attn_temperature_tuning"])
        tempered = {"temperature": (float(config["attn_scale"]), config["floor_scale"], 1)}
        return options | (tempered if has_temperature else {})
    # A rotation does not change the mean square, so this norm may come before it.
    return options | ({**_qk_norm(config, layer_index), "qk_norm": "unit"} if config["use_qk_norm"] else {})


def _olmo2(config: Config, layer_index: int) -> dict[str, Any]:
    return {"qk_norm": "all", "qk_norm_eps": take(config, "rms_norm_eps")}


def _ministral3(config: Entries, layer_index: int) -> dict[str, Any]:
    take(config, "rope_scaling", "rope_parameters")
    entries = config.inner("rope_scaling" if config.get("rope_scaling") else "rope_parameters")
    strength = entries.get("llama_4_scaling_beta")
    return {"temperature": (strength, take(entries, _ORIGINAL), 0)} if strength else {}


def _rotation(config: Entries) -> Entries:
    """The configuration without those entries of the rotation that belong to other things."""
    if config["model_type"] != "ministral3":
        return config
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    others = ("llama_4_scaling_beta", "max_position_embeddings")
    return config.changed(**{name: {key: config[name][key] for key in config[name] if key not in others}})


def _falcon_h1(config: Config, layer_index: int) -> dict[str, Any]:
    """The options of Falcon-H1. The factor of its input becomes a part of the factors of the scores and of the branch."""
    factor = config["attention_in_multiplier"]
    if factor != 1:
        refuse(config, attention_bias=False)
    return {"softmax_scale": head_width(config) ** -0.5 * factor**2 * config["key_multiplier"]}


def _zamba2(config: Entries, layer_index: int) -> dict[str, Any]:
    """Of tokens and their embeddings side by side."""
    width, dim = take(config, "hidden_size"), head_width(config)
    return {"embed_dim": 2 * width, "output_size": width, "softmax_scale": (dim / 2) ** -0.5}


def _qwen3_next(config: Config, layer_index: int) -> dict[str, Any]:
    return _qk_norm(config, layer_index) | {"output_gate": True}


_NO_BIAS = "exaone4 jamba lfm2 lfm2_moe nemotron_h minimax minimax_m2 ministral3 mistral mixtral phi3 zamba2"
_BIASES: dict[str, tuple[bool | str, bool | str]] = {
    **dict.fromkeys(_NO_BIAS.split(), (False, False)),
    **dict.fromkeys(("gpt2", "phi", *BERTS), (True, True)),
    "qwen2": (True, False),
    "qwen2_moe": ("qkv_bias", False),
    "stablelm": ("use_qkv_bias", False),
    **dict.fromkeys(("ernie4_5", "starcoder2"), ("use_bias", "use_bias")),
    "opt": ("enable_bias", "enable_bias"),
    **dict.fromkeys(("glm4", "glm4_moe", "helium"), ("attention_bias", False)),
    "seed_oss": ("attention_bias", "attention_out_bias"),
}
"""Whether the projections of the input and that of the output have biases, or the entry that says so, where it is not `attention_bias`."""
_REFUSED: dict[str, dict[str, Any]] = {
    "bamba": {"partial_rotary_factor": 0.5},
    **{key: {"is_decoder": False, "position_embedding_type": "absolute"} for key in BERTS},
    "cohere": {"use_qk_norm": False},
    "falcon": {"alibi": False},
    **{key: {"use_bidirectional_attention": False} for key in ("gemma", "gemma2")},
    "gpt2": {"add_cross_attention": False},
    "modernbert": {"rope_scaling": ()},
    "olmoe": {"clip_qkv": (), "sliding_window": ()},
    "opt": {
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
    },
    **{key: {"qk_layernorm": False} for key in ("phi", "stablelm")},
    **{key: {"attn_output_gate": True} for key in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
    "zamba2": {"use_long_context": False},
}
"""Entries of models by their type, with what they may be: other values would change numbers."""
_OTHERS: dict[str, Callable[[Entries, int], dict[str, Any]]] = {
    "apertus": _qk_norm,
    "dots1": _qk_norm,
    "exaone4": _qk_norm,
    "falcon_h1": _falcon_h1,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
    "glm4_moe": lambda config, index: _qk_norm(config, index) if config["use_qk_norm"] else {},
    "gpt2": _gpt2,
    "gpt_oss": lambda config, index: {"sinks": True},
    **dict.fromkeys(
        ("granite", "granitemoe", "granitemoehybrid"),
        lambda config, index: {"softmax_scale": float(config["attention_multiplier"])},
    ),
    "lfm2": _qk_norm,
    "lfm2_moe": _qk_norm,
    "llama4_text": _llama4,
    **dict.fromkeys(BERTS, lambda config, index: {"causal": False}),
    "minimax_m2": _olmo2,
    "modernbert": lambda config, index: _both_ways(config, index, config["local_attention"]),
    "ministral3": _ministral3,
    "olmo2": _olmo2,
    "olmo3": _olmo2,
    "olmo_hybrid": _olmo2,
    "olmoe": _olmo2,
    "opt": _opt,
    "qwen3": _qk_norm,
    "qwen3_moe": _qk_norm,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_next,
    "qwen3_5_moe_text": _qwen3_next,
    "zamba2": _zamba2,
}
"""The other options of models by their type."""
