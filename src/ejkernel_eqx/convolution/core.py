"""The family's one kind of call: its problem and its axes."""

import math

from ..core import Kind
from ..dispatch import Problem
from . import reference
from .spec import ConvArrays, ConvSpec, LEARNED, RESULTS, SHARED


def problem_of(operation: str, arrays: ConvArrays, spec: ConvSpec) -> Problem:
    """The host metadata of a call; shapes are those seen here, so the local ones inside a partitioned body."""
    packed = None
    dims = {"B": math.prod(arrays.x.shape[:-2]), "T": arrays.x.shape[-2], "C": arrays.x.shape[-1]}
    if arrays.spans is not None:
        dims["N"], packed = arrays.spans.shape[-2], True
    return Problem.make(
        operation,
        dims=dims | {"W": arrays.weight.shape[-1]},
        dtypes={"x": arrays.x.dtype, "weight": arrays.weight.dtype},
        flags={
            "activation": spec.activation,
            "bias": arrays.bias is not None,
            "initial_state": arrays.initial_state is not None,
            "packed": packed,
        },
        lengths={"B", "T", "N"} & dims.keys(),
        counts={"C"},
    )


def axes_of(arrays: ConvArrays, spec: ConvSpec) -> dict[str, tuple[str, ...]]:
    """Channels do not mix: they may be split as heads are."""
    channels = f"H{arrays.x.shape[-1]}"
    over_tokens, state = ("T", channels), ("N", "K", channels)
    return {
        "x": over_tokens,
        "weight": (channels, "W"),
        "bias": (channels,),
        "initial_state": state,
        **dict.fromkeys(("order", "first", "enter", "leave"), ("T",)),
        "spans": ("N", "four"),
        "out": over_tokens,
        "final_state": state,
    }


CONVOLVE = Kind(
    make=ConvArrays,
    problem_of=problem_of,
    axes_of=axes_of,
    reference=reference.convolve,
    results=RESULTS,
    learned=LEARNED,
    shared=SHARED,
)
