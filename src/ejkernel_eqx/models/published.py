"""Reads the `config.json` of published models into configurations of decoders and encoders."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from .._entries import Entries, entries_of, shown
from .._errors import CheckpointError
from .._signatures import nearest
from ..weights.attention_configs import BERTS, source_of_keys, type_of
from ..weights.configs import ACTIVATIONS, ALIASES, refuse, text_entries, unit_offset_norms
from ..weights.expert_configs import experts_of, mixture_of_experts_options
from .config import (
    BranchConfig,
    DecoderConfig,
    EncoderConfig,
    LayerConfig,
    MLPConfig,
    MoEConfig,
    Norms,
    NormType,
    SharedBlockConfig,
)
from .mixers import LAYERS


class _Family(NamedTuple):
    """The facts that the models of one `model_type` share, besides their mixers."""

    norms: Norms = "pre"
    attention: str = "attention"
    """The mixer of layers with attention."""
    recurrent: str | None = None
    """The mixer of layers without attention."""
    scaled_embedding: bool = False
    has_mlp: bool = True
    has_gate: bool = True
    """Whether its MLPs have a gate."""
    norm_type: NormType = "rms"
    mlp_bias: bool | str = False
    """Whether the projections of its MLPs have biases, or the entry that says so."""
    has_positions: bool = False
    """Whether it has learned embeddings of positions."""
    output_scale: bool = False
    recurrent_norms: Norms | None = None
    """The norms of layers without attention, if they differ."""
    beside: str | None = None
    """The second mixer of every layer."""
    is_encoder: bool = False
    """Whether its tokens see later ones."""
    defaults: Mapping[str, Any] = {}
    """Values of entries that published configurations leave out."""


_TANH = "gelu_pytorch_tanh"
_EPS = {"rms_norm_eps": 1e-5}
_LAYER_EPS = {"layer_norm_eps": 1e-5, "norm_epsilon": 1e-5}
_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
_TIED = {"tie_word_embeddings": True}
_GEMMA3 = {"vocab_size": 262_208, "hidden_size": 2304, "num_hidden_layers": 26, "intermediate_size": 9216}
_OPT, _FALCON = {"enable_bias": True}, {"attention_bias": False, "parallel_attn": True}
_GEMMA4 = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144}
_MAMBA = {"vocab_size": 50_280, "hidden_size": 768, "num_hidden_layers": 32, "layer_norm_epsilon": 1e-5}
_BERT = {"hidden_act": "gelu", "layer_norm_eps": 1e-12}
_MODERN_BERT = {"hidden_activation": "gelu", "norm_eps": 1e-5}
_ZAMBA2 = {"hidden_act": "gelu", "num_mem_blocks": 1, "adapter_rank": 128}
_QWEN3_5_MOE = {"full_attention_interval": 4, "intermediate_size": 512}  # of no layer, as all have experts

_LIKE_LLAMA = "mistral qwen2 qwen3 dots1 qwen2_moe qwen3_moe minimax_m2 granitemoe"

FAMILIES: dict[str, _Family] = {
    **dict.fromkeys(("llama", "seed_oss", "granite"), _Family(mlp_bias="mlp_bias")),
    **dict.fromkeys(_LIKE_LLAMA.split(), _Family()),
    **dict.fromkeys(("phi3", "gpt_oss", "mixtral", "olmoe", "ministral3"), _Family(defaults=_EPS)),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), _Family("post", defaults=_EPS)),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _Family(attention="latent_attention")),
    **dict.fromkeys(
        ("cohere", "cohere2"),
        _Family("parallel", norm_type="layer_without_bias", defaults=_TIED | _LAYER_EPS),
    ),
    **dict.fromkeys(
        ("mamba", "falcon_mamba"), _Family(recurrent="mamba1", has_mlp=False, defaults=_TIED | _MAMBA)
    ),
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"), _Family(recurrent="gated_short_convolution", defaults=_TIED | _EPS)
    ),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text"),
        _Family(recurrent="gated_delta_net", defaults={"full_attention_interval": 4}),
    ),
    "llama4_text": _Family(defaults=_EPS | {"intermediate_size_mlp": 16384}),
    "gemma": _Family(scaled_embedding=True, defaults=_TIED),
    "gemma2": _Family("around", scaled_embedding=True, defaults=_TIED | {"final_logit_softcapping": 30.0}),
    "gemma3_text": _Family("around", scaled_embedding=True, defaults=_TIED | _GEMMA3),
    "gemma4_text": _Family("around", scaled_embedding=True, output_scale=True, defaults=_TIED | _GEMMA4),
    "gpt_neox": _Family(
        "parallel_apart",
        has_gate=False,
        norm_type="layer",
        mlp_bias=True,
        defaults=_LAYER_EPS | {"hidden_act": "gelu"},
    ),
    "gpt2": _Family(
        has_gate=False,
        norm_type="layer",
        mlp_bias=True,
        has_positions=True,
        defaults=_TIED | _LAYER_EPS | {"hidden_act": "gelu_new", "max_position_embeddings": 1024},
    ),
    "opt": _Family(
        has_gate=False,
        norm_type="layer",
        mlp_bias="enable_bias",
        has_positions=True,
        defaults=_TIED | _LAYER_EPS | {"hidden_act": "relu", "max_position_embeddings": 2048} | _OPT,
    ),
    "falcon": _Family(
        "parallel_apart",
        has_gate=False,
        norm_type="layer",
        mlp_bias="attention_bias",
        defaults=_TIED | _LAYER_EPS | {"hidden_act": "gelu"} | _FALCON,
    ),
    "apertus": _Family(has_gate=False, defaults=_EPS | {"hidden_act": "xielu"}),
    "ernie4_5": _Family(mlp_bias="use_bias", defaults=_TIED | _EPS),
    "helium": _Family(defaults={"rms_norm_eps": 1e-8}),
    "stablelm": _Family(norm_type="layer", defaults=_LAYER_EPS),
    "mamba2": _Family(recurrent="mamba2", has_mlp=False, defaults=_MAMBA),
    "minimax": _Family("residual", recurrent="lightning_attention", defaults=_EPS),
    "qwen3_5_moe_text": _Family(recurrent="gated_delta_net", defaults=_QWEN3_5_MOE),
    "glm4": _Family("around", defaults={"rms_norm_eps": 1.5625e-7}),
    "glm4_moe": _Family(defaults=_EPS),
    "glm4_moe_lite": _Family(attention="latent_attention", defaults=_EPS),
    "smollm3": _Family(mlp_bias="mlp_bias", defaults=_TIED),
    "arcee": _Family(has_gate=False, mlp_bias="mlp_bias", defaults=_EPS | {"hidden_act": "relu2"}),
    "phi": _Family(
        "parallel",
        has_gate=False,
        norm_type="layer",
        mlp_bias=True,
        defaults=_LAYER_EPS | {"hidden_act": "gelu_new"},
    ),
    "starcoder2": _Family(
        has_gate=False,
        norm_type="layer",
        mlp_bias="use_bias",
        defaults=_TIED | _LAYER_EPS | {"hidden_act": _TANH, "use_bias": True},
    ),
    "granitemoehybrid": _Family(recurrent="mamba2", defaults={"shared_intermediate_size": 1024}),
    "bamba": _Family(recurrent="mamba2", mlp_bias="mlp_bias", defaults=_EPS),
    "falcon_h1": _Family(beside="mamba2", mlp_bias="mlp_bias", defaults=_EPS),
    "jamba": _Family(recurrent="mamba1"),
    "nemotron_h": _Family(
        recurrent="mamba2",
        has_gate=False,
        mlp_bias="mlp_bias",
        defaults={"layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2", "intermediate_size": 21504},
    ),
    "zamba2": _Family(
        recurrent="mamba2", has_mlp=False, mlp_bias="mamba_proj_bias", defaults=_TIED | _EPS | _ZAMBA2
    ),
    "olmo_hybrid": _Family("post", recurrent="gated_delta_net", recurrent_norms="pre"),
    "kimi_linear": _Family(attention="latent_attention", recurrent="kimi_delta_attention", defaults=_EPS),
    # A norm after the sum with the residual equals a norm before the next branch whose output is also the residual of that branch.
    **dict.fromkeys(
        BERTS,
        _Family(
            "residual", has_gate=False, norm_type="layer", mlp_bias=True, is_encoder=True, defaults=_BERT
        ),
    ),
    "modernbert": _Family(
        norm_type="layer_without_bias", mlp_bias="mlp_bias", is_encoder=True, defaults=_MODERN_BERT
    ),
}
"""The published models that a `Decoder` or an `Encoder` can be, by the `model_type` of their configuration."""


def is_encoder(config: Any) -> bool:
    """Returns whether the tokens of a published model see each other in both directions."""
    entries = text_entries(config)
    is_both = entries.get("model_type") == "gemma3_text" and entries.get("use_bidirectional_attention")
    return _family(entries).is_encoder or bool(is_both)


def _family(entries: Entries) -> _Family:
    kind = entries.get("model_type")
    if kind not in FAMILIES:
        known = sorted({*FAMILIES, *ALIASES})
        raise ValueError(
            f"model_type: expected one of the {len(known)} of the guide 'Published models', such as llama, received "
            f"{shown(kind)}{nearest(kind, known)} A model with the layers of one of these is a row of ejx.models.FAMILIES: the guide writes one. "
            "Otherwise build a DecoderConfig by hand."
        )
    return FAMILIES[kind]


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads the configuration of a published model into a `DecoderConfig`.

    **Arguments:**

    - `config`: the content of its `config.json`, or what `to_dict()` of a `transformers` configuration returns. Of a model with several parts
        the text model is read.

    **Raises:** `ValueError` with the reason for a model that a `Decoder` does not support; `CheckpointError`, which is a `ValueError`, for entries
    that are missing, of another type or out of bounds.
    """
    whole, entries = entries_of(config), text_entries(config)
    if whole.get("model_type") in _BIDIRECTIONAL_PROMPTS:
        raise ValueError(
            f"model_type: expected a causal model, received {whole['model_type']!r}, whose prompts see each other in both directions; a Decoder "
            "has no such mask."
        )
    if is_encoder(entries):
        raise ValueError(
            f"model_type: expected a decoder, received {entries['model_type']!r}, an encoder, whose tokens see later ones. encoder_config reads it; "
            "from_pretrained and from_config make an Encoder of it."
        )
    return dataclasses.replace(_body(whole, entries), published=_as_text(config))


