"""Checks what a user passes to a loss and resolves it to `LossArrays`."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from .._values import checked
from ..core.arguments import array, fitting, is_finite
from .spec import LossArrays, LossSpec, REDUCTIONS


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of an operation, checked."""

    reduction: str
    logits_soft_cap: float | None
    label_smoothing: float
    z_loss: float
    ignore_index: int | None

    def __post_init__(self):
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', received {self.reduction!r}.")
        cap = self.logits_soft_cap
        if cap is not None and not (is_finite(cap) and cap > 0):
            raise ValueError(f"logits_soft_cap: expected a finite number > 0 or None, received {cap!r}.")
        if not (is_finite(self.label_smoothing) and 0 <= self.label_smoothing <= 1):
            raise ValueError(
                f"label_smoothing: expected a number from 0 to 1, received {self.label_smoothing!r}."
            )
        if not (is_finite(self.z_loss) and self.z_loss >= 0):
            raise ValueError(f"z_loss: expected a finite number >= 0, received {self.z_loss!r}.")
        index = self.ignore_index
        if index is not None and (isinstance(index, bool) or not isinstance(index, int | np.integer)):
            raise ValueError(f"ignore_index: expected an integer or None, received {index!r}.")

    @property
    def spec(self) -> LossSpec:
        cap = self.logits_soft_cap
        return LossSpec(self.reduction, cap and float(cap), float(self.label_smoothing), float(self.z_loss))


def resolve(options: Options, x: Any, labels: Any, weight: Any, bias: Any, token_weights: Any) -> LossArrays:
    """The arrays of a call: rows of tokens."""
    x = array("x", x, "E")
    weight = fitting("weight", weight, (None, x.shape[-1]), "V E")
    size = weight.shape[0]
    if size == 0:
        raise ValueError(f"weight: expected at least one row [V, E], received shape {weight.shape}.")
    bias = None if bias is None else fitting("bias", bias, (size,), "V")
    lead = x.shape[:-1]
    labels = _labels(options, labels, lead, size)
    if token_weights is not None:
        token_weights = array("token_weights", token_weights, "", 0)
        if token_weights.shape != lead:
            raise ValueError(
                f"token_weights: expected the shape {lead} of the labels, received {token_weights.shape}; give each token one."
            )
    rows = lambda x, ends: x if x.ndim - ends == 2 else x.reshape(_rows(lead) + x.shape[x.ndim - ends :])
    token_weights = None if token_weights is None else rows(token_weights, 0)
    return LossArrays(rows(x, 1), rows(labels, 0), weight, bias, token_weights)


def _rows(lead: tuple[int, ...]) -> tuple[int, int]:
    """Tokens with any leading axes, as rows. Two axes stay what they are, as a mesh may split either."""
    return (1, math.prod(lead)) if len(lead) < 2 else (math.prod(lead[:-1]), lead[-1])


def _labels(options: Options, given: Any, lead: tuple[int, ...], size: int) -> Array:
    labels = jnp.asarray(given)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels: expected integers {lead}, received dtype {labels.dtype}; pass token ids.")
    if labels.shape != lead:
        raise ValueError(
            f"labels: expected the shape {lead} of x without its features, received {labels.shape}; give each token one."
        )
    ignored = options.ignore_index
    is_wrong = lambda x: (x >= size) & (x != ignored) if ignored is not None else x >= size
    say = lambda value: (
        f"labels: expected ids below the vocabulary of {size}, received {value}; use a negative one, or ignore_index=, for tokens "
        "without a label."
    )
    known = checked(labels.astype(jnp.int32), given, is_wrong, say, lambda values: str(values.max()))
    return known if ignored is None else jnp.where(known == ignored, -1, known)
