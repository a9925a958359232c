"""Published models as decoders: what their `config.json` means here."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..weights.attention_configs import attention_options, default_type
from ..weights.configs import layer_type, unit_offset_norms
from ..weights.expert_configs import expert_defaults, experts_of, mixture_of_experts_options
from ..weights.latent_configs import latent_attention_options
from ..weights.recurrent_configs import (
    gated_delta_net_options,
    lightning_attention_options,
    mamba1_options,
    mamba2_options,
)
from .config import DecoderConfig, LayerConfig, MLPConfig, MoEConfig, Norms

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


class _Family(NamedTuple):
    """What is common to the models of one `model_type`, besides their mixers."""

    norms: Norms = "pre"
    attention: str = "attention"
    """The mixer of layers with attention."""
    recurrent: str | None = None
    """The mixer of layers without attention."""
    scaled_embedding: bool = False
    has_mlp: bool = True
    defaults: Mapping[str, Any] = {}
    """Of entries that published configurations leave out."""


_TANH = "gelu_pytorch_tanh"
_EPS = {"rms_norm_eps": 1e-5}
_TIED = {"tie_word_embeddings": True}
_GEMMA3 = {"vocab_size": 262_208, "hidden_size": 2304, "num_hidden_layers": 26, "intermediate_size": 9216}
_MAMBA = {"vocab_size": 50_280, "hidden_size": 768, "num_hidden_layers": 32, "layer_norm_epsilon": 1e-5}

FAMILIES: dict[str, _Family] = {
    "llama": _Family(),
    "mistral": _Family(),
    "qwen2": _Family(),
    "qwen3": _Family(),
    "phi3": _Family(defaults=_EPS),
    "gemma": _Family(scaled_embedding=True, defaults=_TIED),
    "gemma2": _Family("around", scaled_embedding=True, defaults=_TIED | {"final_logit_softcapping": 30.0}),
    "gemma3_text": _Family("around", scaled_embedding=True, defaults=_TIED | _GEMMA3),
    "gpt_oss": _Family(defaults=_EPS),
    "olmo2": _Family("post", defaults=_EPS),
    "deepseek_v2": _Family(attention="latent_attention"),
    "deepseek_v3": _Family(attention="latent_attention"),
    "mixtral": _Family(defaults=_EPS),
    "olmoe": _Family(defaults=_EPS),
    "qwen2_moe": _Family(),
    "qwen3_moe": _Family(),
    "mamba": _Family(recurrent="mamba1", has_mlp=False, defaults=_TIED | _MAMBA),
    "falcon_mamba": _Family(recurrent="mamba1", has_mlp=False, defaults=_TIED | _MAMBA),
    "mamba2": _Family(recurrent="mamba2", has_mlp=False, defaults=_MAMBA),
    "qwen3_next": _Family(
        recurrent="gated_delta_net",
        defaults={"full_attention_interval": 4},
    ),
    "minimax": _Family(
        "residual",
        recurrent="lightning_attention",
        defaults=_EPS,
    ),
}
"""The published models that a `Decoder` can be, by the `model_type` of their configuration."""


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads the configuration of a published model into a `DecoderConfig`.

    **Arguments:**

    - `config`: the content of its `config.json`, or what `to_dict()` of a `transformers` configuration returns. Of a model with several parts
        the text model is read.

    **Raises:** `ValueError` with the reason for a model that a `Decoder` does not support, or for a configuration with missing
    entries.
    """
    if not isinstance(config, Mapping):
        raise ValueError(
            f"config: expected the dictionary of a config.json, received {type(config).__name__}; json.load reads it, and a configuration of "
            "transformers gives it by to_dict()."
        )
    whole, config = config, config.get("text_config") or config
    if whole.get("model_type") in _BIDIRECTIONAL_PROMPTS:
        raise ValueError(
            f"model_type: expected a causal model, received {whole['model_type']!r}, whose prompts see each other in both directions; a Decoder "
            "has no such mask."
        )
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(
            f"model_type: expected one of {', '.join(sorted(FAMILIES))}, received {kind!r}; build a DecoderConfig by hand."
        )
    config = {**FAMILIES[kind].defaults, **config}
    needed = (*_NEEDED, "intermediate_size") if FAMILIES[kind].has_mlp else _NEEDED
    if absent := [name for name in needed if config.get(name) is None]:
        raise ValueError(
            f"config: expected an entry {absent[0]!r} for model_type {kind!r}, received none; pass the whole config.json."
        )
    family, width = FAMILIES[kind], config["hidden_size"]
    layers = tuple(_layer(config, family, index) for index in range(config["num_hidden_layers"]))
    # Last, as converting the weights helps only where the rest is supported.
    if config.get("quantization_config") or whole.get("quantization_config"):
        raise ValueError(
            "quantization_config: expected a model in floats, received a quantised one; convert its weights to bfloat16 first."
        )
    eps = config.get("rms_norm_eps", config.get("layer_norm_epsilon", 1e-6))
    return DecoderConfig(
        config["vocab_size"],
        width,
        layers,
        norm_eps=eps,
        embedding_scale=math.sqrt(width) if family.scaled_embedding else 1.0,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        logits_soft_cap=config.get("final_logit_softcapping"),
        unit_offset_norms=unit_offset_norms(config),
        stop_tokens=stop_tokens(config) or stop_tokens(whole),
    )


