"""Mixtures of experts written down again: every expert on every token, in float64, and the choice by sorting."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_eqx import nn
from tests.arrays import normal

EMBED, HIDDEN = 12, 20

_DEEPSEEK = {"num_experts": 8, "num_groups": 4, "top_k_groups": 2, "shared_dim": 8}
LAYERS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_experts": 5, "top_k": 2},
    "not normalised": {"num_experts": 6, "top_k": 3, "normalize": False, "activation": "gelu_tanh"},
    "qwen2": {"num_experts": 6, "top_k": 2, "normalize": False, "shared_dim": 9, "shared_gate": True},
    "gpt_oss": {"num_experts": 4, "top_k": 2, "scoring": "top_k_softmax", "activation": "clamped_swiglu"}
    | {"use_bias": True, "use_router_bias": True},
    "deepseek_v2": _DEEPSEEK | {"top_k": 2, "normalize": False, "group_score": "max", "scaling_factor": 1.5},
    "deepseek_v3": _DEEPSEEK
    | {"top_k": 3, "scoring": "sigmoid", "scaling_factor": 2.5, "use_correction_bias": True},
    "nemotron": {"num_experts": 6, "top_k": 2, "scoring": "sigmoid", "use_correction_bias": True}
    | {"gated": False, "activation": "relu2", "latent_dim": 8, "shared_dim": 9, "scaling_factor": 2.0},
    "without gates": {"num_experts": 4, "top_k": 2, "gated": False, "activation": "gelu", "use_bias": True},
    "all of them": {"num_experts": 3, "top_k": 3, "activation": "gelu"},
}


def build(name: str, **options: Any) -> nn.MixtureOfExperts:
    """The layer with random biases too, and logits far from one another, so that no rounding changes a choice."""
    layer = nn.MixtureOfExperts(EMBED, HIDDEN, **(LAYERS[name] | options), key=jax.random.key(3))
    gate, experts = layer.gate, layer.experts
    new: dict[str, Any] = {"weight": 3 * gate.weight}
    for i, kind in enumerate(("bias", "e_score_correction_bias")):
        if (bias := getattr(gate, kind)) is not None:
            new[kind] = 0.3 * normal(i, bias.shape, bias.dtype)
    gate = _with(gate, new)
    # Activations are clamped, and results are as small as those of the others: the loss is not steep.
    large: dict[str, Any] = {}
    if experts.gate_proj_bias is not None:
        assert experts.gate_proj is not None
        large = {"gate_proj": 8 * experts.gate_proj, "down_proj": experts.down_proj / 8}
    return _with(layer, {"gate": gate, "experts": _with(experts, large)})


def _with(module: Any, new: dict[str, Any]) -> Any:
    if not new:
        return module
    return eqx.tree_at(lambda m: [getattr(m, name) for name in new], module, list(new.values()))


def inputs(*lead: int, dtype: Any = jnp.float32) -> Any:
    return normal(11, (*lead, EMBED)).astype(dtype)


def chosen(layer: nn.MixtureOfExperts, x: Any) -> tuple[np.ndarray, np.ndarray]:
    """Logits `[T, N]` and the experts of each token `[T, k]`, the best first, in NumPy."""
    gate, how = layer.gate, layer.gate.choice
    logits = np.asarray(x, np.float64) @ np.asarray(gate.weight, np.float64).T
    logits = logits if gate.bias is None else logits + np.asarray(gate.bias, np.float64)
    ranked = 1 / (1 + np.exp(-logits)) if how.scoring == "sigmoid" else _softmax(logits)
    if gate.e_score_correction_bias is not None:
        ranked = ranked + np.asarray(gate.e_score_correction_bias, np.float64)
    rows = []
    for scores in ranked:
        groups = np.split(np.arange(how.num_experts), how.num_groups)
        best = 2 if how.group_score == "top2" and how.num_groups > 1 else 1
        of_group = [np.sort(scores[group])[-best:].sum() for group in groups]
        kept = np.argsort(of_group)[::-1][: how.top_k_groups]
        allowed = np.concatenate([groups[i] for i in kept])
        rows.append(allowed[np.argsort(scores[allowed])[::-1][: how.top_k]])
    return logits, np.stack(rows)


def reference(layer: nn.MixtureOfExperts, x: Any, indices: Any) -> Any:
    """The layer's output for tokens `[T, E]` that go to the experts `indices [T, k]`, in the dtype of its arrays; differentiable."""
    gate, how, e = layer.gate, layer.gate.choice, layer.experts
    logits = x @ gate.weight.T + (0 if gate.bias is None else gate.bias[None])
    if how.scoring == "top_k_softmax":
        weights = jax.nn.softmax(jnp.take_along_axis(logits, indices, -1))
    else:
        scores = jax.nn.sigmoid(logits) if how.scoring == "sigmoid" else jax.nn.softmax(logits)
        weights = jnp.take_along_axis(scores, indices, -1)
        weights = weights / weights.sum(-1, keepdims=True) if how.normalize else weights
    weights = weights * how.scaling_factor
    bias = lambda b: 0 if b is None else b[None]
    name = "silu" if layer.shared_expert is None else layer.shared_expert.activation
    inputs = x if e.fc1_latent_proj is None else x @ e.fc1_latent_proj.weight.T
    up = jnp.einsum("te,nfe->tnf", inputs, e.up_proj) + bias(e.up_proj_bias)
    if e.gate_proj is None:
        hidden = act("relu2" if e.is_squared else _activation_of(layer, name), up, 1.0)
    else:
        gate = jnp.einsum("te,nfe->tnf", inputs, e.gate_proj) + bias(e.gate_proj_bias)
        hidden = act(_activation_of(layer, name), gate, up)
    out = jnp.einsum("tnf,nef->tne", hidden, e.down_proj) + bias(e.down_proj_bias)
    y = sum(
        weights[:, k, None] * jnp.take_along_axis(out, indices[:, k, None, None], 1)[:, 0]
        for k in range(how.top_k)
    )
    y = y if e.fc2_latent_proj is None else y @ e.fc2_latent_proj.weight.T
    if (shared := layer.shared_expert) is not None:
        up = x @ shared.up_proj.weight.T
        inner = (
            act(name, up, 1.0) if shared.gate_proj is None else act(name, x @ shared.gate_proj.weight.T, up)
        )
        gated = inner @ shared.down_proj.weight.T
        if layer.shared_expert_gate is not None:
            gated = gated * jax.nn.sigmoid(x @ layer.shared_expert_gate.weight.T)
        y = y + gated
    return y


def _activation_of(layer: nn.MixtureOfExperts, name: str) -> str:
    spec = layer.experts.hidden.spec
    return "clamped_swiglu" if spec.limit is not None else spec.activation or name


def act(name: str, gate: Any, up: Any) -> Any:
    """The activation of a gated MLP, times its other factor."""
    if name == "clamped_swiglu":
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        return (up + 1) * gate / (1 + jnp.exp(-1.702 * gate))
    return {
        "silu": lambda z: z / (1 + jnp.exp(-z)),
        "gelu": lambda z: z * 0.5 * (1 + jax.lax.erf(z / np.sqrt(2))),
        "gelu_tanh": lambda z: 0.5 * z * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
        "relu": lambda z: jnp.maximum(z, 0),
        "relu2": lambda z: jnp.maximum(z, 0) ** 2,
    }[name](gate) * up


def _softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
