"""Checks what a user passes to a loss and resolves it to `LossArrays`."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from .._values import checked
from ..core.arguments import array, check_flags, fitting, read_array
from ..parallel import explicit_mesh, inside_manual_mesh, mesh_axes, spec_of
from .checks import check_number, check_shape, floats, read_soft_cap
from .spec import DIVERGENCES, LossArrays, LossSpec, REDUCTIONS, TOKENS
from .statistics import devices
from .teacher import Teacher


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of an operation, checked."""

    reduction: str
    logits_soft_cap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int | None = None
    temperature: float = 1.0
    vocab_axis: str | None = None
    divergence: str | None = None
    beta: float = 0.5

    def __post_init__(self):
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', received {self.reduction!r}.")
        if self.divergence not in (None, *DIVERGENCES):
            raise ValueError(
                f"divergence: expected one of {', '.join(DIVERGENCES)}, received {self.divergence!r}."
            )
        read_soft_cap(self.logits_soft_cap)
        check_number("label_smoothing", self.label_smoothing, 0, 1)
        check_number("z_loss", self.z_loss, 0, math.inf)
        check_number("temperature", self.temperature, 0, math.inf, ends=False)
        check_number("beta", self.beta, 0, 1, ends=False)
        index = self.ignore_index
        if index is not None and (isinstance(index, bool) or not isinstance(index, int | np.integer)):
            raise ValueError(f"ignore_index: expected an integer or None, received {index!r}.")
        if not isinstance(self.vocab_axis, str | None):
            raise ValueError(
                f"vocab_axis: expected the name of a mesh axis or None, received {self.vocab_axis!r}."
            )

    def spec(self, has_statistics: bool = False, vocab_axis: str | None = None) -> LossSpec:
        """The static half of a call; `vocab_axis`: that in the type of the weight."""
        return LossSpec(
            "none" if self.reduction == "none" else "sum",
            read_soft_cap(self.logits_soft_cap),
            float(self.temperature),
            float(self.label_smoothing),
            float(self.z_loss),
            has_statistics,
            self.vocab_axis or vocab_axis,
            inside_manual_mesh(),
            self.divergence,
            float(self.beta),
        )


def resolve(
    options: Options,
    x: Any,
    labels: Any,
    weight: Any,
    bias: Any,
    token_weights: Any,
    *,
    has_statistics: bool = False,
    teacher: Teacher | None = None,
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
    spec = options.spec(has_statistics, None if teacher else _axis_of(weight, x, labels))
    labels = labels_of(options.ignore_index, labels, lead, size * devices(spec))
    token_weights = (
        None if token_weights is None else floats("token_weights", token_weights, lead, "the labels")
    )
    arrays = LossArrays(x, labels, weight, bias, token_weights)
    if teacher is not None:
        _check_teacher(teacher, options.divergence, lead, size)
        arrays = arrays._replace(**teacher.arrays)
        spec = dataclasses.replace(spec, teacher_soft_cap=teacher.soft_cap)
    if len(lead) == 2:
        return arrays, spec
    # Two axes stay what they are, as a mesh may split either.
    rows = (1, math.prod(lead)) if len(lead) < 2 else (math.prod(lead[:-1]), lead[-1])
    by_token = {name: getattr(arrays, name) for name in (*TOKENS, "token_weights")}
    by_token = {n: x.reshape(rows + x.shape[len(lead) :]) for n, x in by_token.items() if x is not None}
    return arrays._replace(**by_token), spec


def _check_teacher(teacher: Teacher, divergence: str | None, lead: tuple[int, ...], size: int) -> None:
    if "teacher_indices" in teacher.arrays and divergence == "reverse_kl":
        raise ValueError(
            "teacher: expected probabilities of all words for reverse_kl, received the top k; use forward_kl or jensen_shannon."
        )
    shapes = {"logits": ((*lead, size), "V"), "log_probs": ((*lead, None), "K"), "x": ((*lead, None), "F")}
    shapes["weight"] = ((size, None), "V F")
    for name, x in teacher.arrays.items():
        if (shape := shapes.get(name.removeprefix("teacher_"))) is not None:
            fitting("teacher", x, *shape)


def _axis_of(weight: Array, *others: Any) -> str | None:
    """The mesh axis that splits the rows of the weight, by its type on an explicit mesh, and nothing else."""
    mesh = explicit_mesh(weight)
    axis = None if mesh is None else spec_of(weight)[0]
    if mesh is None or not isinstance(axis, str) or mesh.shape[axis] == 1:
        return None
    taken = [mesh_axes(entry) for x in others for entry in spec_of(x)]
    return None if axis in set().union(*taken) else axis


def labels_of_mask(x: Any, mask: Any) -> Array:
    """A label for each token that the mask leaves."""
    x = array("x", x, "E")
    if mask is None:
        return jnp.zeros_like(x[..., 0], jnp.int32)
    mask = read_array("mask", mask, "booleans", "[...]")
    return jnp.where(check_shape("mask", mask, x.shape[:-1], "x without its features"), 0, -1)


def labels_of(ignored: int | None, given: Any, lead: tuple[int, ...], size: int) -> Array:
    """The labels, int32; negative for tokens that are ignored."""
    labels = jnp.asarray(given)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels: expected integers {lead}, received dtype {labels.dtype}; pass token ids.")
    check_shape("labels", labels, lead, "x without its features")
    is_wrong = lambda x: (x >= size) & (x != ignored) if ignored is not None else x >= size
    say = lambda value: (
        f"labels: expected ids below the vocabulary of {size}, received {value}; use a negative one, or ignore_index=, for tokens "
        "without a label."
    )
    known = checked(labels.astype(jnp.int32), given, is_wrong, say, lambda values: str(values.max()))
    return known if ignored is None else jnp.where(known == ignored, -1, known)