def encoder_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Reads the configuration of a published encoder into an `EncoderConfig`.

    **Arguments:** as for [`decoder_config`][ejkernel_eqx.models.decoder_config].

    **Raises:** as `decoder_config`, for models that an `Encoder` does not support.
    """
    whole, entries = entries_of(config), text_entries(config)
    if not is_encoder(entries):
        raise ValueError(
            f"model_type: expected an encoder, received {entries['model_type']!r}, a decoder; decoder_config reads it."
        )
    kind, body = entries["model_type"], dataclasses.replace(_body(whole, entries), tie_embeddings=True)
    if kind == "modernbert":
        first, *rest = body.layers
        own: dict[str, Any] = {"layers": (dataclasses.replace(first, norms="pre_mlp"), *rest)}
        own |= {"norm_type": "layer"} if entries.get("norm_bias") else {}
        return EncoderConfig(dataclasses.replace(body, **own), embedding_norm=True)
    if kind not in BERTS:
        return EncoderConfig(body)
    places, types = entries.get("max_position_embeddings", 512), entries.get("type_vocab_size", 2)
    return EncoderConfig(body, places, 0 if kind == "bert" else entries.get("pad_token_id", 1) + 1, types)


def _body(whole: Entries, entries: Entries) -> DecoderConfig:
    kind, family = entries["model_type"], _family(entries)
    # The outer configuration decides, as transformers has the head there.
    tied = whole.get("tie_word_embeddings")
    entries = (entries if tied is None else entries.changed(tie_word_embeddings=tied)).over(family.defaults)
    _check_needed(entries, family)
    layers = [_layer(entries, family, index) for index in range(entries["num_hidden_layers"])]
    for source in {layer.keys_of for layer in layers if layer.keys_of is not None}:
        layers[source] = dataclasses.replace(layers[source], gives_keys=True)
    blocks = _with_blocks(entries, layers) if kind == "zamba2" else None
    per_layer = entries.get("hidden_size_per_layer_input") or None
    if per_layer and entries["vocab_size_per_layer_input"] != entries["vocab_size"]:
        raise entries.wrong("vocab_size_per_layer_input", f"vocab_size={entries['vocab_size']}")
    width = entries["hidden_size"]
    return DecoderConfig(
        entries["vocab_size"],
        width,
        tuple(layers),
        norm_eps=next((entries[name] for name in _EPSILONS if entries.get(name) is not None), 1e-6),
        embedding_scale=math.sqrt(width)
        if family.scaled_embedding
        else entries.get("embedding_multiplier", 1.0),
        tie_embeddings=bool(entries.get("tie_word_embeddings", False)),
        logits_soft_cap=entries.get("final_logit_softcapping"),
        unit_offset_norms=unit_offset_norms(entries),
        stop_tokens=stop_tokens(entries, entries["vocab_size"]) or stop_tokens(whole, entries["vocab_size"]),
        logits_scale=entries.get("logit_scale", 1 / entries.get("logits_scaling", 1.0)),
        norm_type=family.norm_type,
        head_bias=kind == "phi",
        layer_embedding=per_layer,
        max_positions=entries["max_position_embeddings"] if family.has_positions else None,
        shared_blocks=blocks,
    )


def _as_text(config: Mapping[str, Any]) -> str | None:
    """The configuration as JSON. `None` if JSON cannot hold it; such a model can be read, but not saved."""
    try:
        return json.dumps(dict(config), skipkeys=True, default=_plain)
    except (RecursionError, TypeError, ValueError):
        return None


def _plain(value: Any) -> Any:
    """What JSON has, for a value that it does not have."""
    return dict(value) if isinstance(value, Mapping) else getattr(value, "item", value.__str__)()


def _check_needed(config: Entries, family: _Family) -> None:
    for name in (*_NEEDED, "intermediate_size") if family.has_mlp else _NEEDED:
        if config.get(name) is None:
            raise CheckpointError(
                f"config: expected an entry {name!r} for model_type {config['model_type']!r}, received none; pass the whole config.json."
            )
    count, types = config["num_hidden_layers"], config.get("layer_types")
    if types is not None and len(types) < count:
        raise CheckpointError(
            f"config: layer_types: expected a type for each of the {count} layers of num_hidden_layers, received {len(types)}; correct the "
            "config.json."
        )


def stop_tokens(config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Those of the vocabulary. Others, which small copies of published models still name, end no text."""
    tokens = entries_of(config).get("eos_token_id")
    tokens = () if tokens is None else tokens if isinstance(tokens, list) else (int(tokens),)
    return tuple(token for token in tokens if token < vocab_size)


