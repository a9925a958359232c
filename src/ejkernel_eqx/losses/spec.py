"""The description of a cross entropy of a projection once every option and layout has been resolved.

Everything below the public operation (the reference, the platforms) uses only these types. Letters: `M` rows of `N` tokens, `E` features, `V`
the vocabulary.
"""

import dataclasses
from typing import NamedTuple

from jax import Array

from ..core.letters import Letters

REDUCTIONS = ("mean", "sum", "none")


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


class LossArrays(NamedTuple):
    """The arrays of a call; `*` are the leading axes, the same for all but the weight and the bias, which have none."""

    x: Array  # [*, M, N, E]
    labels: Array  # int32 [*, M, N]; negative for tokens that are ignored, whose x is never used
    weight: Array  # [V, E], any float dtype
    bias: Array | None = None  # [V], any float dtype
    token_weights: Array | None = None  # [*, M, N], any float dtype


# `bM` and `bN`: rows and tokens are independent, so a mesh may split either, as if they were leading axes.
_AXES = {"x": "bM bN E", "labels": "bM bN", "weight": "V E", "bias": "V", "token_weights": "bM bN"}
STATISTICS = ("log_probs", "entropy", "lse", "margin")
"""Results of each token `[*, M, N]`, 0 for ignored ones; float32 (float64 for float64). The margin is the logit of the label less the largest
one, and has no gradient."""

_TOKENS = dict.fromkeys(STATISTICS, "bM bN")
_SUMMED, _EACH = (Letters.of(_AXES | {"out": out} | _TOKENS) for out in ("", "bM bN"))
LEARNED = ("x", "weight", "bias", "token_weights")
SHARED = frozenset({"weight", "bias"})
RESULTS = ("out",)  # [*], or [*, M, N] without a sum; float32 (float64 for float64)
SAVED = {"dx": ("bM", "bN", "E"), "dweight": ("V", "E"), "dbias": ("V",), "losses": ("bM", "bN")}


def letters_of(spec: LossSpec) -> Letters:
    return _EACH if spec.reduction == "none" else _SUMMED
