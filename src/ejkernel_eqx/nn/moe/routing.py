"""Defines which experts a token goes to, and with which weights: pure functions of the router's logits."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..._signatures import check_one_of
from ..._take import take_along

Scoring = Literal["softmax", "sigmoid", "top_k_softmax"]
GroupScore = Literal["top2", "max"]

_SCORINGS = ("softmax", "sigmoid", "top_k_softmax")
_GROUP_SCORES = ("top2", "max")


class Routing(NamedTuple):
    """Holds what a router says of tokens `[...]`: `logits [..., experts]`, and for the `k` chosen experts `weights
    [..., k]` and `indices [..., k]`. Logits and weights are at least float32, indices int32. The best expert comes
    first, and of equal ones that with the lower number."""

    logits: Array
    weights: Array
    indices: Array


@dataclasses.dataclass(frozen=True)
class Choice:
    """Says how experts are chosen by their logits; the arguments are those of `MixtureOfExperts`, which checks sizes and flags."""

    num_experts: int
    top_k: int
    scoring: Scoring = "softmax"
    normalize: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    top_k_groups: int = 1
    group_score: GroupScore = "top2"
    scale_inputs: bool = False

    def __post_init__(self):
        if self.scale_inputs and self.top_k != 1:
            raise ValueError(
                f"scale_inputs: expected False with top_k={self.top_k}, received True; it is for one expert a token."
            )
        check_one_of("scoring", self.scoring, _SCORINGS)
        check_one_of("group_score", self.group_score, _GROUP_SCORES)
        self._check_groups()

    def _check_groups(self) -> None:
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_groups: expected a divisor of num_experts={self.num_experts}, received {self.num_groups}; groups have equal sizes."
            )
        if self.top_k_groups > self.num_groups:
            raise ValueError(
                f"top_k_groups: expected at most num_groups={self.num_groups}, received {self.top_k_groups}; num_groups allows all."
            )
        size = self.num_experts // self.num_groups
        if self.is_limited and self.group_score == "top2" and size < 2:
            raise ValueError(
                f"num_groups: expected groups of two experts or more, whose two best are added, received {self.num_groups} groups of "
                f'{self.num_experts} experts; group_score="max" takes the best one alone.'
            )
        if self.top_k > size * self.top_k_groups:
            raise ValueError(
                f"top_k: expected at most {size * self.top_k_groups}, the experts that a token may go to, received {self.top_k}; allow more "
                "groups or fewer experts for each token."
            )

    @property
    def is_limited(self) -> bool:
        """Returns whether a token may go to the experts of some groups only."""
        return self.top_k_groups < self.num_groups


def choose(logits: Array, how: Choice, correction_bias: Array | None = None) -> Routing:
    """The experts of each token and their weights, by `logits [..., experts]`; `correction_bias [experts]` is added where experts are ranked,
    and not to their weights."""
    scores = scores_of(logits, how.scoring)
    ranked = lax.stop_gradient(scores)
    ranked = jnp.where(ranked == 0, jnp.zeros_like(ranked), ranked)  # `top_k` takes -0.0 for less than 0.0
    if correction_bias is not None:
        bias = lax.stop_gradient(correction_bias).astype(ranked.dtype)
        ranked = ranked + lax.expand_dims(bias, range(ranked.ndim - 1))
    if how.is_limited:
        ranked = jnp.where(_in_best_groups(ranked, how), ranked, -jnp.inf)
    _, indices = lax.top_k(ranked, how.top_k)
    if how.normalize or how.scoring == "top_k_softmax":
        # A quotient of scores that are all tiny, and its derivative, would be one of zeros.
        weights = take_along(log_scores_of(logits, how.scoring), indices, axis=-1)
        weights = jax.nn.softmax(weights, axis=-1)
    else:
        weights = take_along(scores, indices, axis=-1)
    if how.scaling_factor != 1:
        weights = weights * jnp.asarray(how.scaling_factor, weights.dtype)
    return Routing(logits, weights, indices.astype(jnp.int32))


def scores_of(logits: Array, scoring: str) -> Array:
    """Returns what experts are ranked by."""
    if scoring == "top_k_softmax":
        return logits
    return jax.nn.sigmoid(logits) if scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)


def log_scores_of(logits: Array, scoring: str) -> Array:
    """The logarithms of the scores, or the same number more for every expert of a token."""
    return jax.nn.log_sigmoid(logits) if scoring == "sigmoid" else logits


def probabilities_of(logits: Array, scoring: str) -> Array:
    """Returns how much of a token each expert would get if all of them were asked: the scores over their sum."""
    return jax.nn.softmax(log_scores_of(logits, scoring), axis=-1)


def _in_best_groups(ranked: Array, how: Choice) -> Any:
    """Returns whether each expert belongs to one of the best groups of its token."""
    size = how.num_experts // how.num_groups
    grouped = ranked.reshape(*ranked.shape[:-1], how.num_groups, size)
    best = 2 if how.group_score == "top2" else 1
    of_groups = jnp.sum(lax.top_k(grouped, best)[0], axis=-1)
    _, groups = lax.top_k(of_groups, how.top_k_groups)
    mine = jnp.arange(how.num_experts, dtype=groups.dtype) // size
    return jnp.any(groups[..., None] == lax.expand_dims(mine, range(groups.ndim)), axis=-2)