_BIDIRECTIONAL_PROMPTS = ("paligemma", "colpali")
_WIDTHS = {"granitemoehybrid": "shared_intermediate_size", "llama4_text": "intermediate_size_mlp"}
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers")
_PLACE = ("embed_dim", "layer_index", "num_layers")  # which the decoder says itself


def _mixer(config: Entries, family: _Family, index: int) -> str:
    """The name of a layer's mixer."""
    # A model without attention lists no types.
    if family.recurrent is not None and (not family.has_mlp or type_of(config, index) == "linear_attention"):
        return family.recurrent
    return family.attention if source_of_keys(config, index) is None else "cross_layer_attention"


def _options(config: Entries, mixer: str, index: int) -> dict[str, Any]:
    """The arguments that the mixer of a layer is built with."""
    options = LAYERS[mixer]._options_of(config, index)
    return {name: value for name, value in options.items() if name not in _PLACE}


def _layer(config: Entries, family: _Family, index: int) -> LayerConfig:
    mixer = _mixer(config, family, index)
    options = _options(config, mixer, index)
    branch = "linear_attn" if mixer == "lightning_attention" else "full_attn"
    scales: Any = lambda name: tuple(
        float(config.get(f"{name}_{part}_factor", 1)) for part in ("alpha", "beta")
    )
    mlp = _mlp(config, family, index) if family.has_mlp else None
    if (scale := config.get("residual_multiplier", 1.0)) != 1:  # Granite
        return LayerConfig(mixer, options, mlp, family.norms, (1.0, scale), (1.0, scale))
    norms = family.norms
    if norms == "parallel_apart" and not config.get("use_parallel_residual", True):
        norms = "pre"
    if mixer == family.recurrent and family.recurrent_norms is not None:
        norms = family.recurrent_norms
    if family.beside is not None:
        return _falcon_h1(config, LayerConfig(mixer, options, mlp), _options(config, family.beside, index))
    if config["model_type"] == "falcon":
        norms = _falcon_norms(config)
    if config["model_type"] == "stablelm" and config.get("use_parallel_residual", False):
        norms = "parallel"
    experts = None
    if config["model_type"] == "gemma4_text" and config.get("enable_moe_block", False):
        experts = _experts(config, index)
    given: Any = (scales(branch), scales("mlp"), family.output_scale)
    keys_of = source_of_keys(config, index)
    return LayerConfig(mixer, options, mlp, norms, *given, experts=experts, keys_of=keys_of)


