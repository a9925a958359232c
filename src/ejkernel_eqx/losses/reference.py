"""The cross entropy as in its equation, from all logits at once: the oracle of every test, in float64 for float64 inputs."""

import jax
import jax.numpy as jnp
from jax import Array

from .._broadcast import like
from ..core.arguments import accumulator
from .spec import LossArrays, LossSpec


def cross_entropy(arrays: LossArrays, spec: LossSpec) -> dict[str, Array]:
    """`out [*]`, or `[*, M, N]` without a reduction, in float32 (float64 for float64 inputs)."""
    wide = accumulator(arrays.x.dtype)
    real = arrays.labels >= 0
    x = jnp.where(real[..., None], arrays.x, 0).astype(wide)
    logits = jnp.einsum("...ne,ve->...nv", x, arrays.weight.astype(wide), precision="highest")
    if arrays.bias is not None:
        logits = logits + like(arrays.bias.astype(wide), logits)
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
    lse = jax.nn.logsumexp(logits, -1)
    target = jnp.take_along_axis(logits, jnp.maximum(arrays.labels, 0)[..., None], -1)[..., 0]
    smooth = spec.label_smoothing
    losses = lse - (1 - smooth) * target - smooth * jnp.mean(logits, -1) + spec.z_loss * lse**2
    weights = jnp.ones_like(losses) if arrays.token_weights is None else arrays.token_weights.astype(wide)
    weights = jnp.where(real, weights, 0)
    losses = weights * jnp.where(real, losses, 0)
    if spec.reduction == "none":
        return {"out": losses}
    if spec.reduction == "sum":
        return {"out": jnp.sum(losses, (-2, -1))}
    total = jnp.sum(weights, (-2, -1))
    return {"out": jnp.where(total == 0, 0, jnp.sum(losses, (-2, -1)) / jnp.where(total == 0, 1, total))}
