"""The losses as in their equations, from all logits at once: the oracle of every test, in float64 for float64 inputs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._broadcast import like
from ..core.arguments import accumulator
from .spec import LossArrays, LossSpec


def loss(arrays: LossArrays, spec: LossSpec) -> dict[str, Array]:
    """`out [*]`, or `[*, M, N]` without a sum, and the statistics `[*, M, N]` of a call that has them, in float32 (float64 for float64 inputs)."""
    wide = accumulator(arrays.x.dtype)
    real = arrays.labels >= 0
    logits = (
        _logits(arrays.x, arrays.weight, arrays.bias, spec.logits_soft_cap, real, wide) / spec.temperature
    )
    lse = jax.nn.logsumexp(logits, -1)
    log_p = logits - lse[..., None]
    if spec.divergence is not None:
        results = {"out": _divergence(log_p, _teacher(arrays, spec, real, wide), spec)}
    else:
        results = _cross_entropy(arrays, spec, logits, lse, log_p)
    if arrays.token_weights is not None:
        results["out"] = arrays.token_weights.astype(wide) * results["out"]
    results = {name: jnp.where(real, x, 0) for name, x in results.items()}
    return results if spec.reduction == "none" else results | {"out": jnp.sum(results["out"], (-2, -1))}


def _logits(x: Array, weight: Array, bias: Array | None, cap: float | None, real: Array, wide: Any) -> Array:
    x = jnp.where(real[..., None], x, 0).astype(wide)
    logits = jnp.einsum("...ne,ve->...nv", x, weight.astype(wide), precision="highest")
    if bias is not None:
        logits = logits + like(bias.astype(wide), logits)
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _cross_entropy(
    arrays: LossArrays, spec: LossSpec, logits: Array, lse: Array, log_p: Array
) -> dict[str, Array]:
    target = jnp.take_along_axis(logits, jnp.maximum(arrays.labels, 0)[..., None], -1)[..., 0]
    smooth = spec.label_smoothing
    losses = lse - (1 - smooth) * target - smooth * jnp.mean(logits, -1) + spec.z_loss * lse**2
    if not spec.has_statistics:
        return {"out": losses}
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1)
    margin = jax.lax.stop_gradient(target - jnp.max(logits, -1))
    return {"out": losses, "log_probs": target - lse, "lse": lse, "entropy": entropy, "margin": margin}


def _teacher(arrays: LossArrays, spec: LossSpec, real: Array, wide: Any) -> Array:
    """The log-probabilities of all words."""
    if arrays.teacher_indices is not None:
        assert arrays.teacher_log_probs is not None
        chosen = arrays.teacher_indices[..., None] == jnp.arange(len(arrays.weight), dtype=jnp.int32)
        probs = jnp.where(chosen, jnp.exp(arrays.teacher_log_probs.astype(wide))[..., None], 0)
        return jnp.log(jnp.sum(probs, -2))
    logits, cap = arrays.teacher_logits, spec.teacher_soft_cap
    if logits is None:
        assert arrays.teacher_x is not None and arrays.teacher_weight is not None
        logits = _logits(arrays.teacher_x, arrays.teacher_weight, arrays.teacher_bias, cap, real, wide)
    return jax.nn.log_softmax(logits.astype(wide) / spec.temperature)


def _divergence(s: Array, t: Array, spec: LossSpec) -> Array:
    def kl(a: Array, b: Array) -> Array:
        return jnp.sum(jnp.where(a == -jnp.inf, 0, jnp.exp(a) * (a - b)), -1)

    t = jax.lax.stop_gradient(t)
    if spec.divergence == "forward_kl":
        return kl(t, s)
    if spec.divergence == "reverse_kl":
        return kl(s, t)
    mixture = jnp.log(spec.beta * jnp.exp(t) + (1 - spec.beta) * jnp.exp(s))
    return spec.beta * kl(t, mixture) + (1 - spec.beta) * kl(s, mixture)
