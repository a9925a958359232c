"""Reads the arguments of `MixtureOfExperts` from the configuration of a published model."""

from collections.abc import Callable
from typing import Any

from .._entries import Entries
from .configs import ACTIVATIONS, Config, defaults_of, layer_type, read_model, refuse, take

_LAYER = "MixtureOfExperts"


def mixture_of_experts_options(config: Config, layer_index: int = 0) -> dict[str, Any]:
    """Reads the arguments of `MixtureOfExperts` for one layer of a published model.

    **Arguments:**

    - `config`: the content of its `config.json`. Of a model with a `text_config`, that part is read.
    - `layer_index`: the index of the layer, from 0. Some models have plain MLPs in some layers.

    **Returns:** a dictionary of all arguments except `key`.

    **Raises:** `ValueError` for a `model_type` or an option that is not supported, and for a layer with a plain MLP. `CheckpointError`, which is a
    `ValueError`, for entries that are missing, of another type or out of bounds.
    """
    config = read_model(config, _LAYER)
    layer_type(config, layer_index, lambda *_: "")  # which checks the index
    if reason := _no_experts(config, layer_index):
        raise ValueError(
            f"layer_index: expected a layer with experts, received {layer_index}, which has a plain MLP in this {config['model_type']} model, as "
            f"{reason}; {_where_experts_are(config)}."
        )
    count, top_k = _count(config), take(config, "num_experts_per_tok", "top_k_experts")
    if top_k > count:
        raise config.wrong("num_experts_per_tok", f"at most the {count} experts")
    options: dict[str, Any] = {
        "embed_dim": take(config, "hidden_size"),
        "hidden_dim": take(config, "moe_intermediate_size", "intermediate_size"),
        "num_experts": count,
        "top_k": top_k,
        "scoring": "softmax",
        "normalize": bool(config.get("norm_topk_prob", True)),
    }
    if config["model_type"] != "gpt_oss":
        options["activation"] = _activation(config)
    return options | _OTHERS.get(config["model_type"], lambda config: {})(config)


def experts_of(config: Entries, layer_index: int) -> int:
    """The number of experts that a layer of the model has; 0 for a plain MLP."""
    config = config.over(defaults_of(_LAYER).get(config["model_type"], {}))
    return 0 if _no_experts(config, layer_index) else _count(config)


def _count(config: Config) -> int:
    names = ("num_local_experts", "num_experts", "n_routed_experts", "default_num_experts")
    return next((config[name] for name in names if config.get(name) is not None), 0)


def _no_experts(config: Config, layer_index: int) -> str | None:
    """The entries by which a layer has a plain MLP."""
    if not config.get("enable_moe_block", True):
        return "enable_moe_block is false"
    if not _count(config):
        return "it has no experts"
    if (period := config.get("expert_layer_period")) and layer_index % period != config[
        "expert_layer_offset"
    ]:
        return f"expert_layer_period is {period}"
    first = config.get("first_k_dense_replace") or 0
    if layer_index < first:
        return f"first_k_dense_replace is {first}"
    if layer_index in (config.get("mlp_only_layers") or ()):
        return f"mlp_only_layers has {layer_index}"
    if (kinds := config.get("mlp_layer_types")) and kinds[layer_index : layer_index + 1] in (
        ["dense"],
        ["none"],
    ):
        return f"mlp_layer_types says {kinds[layer_index]}"
    if layer_index not in (config.get("moe_layers") or (layer_index,)):
        return "moe_layers has it not"
    step = 1 if config.get("moe_layers") else config.get("interleave_moe_layer_step") or 1
    if (layer_index + 1) % step:
        return f"interleave_moe_layer_step is {step}"
    # This entry counts layers from 1. The next one counts from 0.
    if (layer_index + 1) % (step := config.get("decoder_sparse_step") or 1):
        return f"decoder_sparse_step is {step}"
    if layer_index % (often := config.get("moe_layer_freq") or 1):  # as DeepSeek's own code has it
        return f"moe_layer_freq is {often}"
    return None


def _where_experts_are(config: Config) -> str:
    layers = range(config.get("num_hidden_layers") or 1)
    first = next((index for index in layers if not _no_experts(config, index)), None)
    other = "no layer" if first is None else f"layer {first} is the first that"
    return f"{other} has experts, and ejx.models builds layers of both kinds"


def _activation(config: Config) -> str:
    name = config.get("mlp_hidden_act") or take(config, "hidden_act", "hidden_activation")
    if name == "relu2" and config["model_type"] == "nemotron_h":  # whose experts have no gate
        return name
    if name not in ACTIVATIONS:
        raise ValueError(
            f"hidden_act: expected one of {', '.join(ACTIVATIONS)}, received {name!r}; the experts have no such activation."
        )
    return ACTIVATIONS[name]


