"""Checks what a user passes to a loss and resolves it to `LossArrays`."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from .._values import checked
from ..core.arguments import array, check_flags, fitting, is_finite
from ..parallel import explicit_mesh, spec_of
from .spec import LossArrays, LossSpec, REDUCTIONS
from .statistics import devices


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of an operation, checked."""

    reduction: str
    logits_soft_cap: float | None
    label_smoothing: float
    z_loss: float
    ignore_index: int | None
    temperature: float = 1.0
    vocab_axis: str | None = None

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
        if not (is_finite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature: expected a finite number > 0, received {self.temperature!r}.")
        if not isinstance(self.vocab_axis, str | None):
            raise ValueError(
                f"vocab_axis: expected the name of a mesh axis or None, received {self.vocab_axis!r}."
            )

    def spec(self, has_statistics: bool = False, vocab_axis: str | None = None) -> LossSpec:
        """The static half of a call; `vocab_axis`: that in the type of the weight."""
        cap = self.logits_soft_cap
        return LossSpec(
            "none" if self.reduction == "none" else "sum",
            cap and float(cap),
            float(self.temperature),
            float(self.label_smoothing),
            float(self.z_loss),
            has_statistics,
            self.vocab_axis or vocab_axis,
        )


def resolve(
    options: Options, x: Any, labels: Any, weight: Any, bias: Any, token_weights: Any, has_statistics: bool
) -> tuple[LossArrays, LossSpec]:
    """The arrays of a call: rows of tokens; and what is static of it."""
    check_flags(return_statistics=has_statistics)
    x = array("x", x, "E")
    weight = fitting("weight", weight, (None, x.shape[-1]), "V E")
    size = weight.shape[0]
    if size == 0:
        raise ValueError(f"weight: expected at least one row [V, E], received shape {weight.shape}.")
    bias = None if bias is None else fitting("bias", bias, (size,), "V")
    lead = x.shape[:-1]
    spec = options.spec(has_statistics, _axis_of(weight, x, labels))
    labels = labels_of(options.ignore_index, labels, lead, size * devices(spec))
    token_weights = None if token_weights is None else weights_of(token_weights, lead)
    rows = lambda x, ends: x if x.ndim - ends == 2 else x.reshape(_rows(lead) + x.shape[x.ndim - ends :])
    token_weights = None if token_weights is None else rows(token_weights, 0)
    return LossArrays(rows(x, 1), rows(labels, 0), weight, bias, token_weights), spec


def _axis_of(weight: Array, *others: Any) -> str | None:
    """The mesh axis that splits the rows of the weight, by its type on an explicit mesh, and nothing else."""
    mesh = explicit_mesh(weight)
    axis = None if mesh is None else spec_of(weight)[0]
    taken = [entry for x in others for entry in spec_of(x)]
    is_free = not any(axis in (entry if isinstance(entry, tuple) else (entry,)) for entry in taken)
    return axis if isinstance(axis, str) and mesh.shape[axis] > 1 and is_free else None


def weights_of(given: Any, lead: tuple[int, ...]) -> Array:
    weights = array("token_weights", given, "", 0)
    if weights.shape != lead:
        raise ValueError(
            f"token_weights: expected the shape {lead} of the labels, received {weights.shape}; give each token one."
        )
    return weights


def _rows(lead: tuple[int, ...]) -> tuple[int, int]:
    """Tokens with any leading axes, as rows. Two axes stay what they are, as a mesh may split either."""
    return (1, math.prod(lead)) if len(lead) < 2 else (math.prod(lead[:-1]), lead[-1])


def labels_of(ignored: int | None, given: Any, lead: tuple[int, ...], size: int) -> Array:
    """The labels, int32; negative for tokens that are ignored."""
    labels = jnp.asarray(given)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels: expected integers {lead}, received dtype {labels.dtype}; pass token ids.")
    if labels.shape != lead:
        raise ValueError(
            f"labels: expected the shape {lead} of x without its features, received {labels.shape}; give each token one."
        )
    is_wrong = lambda x: (x >= size) & (x != ignored) if ignored is not None else x >= size
    say = lambda value: (
        f"labels: expected ids below the vocabulary of {size}, received {value}; use a negative one, or ignore_index=, for tokens "
        "without a label."
    )
    known = checked(labels.astype(jnp.int32), given, is_wrong, say, lambda values: str(values.max()))
    return known if ignored is None else jnp.where(known == ignored, -1, known)
