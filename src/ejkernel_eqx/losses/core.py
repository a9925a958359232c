"""The family's only kind of call: its problem and its axes."""

from ..core import Kind
from ..dispatch import Problem
from . import reference
from .spec import LEARNED, letters_of, LossArrays, LossSpec, RESULTS, SAVED, SHARED


def problem_of(operation: str, arrays: LossArrays, spec: LossSpec) -> Problem:
    """The host metadata of a call."""
    size = letters_of(spec).sizes(arrays)
    return Problem.make(
        operation,
        dims={name: size[name] for name in "BMNEV"},
        dtypes={"x": arrays.x.dtype},
        flags={
            "reduction": spec.reduction,
            "soft_cap": spec.logits_soft_cap is not None,
            "label_smoothing": spec.label_smoothing != 0,
            "z_loss": spec.z_loss != 0,
            "bias": arrays.bias is not None,
            "token_weights": arrays.token_weights is not None,
        },
        lengths={"B", "M", "N"},
    )


CROSS_ENTROPY = Kind(
    make=LossArrays,
    problem_of=problem_of,
    axes_of=lambda arrays, spec: letters_of(spec).axes_of(arrays),
    reference=reference.cross_entropy,
    results=RESULTS,
    learned=LEARNED,
    shared=SHARED,
    # The tokens of a call share one weight.
    one_by_one=True,
    # The gradient of the weight, the largest array of all, is summed over the tokens of all rows as it is computed.
    summed=SHARED,
    saved_of=lambda platform, arrays, spec: SAVED,
    remedy="apply jax.numpy functions to the logits, x @ weight.T",
)