def _with_blocks(config: Entries, layers: list[LayerConfig]) -> SharedBlockConfig | None:
    """The blocks of Zamba2, which some of its layers share in turn; these get their numbers."""
    refuse(config, use_conv_bias=True)
    hybrid = [index for index, kind in enumerate(config["layer_types"][: len(layers)]) if kind == "hybrid"]
    if not hybrid:
        return None
    count = min(config["num_mem_blocks"], len(hybrid))
    for number, index in enumerate(hybrid):
        layers[index] = dataclasses.replace(layers[index], shared_block=number % count)
    mlp: Any = _mlp(config, FAMILIES["zamba2"], hybrid[0])
    has_adapters = bool(config.get("use_shared_attention_adapter", False))
    options = _options(config, "attention", hybrid[0])
    return SharedBlockConfig(count, options, mlp, config["adapter_rank"], has_adapters)


def _falcon_norms(config: Entries) -> Norms:
    """The places of the norms, from entries for parallel branches."""
    if not config.get("new_decoder_architecture"):
        return "parallel" if config.get("parallel_attn") else "pre"
    refuse(config, parallel_attn=True)
    return "parallel" if config.get("num_ln_in_parallel_attn") == 1 else "parallel_apart"


def _falcon_h1(config: Entries, layer: LayerConfig, options: dict[str, Any]) -> LayerConfig:
    """The layer with Mamba-2 beside its attention, and with the factors of the configuration."""
    scales = {
        name: config.get(f"{name}_multiplier", 1.0) for name in ("attention_in", "attention_out", "ssm_out")
    }
    beside = BranchConfig(
        "mamba2", options, (scales["attention_in"] * scales["attention_out"], scales["ssm_out"])
    )
    gate, down = config.get("mlp_multipliers") or (1.0, 1.0)
    assert isinstance(layer.mlp, MLPConfig)
    mlp = dataclasses.replace(layer.mlp, gate_scale=float(gate))
    return dataclasses.replace(layer, mlp=mlp, mlp_scales=(1.0, float(down)), beside=beside)


