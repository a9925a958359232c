"""The family's kinds of calls: their problem and their axes."""

import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from .._kernel import Plan
from ..core import Kind
from ..core.arguments import accumulator, wide
from ..core.kind import Named
from ..dispatch import Problem
from . import reference
from .spec import LEARNED, letters_of, LossArrays, LossSpec, RESULTS, SAVED, SHARED, STATISTICS
from .statistics import as_one, devices, mean_of, weights_of


def problem_of(operation: str, arrays: LossArrays, spec: LossSpec) -> Problem:
    """The host metadata of a call."""
    size = letters_of(spec).sizes(arrays)
    return Problem.make(
        operation,
        dims={name: size[letter] for name, letter in LETTERS.items() if letter in size},
        dtypes={"x": arrays.x.dtype},
        flags={
            "reduction": spec.reduction,
            "soft_cap": spec.logits_soft_cap is not None,
            "temperature": spec.temperature != 1,
            "label_smoothing": spec.label_smoothing != 0,
            "z_loss": spec.z_loss != 0,
            "statistics": spec.has_statistics,
            "vocab_axis": spec.vocab_axis is not None,
            "bias": arrays.bias is not None,
            "token_weights": arrays.token_weights is not None,
            "divergence": spec.divergence or False,
            "teacher": next((n for n in TEACHERS if getattr(arrays, TEACHERS[n][0]) is not None), False),
            "teacher_soft_cap": spec.teacher_soft_cap is not None,
            "teacher_bias": arrays.teacher_bias is not None,
        },
        lengths={"B", "M", "N"},
    )


LETTERS = {"B": "B", "M": "bM", "N": "bN", "E": "E", "V": "V", "K": "K", "F": "F"}
"""The dimensions of a problem by the letters of `spec.py`."""
TEACHERS = {
    "logits": ("teacher_logits",),
    "top_k": ("teacher_indices", "teacher_log_probs"),
    "features": ("teacher_x", "teacher_weight"),
}


class LossKind(Kind):
    """Calls of one device, or of several that the compiler splits them over."""

    def pinned(self, spec: LossSpec) -> Mapping[str, str]:
        return {} if spec.vocab_axis is None else {"V": spec.vocab_axis}

    def backward(
        self, platform: Any, arrays: Any, spec: Any, config: Any, saved: Named, cotangents: Named
    ) -> Named:
        whole, parts = _of_all_devices(cotangents, spec)
        grads = super().backward(platform, arrays, spec, config, saved, whole)
        return {name: x / parts if name == "token_weights" else x for name, x in grads.items()}

    def kept_gradients(self, arrays: LossArrays, spec: LossSpec, saved: Named, cotangents: Named) -> Named:
        """Those of a sum, which its forward has computed: for a cotangent of one."""
        if "dx" not in saved or cotangents.keys() != {"out"}:
            return {}
        whole, parts = _of_all_devices(cotangents, spec)
        factor = wide(whole["out"]).reshape(())
        grads = {
            name: wide(saved[f"d{name}"]).reshape(getattr(arrays, name).shape) * factor
            for name in ("x", "weight", "bias")
            if f"d{name}" in saved
        }
        if arrays.token_weights is not None:
            grads["token_weights"] = saved["losses"] * (factor / parts)
        return grads


def _of_all_devices(cotangents: Named, spec: LossSpec) -> tuple[Named, int]:
    """The cotangents of results that several devices have, and the number of devices that have a part of them each: inside a user's `shard_map`.
    Elsewhere each has the whole cotangents."""
    if not (spec.is_local and spec.vocab_axis):
        return cotangents, 1
    return {name: lax.psum(x, spec.vocab_axis) for name, x in cotangents.items()}, devices(spec)


class SplitLossKind(LossKind):
    """Calls whose vocabulary is split over a mesh axis, also on platforms that the compiler sees into: each device runs its part."""

    def is_launched(self, platform: Any) -> bool:
        return True


@functools.cache
def kind_of(has_statistics: bool, is_split: bool) -> LossKind:
    kind = SplitLossKind if is_split else LossKind
    return kind(
        results=RESULTS + STATISTICS if has_statistics else RESULTS,
        make=LossArrays,
        problem_of=problem_of,
        axes_of=lambda arrays, spec: letters_of(spec).axes_of(arrays),
        reference=reference.loss,
        learned=LEARNED,
        shared=SHARED,
        # The tokens of a call share one weight.
        one_by_one=True,
        # The gradient of the weight, the largest array of all, is summed over the tokens of all rows as it is computed.
        summed=frozenset({"weight", "bias"}),
        saved_of=lambda platform, arrays, spec: SAVED,
        # A sum is one over the tokens of all devices, and so are the gradients that it keeps.
        partial=lambda arrays, spec: spec.reduction == "sum",
        combined=True,
        # The gradients of a sum are computed with it unless those of statistics are asked for.
        symbolic_zeros=True,
        remedy="apply ejx.cross_entropy to the logits, x @ weight.T",
    )


def call(
    plan: Plan, operation: str, arrays: LossArrays, spec: LossSpec, reduction: str, lead: tuple[int, ...]
) -> tuple[Array, Named]:
    """The loss of tokens with the axes `lead`, reduced, and their statistics by name."""
    kind = kind_of(spec.has_statistics, spec.vocab_axis is not None)
    dtype = accumulator(arrays.x.dtype)
    if arrays.x.size:
        results = kind.call(plan, operation, arrays, spec)
    else:  # nothing to compute
        shape_of = lambda name: () if name == "out" and spec.reduction == "sum" else lead
        results = {name: jnp.zeros(shape_of(name), dtype) for name in kind.results}
    results = {name: as_one(x, spec) for name, x in results.items()}
    loss = results.pop("out")
    if reduction == "none":
        return loss.reshape(lead), results
    weights = weights_of(arrays.labels, arrays.token_weights, dtype)
    return (mean_of(loss, weights) if reduction == "mean" else loss), results
