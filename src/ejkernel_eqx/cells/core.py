"""The family's kinds of calls, one per cell: their problem and their axes."""

from typing import Any

import jax.numpy as jnp

from ..core import Kind
from ..dispatch import Problem
from . import reference
from .spec import CellArrays, CELLS, CellSpec, LEARNED, letters, packed_of, results_of, SHARED

OUT_NAME, HIDDEN_NAME, CELL_NAME = "recurrent_out", "recurrent_hidden", "recurrent_cell"
"""Names for `jax.checkpoint_policies.save_only_these_names`: the output and the final states."""
SAVED_NAME = "recurrent_saved"
"""A name for the states of every token, which the backward needs."""


def problem_of(operation: str, arrays: CellArrays, spec: CellSpec) -> Problem:
    """The host metadata of a call. Shapes are those seen here: inside a partitioned body, the local ones."""
    packed = packed_of(arrays)
    lengths = {"B", "T", *("S" if packed == "offsets" else "")}
    size = letters(packed).sizes(arrays)
    return Problem.make(
        operation,
        dims={name: size[name] for name in (*lengths, "H")},
        dtypes={"x": arrays.x.dtype, "weight": arrays.weight.dtype, "state": jnp.dtype(spec.state_dtype)},
        flags={
            "cell": spec.cell,
            "activation": spec.activation,
            "gate_activation": None if spec.cell == "rnn" else spec.gate_activation,
            "bias": arrays.bias is not None,
            "initial_state": arrays.hidden is not None,
            "packed": packed,
        },
        lengths=lengths,
    )


def _kind(cell: str) -> Kind:
    results = results_of(cell)
    return Kind(
        make=CellArrays,
        problem_of=problem_of,
        axes_of=lambda arrays, spec: letters(packed_of(arrays)).axes_of(arrays),
        reference=reference.run,
        results=results,
        learned=LEARNED,
        shared=SHARED,
        # One launch for each set of weights: the rows of a launch share them.
        one_by_one=True,
        saved_of=lambda platform, arrays, spec: dict.fromkeys(("cells", "states"), ("T", "H")),
        read=("out",),
        names={**dict(zip(results, (OUT_NAME, HIDDEN_NAME, CELL_NAME))), "saved": SAVED_NAME},
    )


KINDS: dict[str, Any] = {cell: _kind(cell) for cell in CELLS}
