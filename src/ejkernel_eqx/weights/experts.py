"""Reads published mixtures of experts. The names of the arrays tell the form.

| form | arrays of `N` experts |
|---|---|
| Mixtral and MiniMax | `experts.0.w1`, `w3`, `w2`: gate, up, down |
| Qwen, OLMoE, DeepSeek | `experts.0.gate_proj`, `up_proj`, `down_proj` |
| transformers, after loading | `experts.gate_up_proj` `[N, 2 F, E]`, all gates and then all ups; `experts.down_proj` `[N, E, F]` |
| Granite | `input_linear`, gates and ups, and `output_linear`, downs; the shared expert beside it is in `shared_mlp` |
| Jamba, LFM2-MoE, in `feed_forward` | any of the first three forms |
| Nemotron-H | `experts.0.up_proj`, `down_proj`, or `experts.up_proj` and `experts.down_proj` of all; `fc1_latent_proj`, `fc2_latent_proj` |
| Llama 4, in `feed_forward` | `experts.gate_up_proj` `[N, E, 2 F]`, all gates and then all ups; `experts.down_proj` `[N, F, E]` |
| Gemma 4, beside an `mlp` | as transformers, after loading; `router.proj`, `router.scale`, `router.per_expert_scale`, `pre_feedforward_layernorm_2` |
| GPT-OSS | `experts.gate_up_proj` `[N, E, 2 F]`, where gates and ups alternate; `experts.down_proj` `[N, F, E]`; `*_bias` |

The router is named `gate` or `router`. The shared expert, which all tokens use, is named `shared_expert` or `shared_experts`.
"""

from typing import Any

from .fill import fill, fill_fields, replaced
from .quantised.values import rows_of, stacked_weights, turned
from .view import Weights

_SINGLE = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))
_FIELDS = ("gate_proj", "up_proj", "down_proj")


def mixture_of_experts(layer: Any, weights: Weights) -> Any:
    """Fills a `MixtureOfExperts` from any of the forms above."""
    names = weights.names()
    there = lambda *options: next(
        (o for o in options if any(n.startswith(f"{o}.") for n in names)), options[0]
    )
    renamed = {"shared_expert": there("shared_expert", "shared_experts")}
    name = "router.layer" if weights.has("router.layer.weight") else there("gate", "router")
    new: dict[str, Any] = {"gate": _router(layer.gate, weights, name)}
    if weights.has("input_linear.weight"):
        new["experts"] = _halves(layer.experts, weights, "input_linear.weight", "output_linear.weight")
    beside = weights.beside("shared_mlp")
    if layer.shared_expert is not None and beside.has("input_linear.weight"):
        new["shared_expert"] = fused_mlp(layer.shared_expert, beside)
    return fill_fields(replaced(layer, new), weights, renamed, skip=tuple(new))


def fused_mlp(mlp: Any, weights: Weights) -> Any:
    """Fills a gated MLP in Granite's form."""
    inner, outer = mlp.gate_proj.weight.shape
    both = weights.take_matrix("input_linear.weight", (2 * inner, outer), mlp.gate_proj.weight.dtype)
    halves = {"gate_proj": slice(inner), "up_proj": slice(inner, None)}
    new = {
        name: replaced(getattr(mlp, name), {"weight": rows_of(both, part)}) for name, part in halves.items()
    }
    return replaced(mlp, new | {"down_proj": fill(mlp.down_proj, weights.at("output_linear"))})


def _router(router: Any, weights: Weights, name: str) -> Any:
    new: dict[str, Any] = {}
    bias, kept = router.e_score_correction_bias, "e_score_correction_bias"
    if bias is not None:
        # MiniMax-M2 and LFM2 keep it beside the router.
        other = "expert_bias" if weights.has("expert_bias") else kept
        at = weights if weights.has(other) else weights.at(name)
        new[kept] = at.take(other, bias.shape, bias.dtype)
    renamed = {}
    if router.norm is not None:  # Gemma 4
        new["norm"] = fill(router.norm, weights.at("pre_feedforward_layernorm_2"))
        renamed = {"weight": "proj.weight", "expert_scale": "per_expert_scale"}
    return fill_fields(replaced(router, new), weights.at(name), renamed, skip=tuple(new))


