"""What a pass over the logits leaves of each token, how parts of a vocabulary are merged, and the slope of what is computed from it.

The same for all platforms. A kernel makes the numbers of a `Part`; its backward takes those of a `Slope`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .spec import LossSpec


class Part(NamedTuple):
    """A pass over some words of a vocabulary, for each token, in float32 or wider."""

    largest: Array  # m, the largest logit l
    exponentials: Array  # sum of e^(l - m)
    target: Array  # the logit of the label; 0 if it is not among these words
    total: Array | None = None  # sum of l, for label smoothing
    weighted: Array | None = None  # sum of e^(l - m) (l - m), for the entropy


class Tokens(NamedTuple):
    """What follows from all words, for each token."""

    lse: Array
    target: Array  # the logit of the label
    margin: Array  # that logit less the largest
    mean: Array | None  # of all logits
    entropy: Array | None


class Slope(NamedTuple):
    """The gradient of a token's logits before cap and temperature, by numbers that do not depend on them:
    `p (of_p + of_p_lse lse + of_p_log_p (log p + H)) + of_label [v = y] + of_all`."""

    of_p: Array
    of_label: Array
    of_p_lse: Array | None
    of_p_log_p: Array | None
    of_all: Array | None


def devices(spec: LossSpec) -> int:
    """The number of devices that share the vocabulary here; one where the axis is not bound, as the call is not split."""
    if spec.vocab_axis is None:
        return 1
    try:
        return lax.axis_size(spec.vocab_axis)
    except NameError:
        return 1


def place_of(spec: LossSpec, labels: Array, words: int) -> Array:
    """The place of each label among this device's `words`; outside of them it is on another device."""
    return labels if devices(spec) == 1 else labels - lax.axis_index(spec.vocab_axis) * words


def weights_of(labels: Array, weights: Array | None, dtype: Any) -> Array:
    """The weight of each token, 0 for those that are ignored."""
    real = labels >= 0
    return real.astype(dtype) if weights is None else jnp.where(real, weights.astype(dtype), 0)


def mean_of(total: Array, weights: Array) -> Array:
    """A sum of losses over the sum of all weights; 0 if that is 0."""
    count = jnp.sum(weights)
    return jnp.where(count == 0, 0, total / jnp.where(count == 0, 1, count))


def curved(logits: Array, cap: float | None, temperature: float) -> tuple[Array, Array | None]:
    """The logits after soft cap and temperature, and the derivative of that if it is not one."""
    curve = None
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
        curve = 1 - (logits / cap) ** 2
    if temperature != 1:
        logits = logits / temperature
        curve = jnp.full_like(logits, 1 / temperature) if curve is None else curve / temperature
    return logits, curve


def part_of(logits: Array, hit: Array, spec: LossSpec) -> Part:
    """The pass over logits `[..., V]`; `hit` says which of them are the label's."""
    # A comparison rather than a gather: it is part of the pass over the logits, also where the vocabulary is split over devices.
    target = jnp.sum(jnp.where(hit, logits, jnp.zeros_like(logits)), -1)
    # Logits may be minus infinity, such as those of words that are masked: 0 times the least number is 0.
    least = jnp.finfo(logits.dtype).min
    largest = lax.stop_gradient(jnp.maximum(jnp.max(logits, -1), least))
    shifted = jnp.maximum(logits - largest[..., None], least)
    powers = jnp.exp(shifted)
    total = jnp.sum(logits, -1) if spec.label_smoothing else None
    weighted = jnp.sum(powers * shifted, -1) if spec.has_statistics else None
    return Part(largest, jnp.sum(powers, -1), target, total, weighted)


def merged(part: Part, spec: LossSpec) -> Part:
    """The pass over all words, from those of devices that have some each: one exchange."""
    if devices(spec) == 1:
        return part
    known = {name: x for name, x in part._asdict().items() if x is not None}
    gathered = lax.all_gather(jnp.stack([*known.values()]), spec.vocab_axis)
    each = Part(**dict(zip(known, jnp.moveaxis(gathered, 1, 0))))
    largest = jnp.max(each.largest, 0)
    shift = each.largest - largest[None]
    scale = jnp.exp(shift)
    add, total, weighted = lambda x: jnp.sum(x, 0), each.total, each.weighted
    total = None if total is None else add(total)
    weighted = None if weighted is None else add(scale * (weighted + shift * each.exponentials))
    return Part(largest, add(scale * each.exponentials), add(each.target), total, weighted)


def summed(x: Array, spec: LossSpec) -> Array:
    """The sum of the devices' gradients of an array that all of them have whole."""
    return x if devices(spec) == 1 or spec.is_local else lax.psum(x, spec.vocab_axis)


def as_one(x: Array, spec: LossSpec) -> Array:
    """A result that all devices have, also by its type."""
    return lax.pmean(x, spec.vocab_axis) if spec.is_local and spec.vocab_axis else x


def tokens_of(part: Part, words: int) -> Tokens:
    """What follows from a pass over all words."""
    log_sum = jnp.log(part.exponentials)
    entropy = None if part.weighted is None else log_sum - part.weighted / part.exponentials
    mean = None if part.total is None else part.total / words
    return Tokens(part.largest + log_sum, part.target, part.target - part.largest, mean, entropy)


def results_of(tokens: Tokens, is_real: Array, spec: LossSpec) -> dict[str, Array]:
    """The losses of all tokens before they are weighted, and the statistics if the call has them; 0 for tokens without a label."""
    losses = tokens.lse - (1 - spec.label_smoothing) * tokens.target
    losses -= 0 if tokens.mean is None else spec.label_smoothing * tokens.mean
    results = {"losses": losses + spec.z_loss * tokens.lse**2 if spec.z_loss else losses}
    if tokens.entropy is not None:
        log_probs = tokens.target - tokens.lse
        results |= {"log_probs": log_probs, "entropy": tokens.entropy, "lse": tokens.lse}
        results["margin"] = lax.stop_gradient(tokens.margin)
    return {name: jnp.where(is_real, x, jnp.zeros_like(x)) for name, x in results.items()}


def slope_of(cotangents: Mapping[str, Array], spec: LossSpec, words: int) -> Slope:
    """The slope of `results_of`, whose cotangents are 0 where they are absent."""
    like = next(iter(cotangents.values()))
    of_loss, of_entropy = cotangents.get("losses"), cotangents.get("entropy")
    of_p = of_label = jnp.zeros_like(like)
    of_p_lse = of_all = None
    if of_loss is not None:
        of_p, of_label = of_loss, -of_loss * (1 - spec.label_smoothing)
        of_p_lse = of_loss * (2 * spec.z_loss) if spec.z_loss else None
        of_all = -of_loss * (spec.label_smoothing / words) if spec.label_smoothing else None
    if (of_log_prob := cotangents.get("log_probs")) is not None:
        of_p, of_label = of_p - of_log_prob, of_label + of_log_prob
    of_p += cotangents.get("lse", 0)
    return Slope(of_p, of_label, of_p_lse, None if of_entropy is None else -of_entropy, of_all)
