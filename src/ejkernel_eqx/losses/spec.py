"""The description of a cross entropy of a projection once every option and layout has been resolved.

Everything below the public operation (the reference, XLA) uses only these types. Letters: `M` rows of `N` tokens, `E` features, `V`
the vocabulary.
"""

import dataclasses
from typing import NamedTuple

from jax import Array

from ..core.letters import Letters

REDUCTIONS = ("mean", "sum", "none")


@dataclasses.dataclass(frozen=True)
class LossSpec:
    """The static half of a call."""

    reduction: str = "mean"
    logits_soft_cap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0


class LossArrays(NamedTuple):
    """The arrays of a call; `*` are the leading axes, the same for all but the weight and the bias, which have none."""

    x: Array  # [*, M, N, E]
    labels: Array  # int32 [*, M, N]; negative for tokens that are ignored, whose x is never used
    weight: Array  # [V, E], any float dtype
    bias: Array | None = None  # [V], any float dtype
    token_weights: Array | None = None  # [*, M, N], any float dtype


_AXES = {"x": "M N E", "labels": "M N", "weight": "V E", "bias": "V", "token_weights": "M N"}
_REDUCED, _EACH = (Letters.of(_AXES | {"out": out}) for out in ("", "M N"))
LEARNED = ("x", "weight", "bias", "token_weights")
SHARED = frozenset({"weight", "bias"})
RESULTS = ("out",)  # [*], or [*, M, N] without a reduction; float32 (float64 for float64)
SAVED = {"dx": ("M", "N", "E"), "dweight": ("V", "E"), "dbias": ("V",), "losses": ("M", "N")}


def letters_of(spec: LossSpec) -> Letters:
    return _EACH if spec.reduction == "none" else _REDUCED