def stop_tokens(config: Mapping[str, Any]) -> tuple[int, ...]:
    found = config.get("eos_token_id")
    return () if found is None else tuple(found) if isinstance(found, list | tuple) else (int(found),)


_BIDIRECTIONAL_PROMPTS = ("paligemma", "colpali")
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers")
_OPTIONS = {
    "attention": attention_options,
    "latent_attention": latent_attention_options,
    "mamba1": mamba1_options,
    "mamba2": mamba2_options,
    "gated_delta_net": gated_delta_net_options,
    "lightning_attention": lightning_attention_options,
}
_PLACE = ("embed_dim", "layer_index", "num_layers")  # which the decoder says itself


def _mixer(config: Mapping[str, Any], family: _Family, index: int) -> tuple[str, dict[str, Any]]:
    """The name of a layer's mixer and what it is built with."""
    mixer = family.attention
    if family.recurrent is not None:
        # A model without attention lists no types.
        kind = (
            layer_type(config, index, lambda i: default_type(config, i))
            if family.has_mlp
            else "linear_attention"
        )
        mixer = family.recurrent if kind == "linear_attention" else mixer
    options = _OPTIONS[mixer](config, index)
    return mixer, {name: value for name, value in options.items() if name not in _PLACE}


def _layer(config: Mapping[str, Any], family: _Family, index: int) -> LayerConfig:
    mixer, options = _mixer(config, family, index)
    branch = "linear_attn" if mixer == "lightning_attention" else "full_attn"
    scales = lambda name: (
        float(config.get(f"{name}_alpha_factor", 1)),
        float(config.get(f"{name}_beta_factor", 1)),
    )
    return LayerConfig(
        mixer,
        options,
        _mlp(config, index) if family.has_mlp else None,
        family.norms,
        mixer_scales=scales(branch),
        mlp_scales=scales("mlp"),
    )


def _mlp(config: Mapping[str, Any], index: int) -> MLPConfig | MoEConfig:
    # A mixture of one expert is that expert.
    if experts_of({**expert_defaults(config["model_type"]), **config}, index) > 1:
        options = mixture_of_experts_options(config, index)
        return MoEConfig({name: value for name, value in options.items() if name != "embed_dim"})
    if config["model_type"] == "gpt_oss":
        limit = config.get("swiglu_limit", 7.0), config.get("swiglu_alpha", 1.702)
        if limit != (7.0, 1.702):
            raise ValueError(
                f"swiglu_limit, swiglu_alpha: expected 7.0 and 1.702, received {limit}; no other are supported."
            )
        return MLPConfig(config["intermediate_size"], "clamped_swiglu", use_bias=True)
    name = _activation(config)
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"hidden_act: expected one of {', '.join(_ACTIVATIONS)}, received {name!r}; build a DecoderConfig by hand."
        )
    has_bias = config["model_type"] == "llama" and bool(config.get("mlp_bias", False))
    return MLPConfig(config["intermediate_size"], _ACTIVATIONS[name], has_bias)  # pyright: ignore[reportArgumentType]


def _activation(config: Mapping[str, Any]) -> str:
    kind = config["model_type"]
    if kind in ("gemma2", "gemma3_text"):
        return config.get("hidden_activation") or _TANH  # they do not read hidden_act
    if kind != "gemma":
        return config.get("hidden_act") or "silu"
    # The first Gemma files say "gelu" and mean the approximation that the models were trained with.
    name, other = config.get("hidden_act") or "gelu", config.get("hidden_activation")
    meant = lambda name: _TANH if name == "gelu" else name
    if other is not None and meant(other) != meant(name):
        raise ValueError(
            f"hidden_activation: expected the same as hidden_act, received {other!r} and {name!r}; which of them counts depends on the version of "
            "transformers. Correct the config.json."
        )
    return meant(name)
