"""The description of a loss of a projection once every option and layout has been resolved: a cross entropy, or a divergence from a teacher.

Everything below the public operation (the reference, the platforms) uses only these types. Letters: `M` rows of `N` tokens, `E` features, `V`
the vocabulary.
"""

import dataclasses
from typing import NamedTuple

from jax import Array

from ..core.letters import Letters

REDUCTIONS = ("mean", "sum", "none")
DIVERGENCES = ("forward_kl", "reverse_kl", "jensen_shannon")


@dataclasses.dataclass(frozen=True)
class LossSpec:
    """The static half of a call. A mean is a sum here, which the operation divides."""

    reduction: str = "sum"  # or "none"
    logits_soft_cap: float | None = None
    temperature: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    has_statistics: bool = False
    """Whether the call returns those of each token besides the loss."""

    vocab_axis: str | None = None
    """The mesh axis that the vocabulary is split over: `weight` and `bias` are then one device's consecutive rows, and labels count all of
    them. Platforms exchange by `statistics.merged` and `statistics.summed` only."""

    is_local: bool = False
    """Whether the call is one device's, inside a user's `shard_map`. JAX then adds up what its devices have parts of."""

    divergence: str | None = None
    """One of `DIVERGENCES` in place of the cross entropy. Then smoothing and z-loss are 0, there are no statistics and no `vocab_axis`, and labels
    say by their sign which tokens are ignored."""

    beta: float = 0.5  # the teacher's share of the mixture in a Jensen-Shannon divergence
    teacher_soft_cap: float | None = None


class LossArrays(NamedTuple):
    """The arrays of a call; `*` are the leading axes, the same for all but the weight and the bias, which have none."""

    x: Array  # [*, M, N, E]
    labels: Array  # int32 [*, M, N]; negative for tokens that are ignored, whose x is never used
    weight: Array  # [V, E], any float dtype
    bias: Array | None = None  # [V], any float dtype
    token_weights: Array | None = None  # [*, M, N], any float dtype
    # One of three forms of a teacher, for a divergence: logits, some words' log-probabilities, or features and a head of its own.
    teacher_logits: Array | None = None  # [*, M, N, V], any float dtype
    teacher_indices: Array | None = None  # int32 [*, M, N, K]; words outside of the vocabulary are left out
    teacher_log_probs: Array | None = (
        None  # [*, M, N, K], any float dtype; other words have a probability of 0
    )
    teacher_x: Array | None = None  # [*, M, N, F], any float dtype
    teacher_weight: Array | None = None  # [V, F], any float dtype
    teacher_bias: Array | None = None  # [V], any float dtype


# `bM` and `bN`: rows and tokens are independent, so a mesh may split either, as if they were leading axes.
_AXES = {"x": "bM bN E", "labels": "bM bN", "weight": "V E", "bias": "V", "token_weights": "bM bN"}
_TEACHER = {"teacher_logits": "bM bN V", "teacher_indices": "bM bN K", "teacher_log_probs": "bM bN K"}
_AXES |= _TEACHER | {"teacher_x": "bM bN F", "teacher_weight": "V F", "teacher_bias": "V"}
STATISTICS = ("log_probs", "entropy", "lse", "margin")
"""Results of each token `[*, M, N]`, 0 for ignored ones; float32 (float64 for float64). The margin is the logit of the label less the largest
one, and has no gradient."""

_OF_TOKENS = dict.fromkeys(STATISTICS, "bM bN")
_SUMMED, _EACH = (Letters.of(_AXES | {"out": out} | _OF_TOKENS) for out in ("", "bM bN"))
TOKENS = ("x", "labels", *_TEACHER, "teacher_x")
"""The arrays that a chunk of tokens has a part of."""

LEARNED = ("x", "weight", "bias", "token_weights")
SHARED = frozenset({"weight", "bias", "teacher_weight", "teacher_bias"})
RESULTS = ("out",)  # [*], or [*, M, N] without a sum; float32 (float64 for float64)
SAVED = {"dx": ("bM", "bN", "E"), "dweight": ("V", "E"), "dbias": ("V",), "losses": ("bM", "bN")}


def letters_of(spec: LossSpec) -> Letters:
    return _EACH if spec.reduction == "none" else _SUMMED