def _mlp(config: Entries, family: _Family, index: int) -> MLPConfig | MoEConfig | None:
    kind = config["model_type"]
    if kind == "nemotron_h" and (config.get("mlp_layer_types") or ())[index : index + 1] == ["none"]:
        return None
    # A mixture of one expert is that expert, but for one beside it.
    least = 0 if kind in ("granitemoehybrid", "llama4_text") else 1
    if kind != "gemma4_text" and experts_of(config, index) > least:
        return _experts(config, index)
    if config["model_type"] == "gpt_oss":
        limit = config.get("swiglu_limit", 7.0), config.get("swiglu_alpha", 1.702)
        if limit != (7.0, 1.702):
            raise ValueError(
                f"swiglu_limit, swiglu_alpha: expected 7.0 and 1.702, received {limit}; no other are supported."
            )
        return MLPConfig(config["intermediate_size"], "clamped_swiglu", use_bias=True)
    name = _activation(config)
    if name not in ACTIVATIONS and (family.has_gate or name not in ("relu2", "xielu")):
        raise ValueError(
            f"hidden_act: expected one of {', '.join(ACTIVATIONS)}, received {name!r}; build a DecoderConfig by hand."
        )
    own = family.mlp_bias
    has_bias = bool(config.get(own, False)) if isinstance(own, str) else own
    activation: Any = ACTIVATIONS.get(name, name)
    size = config[_WIDTHS.get(kind, "intermediate_size")]
    if config.get("use_double_wide_mlp", False) and source_of_keys(config, index) is not None:
        size *= 2
    return MLPConfig(size, activation, has_bias, family.has_gate)


def _experts(config: Entries, index: int) -> MoEConfig:
    options = mixture_of_experts_options(config, index)
    return MoEConfig({name: value for name, value in options.items() if name != "embed_dim"})


def _activation(config: Entries) -> str:
    kind = config["model_type"]
    if kind == "nemotron_h":
        return config["mlp_hidden_act"]
    if kind in ("gemma2", "gemma3_text", "gemma4_text", "modernbert"):
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