def experts(module: Any, weights: Weights) -> Any:
    """Fills all experts of a layer."""
    latent = ("fc1_latent_proj", "fc2_latent_proj")
    new = {name: getattr(module, name) for name in latent}
    new = {name: fill(layer, weights.beside(name)) for name, layer in new.items() if layer is not None}
    module = replaced(module, new)
    if module.gate_proj is None:
        if weights.has("up_proj"):
            return fill_fields(module, weights, skip=latent)
        return _one_by_one(module, weights)
    if weights.has("gate_up_proj_bias"):
        return _transposed(module, weights)
    in_feed_forward = weights.prefix.endswith("feed_forward.experts.")
    if in_feed_forward and weights.beside("shared_expert").has("gate_proj.weight"):
        return _transposed(module, weights, alternates=False)
    if weights.has("gate_up_proj"):
        return _halves(module, weights, "gate_up_proj", "down_proj")
    if weights.has("gate_proj"):  # by the names of the fields
        return fill_fields(module, weights, skip=latent)
    return _one_by_one(module, weights)


def _halves(module: Any, weights: Weights, both: str, down: str) -> Any:
    count, inner, outer = module.gate_proj.shape
    matrix = weights.take_matrix(both, (count, 2 * inner, outer), module.gate_proj.dtype)
    # All gates come before all ups: [N, 2 F, E] to two arrays [N, F, E].
    new = {"gate_proj": rows_of(matrix, slice(inner)), "up_proj": rows_of(matrix, slice(inner, None))}
    skip = (*new, "fc1_latent_proj", "fc2_latent_proj")
    return fill_fields(replaced(module, new), weights, {"down_proj": down}, skip=skip)


def _transposed(module: Any, weights: Weights, alternates: bool = True) -> Any:
    count, inner, outer = module.gate_proj.shape
    dtype = module.gate_proj.dtype
    both = turned(weights.take_matrix("gate_up_proj", (count, outer, 2 * inner), dtype))
    down = turned(weights.take_matrix("down_proj", (count, inner, outer), dtype))
    # All three matrices are published transposed. In GPT-OSS, gates and ups alternate along the last axis.
    halves = (slice(inner), slice(inner, None))
    parts = (slice(0, None, 2), slice(1, None, 2)) if alternates else halves
    new: dict[str, Any] = dict(zip(_FIELDS, (*(rows_of(both, part) for part in parts), down)))
    if module.gate_proj_bias is not None:
        biases = weights.take("gate_up_proj_bias", (count, 2 * inner), module.gate_proj_bias.dtype)
        new |= {"gate_proj_bias": biases[:, 0::2], "up_proj_bias": biases[:, 1::2]}
        new["down_proj_bias"] = weights.take("down_proj_bias", (count, outer), module.down_proj_bias.dtype)
    return replaced(module, new)


def _one_by_one(module: Any, weights: Weights) -> Any:
    names = next((names for names in _SINGLE if weights.has(f"0.{names[0]}.weight")), _SINGLE[1])

    def stacked(like: Any, name: str) -> Any:
        take = weights.take_matrix if like.ndim == 3 else weights.take
        each = [take(f"{i}.{name}", like.shape[1:], like.dtype) for i in range(like.shape[0])]
        return stacked_weights(f"{weights.prefix}*.{name}", each)

    new: dict[str, Any] = {}
    for field, name in zip(_FIELDS, names):
        if getattr(module, field) is None:
            continue
        new[field] = stacked(getattr(module, field), f"{name}.weight")
        if (bias := getattr(module, f"{field}_bias")) is not None:
            new[f"{field}_bias"] = stacked(bias, f"{name}.bias")
    return replaced(module, new)
