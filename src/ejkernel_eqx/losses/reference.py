"""The cross entropy as in its equation, from all logits at once: the oracle of every test, in float64 for float64 inputs."""

import jax
import jax.numpy as jnp
from jax import Array

from .._broadcast import like
from ..core.arguments import accumulator
from .spec import LossArrays, LossSpec


def cross_entropy(arrays: LossArrays, spec: LossSpec) -> dict[str, Array]:
    """`out [*]`, or `[*, M, N]` without a sum, and the statistics `[*, M, N]`, in float32 (float64 for float64 inputs)."""
    wide = accumulator(arrays.x.dtype)
    real = arrays.labels >= 0
    x = jnp.where(real[..., None], arrays.x, 0).astype(wide)
    logits = jnp.einsum("...ne,ve->...nv", x, arrays.weight.astype(wide), precision="highest")
    if arrays.bias is not None:
        logits = logits + like(arrays.bias.astype(wide), logits)
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
    logits = logits / spec.temperature
    lse = jax.nn.logsumexp(logits, -1)
    log_p = logits - lse[..., None]
    target = jnp.take_along_axis(logits, jnp.maximum(arrays.labels, 0)[..., None], -1)[..., 0]
    smooth = spec.label_smoothing
    losses = lse - (1 - smooth) * target - smooth * jnp.mean(logits, -1) + spec.z_loss * lse**2
    if arrays.token_weights is not None:
        losses = arrays.token_weights.astype(wide) * losses
    results = {"log_probs": target - lse, "entropy": -jnp.sum(jnp.exp(log_p) * log_p, -1), "lse": lse}
    results["margin"] = jax.lax.stop_gradient(target - jnp.max(logits, -1))
    results = {name: jnp.where(real, x, 0) for name, x in (results | {"out": losses}).items()}
    return results if spec.reduction == "none" else results | {"out": jnp.sum(results["out"], (-2, -1))}