def _lfm2_moe(config: Config) -> dict[str, Any]:
    factor = float(config["routed_scaling_factor"])
    biased = bool(config["use_expert_bias"])
    return {"scoring": "sigmoid", "use_correction_bias": biased, "scaling_factor": factor}


def _nemotron_h(config: Entries) -> dict[str, Any]:
    latent = {"gated": False, "latent_dim": config.get("moe_latent_size")}
    return _deepseek_v3(config) | latent | {"shared_dim": take(config, "moe_shared_expert_intermediate_size")}


def _one_size(config: Config) -> dict[str, Any]:
    return {"hidden_dim": take(config, "intermediate_size"), "normalize": True}


def _gpt_oss(config: Config) -> dict[str, Any]:
    refuse(config, swiglu_limit=7.0, swiglu_alpha=1.702)
    biases = {"use_bias": True, "use_router_bias": True}
    return _one_size(config) | {"scoring": "top_k_softmax", "activation": "clamped_swiglu"} | biases


def _shared_gated(config: Config) -> dict[str, Any]:
    return {"shared_dim": take(config, "shared_expert_intermediate_size"), "shared_gate": True}


def _shared(config: Config) -> dict[str, Any]:
    refuse(config, mlp_bias=False)
    count = config.get("n_shared_experts") or 0
    shared = {"shared_dim": count * take(config, "moe_intermediate_size")} if count else {}
    return {"scaling_factor": float(config["routed_scaling_factor"])} | shared


def _deepseek_v2(config: Entries) -> dict[str, Any]:
    refuse(config, topk_method=("greedy", "group_limited_greedy"), scoring_func="softmax")
    limited = config["topk_method"] == "group_limited_greedy"
    groups = {"group_score": "max"} | _groups(config) if limited else {}
    # `transformers` does not read norm_topk_prob for this model.
    return _shared(config) | {"normalize": False} | groups


def _deepseek_v3(config: Entries) -> dict[str, Any]:
    refuse(config, topk_method="noaux_tc", scoring_func="sigmoid")
    return _dots1(config)


def _dots1(config: Entries) -> dict[str, Any]:
    return _shared(config) | {"scoring": "sigmoid", "use_correction_bias": True} | _groups(config)


def _llama4(config: Entries) -> dict[str, Any]:
    refuse(config, num_experts_per_tok=1)
    given = {"scoring": "sigmoid", "scale_inputs": True, "shared_dim": take(config, "intermediate_size")}
    return _one_size(config) | given | {"normalize": False}


def _minimax_m2(config: Entries) -> dict[str, Any]:
    refuse(config, scoring_func="sigmoid")
    return _one_size(config) | {"scoring": "sigmoid", "use_correction_bias": True}


def _granite(config: Entries) -> dict[str, Any]:
    shared = config.get("shared_intermediate_size")
    return _one_size(config) | ({"shared_dim": shared} if shared else {})


def _gemma4(config: Entries) -> dict[str, Any]:
    return {"hidden_dim": take(config, "moe_intermediate_size"), "norm_eps": float(config["rms_norm_eps"])}


def _groups(config: Entries) -> dict[str, Any]:
    groups, kept, count = take(config, "n_group"), take(config, "topk_group"), _count(config)
    if count % groups:
        raise config.wrong("n_group", f"a divisor of the {count} experts")
    if kept > groups:
        raise config.wrong("topk_group", f"at most n_group={groups}")
    return {"num_groups": groups, "top_k_groups": kept}


_OTHERS: dict[str, Callable[[Entries], dict[str, Any]]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "dots1": _dots1,
    "gemma4_text": _gemma4,
    "glm4_moe": _deepseek_v3,
    "kimi_linear": _deepseek_v3,
    "glm4_moe_lite": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "granitemoe": _granite,
    "granitemoehybrid": _granite,
    "jamba": lambda config: {"normalize": False},
    "lfm2_moe": _lfm2_moe,
    "llama4_text": _llama4,
    "nemotron_h": _nemotron_h,
    "minimax": _one_size,
    "minimax_m2": _minimax_m2,
    "mixtral": _one_size,
    "olmoe": lambda config: {"hidden_dim": take(config, "intermediate_size")},
    "qwen2_moe": _shared_gated,
    "qwen3_next": _shared_gated,
    "qwen3_5_moe_text": _shared_gated,
}
