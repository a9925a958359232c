"""Divergences of two distributions over a vocabulary, and their slopes in the logits of the student."""

import jax
import jax.numpy as jnp
from jax import Array

from ..core.arguments import accumulator
from .chunks import logits_of
from .spec import LossArrays, LossSpec
from .statistics import curved


def teacher_log_probs(arrays: LossArrays, spec: LossSpec) -> Array:
    """Those of a chunk of tokens, `[N, V]`; minus infinity for words outside of the top k."""
    dtype, words = accumulator(arrays.x.dtype), len(arrays.weight)
    if (indices := arrays.teacher_indices) is not None:
        assert arrays.teacher_log_probs is not None
        rows = jnp.arange(len(indices), dtype=indices.dtype)[:, None]
        nowhere = jnp.full((len(indices), words), -jnp.inf, dtype)
        indices = jnp.where(indices < 0, words, indices)  # negative ones would count from the end
        return nowhere.at[rows, indices].set(arrays.teacher_log_probs.astype(dtype), mode="drop")
    if (logits := arrays.teacher_logits) is None:
        x, weight = arrays.teacher_x, arrays.teacher_weight
        assert x is not None and weight is not None
        logits = logits_of(x, weight.astype(x.dtype), arrays.teacher_bias, dtype)
    logits, _ = curved(logits.astype(dtype), spec.teacher_soft_cap, spec.temperature)
    return jax.nn.log_softmax(logits)


def divergence_of(s: Array, t: Array, spec: LossSpec) -> tuple[Array, Array]:
    """The divergence of each token from log-probabilities `[N, V]` of the student and the teacher, and its slope in the logits of the student."""
    q, p = jnp.exp(s), jnp.exp(t)
    total = lambda x: jnp.sum(x, -1, keepdims=True)
    # 0 log 0 is 0.
    mean_of = lambda weights, logs: total(jnp.where(weights > 0, weights * logs, jnp.zeros_like(logs)))
    if spec.divergence == "forward_kl":
        return mean_of(p, t - s)[:, 0], q * total(p) - p
    if spec.divergence == "reverse_kl":
        losses = mean_of(q, s - t)
        return losses[:, 0], jnp.where(q > 0, q * (s - t - losses), jnp.zeros_like(q))
    beta = jnp.asarray(spec.beta, s.dtype)
    mixture = jnp.logaddexp(jnp.log(beta) + t, jnp.log1p(-beta) + s)
    of_student = mean_of(q, s - mixture)
    losses = beta * mean_of(p, t - mixture) + (1 - beta) * of_student
    slope = jnp.where(q > 0, (1 - beta) * q * (s - mixture - of_student), jnp.zeros_like(q))
    return losses[:, 0], slope
