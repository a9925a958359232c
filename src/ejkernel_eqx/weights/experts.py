"""The forms that mixtures of experts are published in, by the names that are there.

| form | experts, of which there are `N` |
|---|---|
| Mixtral and MiniMax | `experts.0.w1`, `w3`, `w2`: gate, up, down |
| Qwen, OLMoE, DeepSeek | `experts.0.gate_proj`, `up_proj`, `down_proj` |
| transformers, once loaded | `experts.gate_up_proj` `[N, 2 F, E]`, all gates and then all ups; `experts.down_proj` `[N, E, F]` |
| GPT-OSS | `experts.gate_up_proj` `[N, E, 2 F]`, gate and up in turn; `experts.down_proj` `[N, F, E]`; `*_bias` |

The router is `gate` or `router`, the expert of all tokens `shared_expert` or `shared_experts`.
"""

from typing import Any

from .fill import fill_fields, replaced
from .quantised.values import rows_of, stacked_weights, turned
from .view import Weights

_SINGLE = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))
_FIELDS = ("gate_proj", "up_proj", "down_proj")


def mixture_of_experts(layer: Any, weights: Weights) -> Any:
    """A `MixtureOfExperts` filled from any of the forms above."""
    names = weights.names()
    there = lambda *options: next(
        (o for o in options if any(n.startswith(f"{o}.") for n in names)), options[0]
    )
    renamed = {"shared_expert": there("shared_expert", "shared_experts")}
    router = _router(layer.gate, weights, there("gate", "router"))
    return fill_fields(replaced(layer, {"gate": router}), weights, renamed, skip=("gate",))


def _router(router: Any, weights: Weights, name: str) -> Any:
    new: dict[str, Any] = {}
    bias, kept = router.e_score_correction_bias, "e_score_correction_bias"
    if bias is not None:
        # MiniMax-M2 keeps it beside the router.
        at = weights if weights.has(kept) else weights.at(name)
        new[kept] = at.take(kept, bias.shape, bias.dtype)
    return fill_fields(replaced(router, new), weights.at(name), skip=tuple(new))


def experts(module: Any, weights: Weights) -> Any:
    """All experts of a layer."""
    if weights.has("gate_up_proj_bias"):
        return _transposed(module, weights)
    if weights.has("gate_up_proj"):
        count, inner, outer = module.gate_proj.shape
        both = weights.take_matrix("gate_up_proj", (count, 2 * inner, outer), module.gate_proj.dtype)
        # All gates come before all ups: [N, 2 F, E] to two arrays [N, F, E].
        gate, up = rows_of(both, slice(inner)), rows_of(both, slice(inner, None))
        return fill_fields(
            replaced(module, {"gate_proj": gate, "up_proj": up}), weights, skip=("gate_proj", "up_proj")
        )
    if weights.has("gate_proj"):  # by the names of the fields
        return fill_fields(module, weights)
    return _one_by_one(module, weights)


def _transposed(module: Any, weights: Weights) -> Any:
    count, inner, outer = module.gate_proj.shape
    dtype = module.gate_proj.dtype
    both = turned(weights.take_matrix("gate_up_proj", (count, outer, 2 * inner), dtype))
    down = turned(weights.take_matrix("down_proj", (count, inner, outer), dtype))
    # Gate and up alternate along the last axis as published, and all three are published transposed.
    alternate = [rows_of(both, slice(start, None, 2)) for start in range(2)]
    new: dict[str, Any] = dict(zip(_FIELDS, (*alternate, down)))
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
        new[field] = stacked(getattr(module, field), f"{name}.weight")
        if (bias := getattr(module, f"{field}_bias")) is not None:
            new[f"{field}_bias"] = stacked(bias, f"{name}.bias")
    return replaced(module, new)
