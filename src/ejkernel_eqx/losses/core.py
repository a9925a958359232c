"""The family's kinds of calls: their problem and their axes."""

from collections.abc import Mapping
from typing import Any

from jax import lax

from ..core import Kind
from ..core.arguments import wide
from ..core.kind import Named
from ..dispatch import Problem
from ..parallel import varies_over
from . import reference
from .spec import LEARNED, letters_of, LossArrays, LossSpec, RESULTS, SAVED, SHARED, STATISTICS
from .statistics import devices


def problem_of(operation: str, arrays: LossArrays, spec: LossSpec) -> Problem:
    """The host metadata of a call."""
    size = letters_of(spec).sizes(arrays)
    return Problem.make(
        operation,
        dims={name: size[letter] for name, letter in LETTERS.items()},
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
        },
        lengths={"B", "M", "N"},
    )


LETTERS = {"B": "B", "M": "bM", "N": "bN", "E": "E", "V": "V"}
"""The dimensions of a problem by the letters of `spec.py`."""


class LossKind(Kind):
    """Calls of one device, or of several that the compiler splits them over."""

    def pinned(self, spec: LossSpec) -> Mapping[str, str]:
        return {} if spec.vocab_axis is None else {"V": spec.vocab_axis}

    def backward(
        self, platform: Any, arrays: Any, spec: Any, config: Any, saved: Named, cotangents: Named
    ) -> Named:
        if kept := self.kept_gradients(arrays, spec, saved, cotangents):
            return kept
        whole, parts = _of_all_devices(cotangents, spec)
        grads = super().backward(platform, arrays, spec, config, saved, whole)
        return {name: x / parts if name == "token_weights" else x for name, x in grads.items()}

    def kept_gradients(self, arrays: LossArrays, spec: LossSpec, saved: Named, cotangents: Named) -> Named:
        """Those of a sum, which its forward has computed: for a cotangent of one."""
        if "dx" not in saved or cotangents.keys() != {"out"}:
            return {}
        whole, parts = _of_all_devices(cotangents, spec)
        factor = whole["out"].reshape(())
        grads = {
            "x": wide(saved["dx"]) * factor,
            "weight": saved["dweight"].reshape(arrays.weight.shape) * factor,
        }
        if arrays.bias is not None:
            grads["bias"] = saved["dbias"].reshape(arrays.bias.shape) * factor
        if arrays.token_weights is not None:
            grads["token_weights"] = saved["losses"] * (factor / parts)
        return grads


def _of_all_devices(cotangents: Named, spec: LossSpec) -> tuple[Named, int]:
    """The cotangents of results that several devices have, and the number of devices that have a part of them each: inside a user's `shard_map`
    whose types say which values vary. Elsewhere each has the whole cotangents."""
    if not any([varies_over(x, spec.vocab_axis) for x in cotangents.values()]):
        return cotangents, 1
    return {name: lax.psum(x, spec.vocab_axis) for name, x in cotangents.items()}, devices(spec)


class SplitLossKind(LossKind):
    """Calls whose vocabulary is split over a mesh axis, also on platforms that the compiler sees into: each device runs its part."""

    def is_launched(self, platform: Any) -> bool:
        return True


_OPTIONS: dict[str, Any] = dict(
    make=LossArrays,
    problem_of=problem_of,
    axes_of=lambda arrays, spec: letters_of(spec).axes_of(arrays),
    reference=reference.cross_entropy,
    learned=LEARNED,
    shared=SHARED,
    # The tokens of a call share one weight.
    one_by_one=True,
    # The gradient of the weight, the largest array of all, is summed over the tokens of all rows as it is computed.
    summed=SHARED,
    saved_of=lambda platform, arrays, spec: SAVED,
    # A sum is one over the tokens of all devices, and so are the gradients that it keeps.
    partial=lambda arrays, spec: spec.reduction == "sum",
    combined=True,
    # The gradients of a sum are computed with it unless those of statistics are asked for.
    symbolic_zeros=True,
    remedy="apply ejx.cross_entropy to the logits, x @ weight.T",
)
_RESULTS = {False: RESULTS, True: RESULTS + STATISTICS}


def kind_of(spec: LossSpec) -> LossKind:
    return _KINDS[spec.has_statistics, spec.vocab_axis is not None]


_KINDS = {
    (has_statistics, is_split): kind(results=results, **_OPTIONS)
    for has_statistics, results in _RESULTS.items()
    for is_split, kind in {False: LossKind, True: SplitLossKind}.items()
}
