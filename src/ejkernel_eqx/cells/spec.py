"""The description of a call of a recurrent cell once every option, default and layout has been resolved.

Everything below the public operation (the reference, XLA, Triton) uses only these types. Letters: `B` merged leading axes, `T` tokens,
`G` gates times hidden features, `H` hidden features, `S` packed sequences.
"""

import dataclasses
import functools
from typing import NamedTuple

from jax import Array

from ..core.letters import Letters

CELLS = ("lstm", "gru", "rnn")
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
"""The number of gates, in the order of PyTorch: LSTM i, f, g, o; GRU r, z, n."""
ACTIVATIONS = ("tanh", "relu", "sigmoid", "hard_tanh", "silu", "identity")
GATE_ACTIVATIONS = ("sigmoid", "hard_sigmoid")
CHOICES = {"cell": CELLS, "activation": ACTIVATIONS, "gate_activation": GATE_ACTIVATIONS}
"""The values of options by their names."""


@dataclasses.dataclass(frozen=True)
class CellSpec:
    """The static half of a call."""

    cell: str
    activation: str = "tanh"
    gate_activation: str = "sigmoid"
    state_dtype: str = "float32"
    """Dtype of initial and final states: float32, bfloat16 (storage only), or float64 for float64 operands."""


CONTINUES, STARTS, PADDING = 0, 1, 2
"""Values of `marks`: a token continues its sequence, starts from a state of zeros, or leaves the state unchanged."""


class CellArrays(NamedTuple):
    """The arrays of a call; `*` are the leading axes, the same for all except `weight` and `bias`, which have none.

    Padding in `x` is zero. `marks` and `offsets` are mutually exclusive.
    """

    x: Array  # [*, T, G]: projected inputs with every bias that is added outside a product with a gate
    weight: Array  # [G, H], any float dtype
    bias: Array | None = None  # [H], any float dtype: the GRU's bias of n inside the product with r
    hidden: Array | None = None  # [*, H]; with offsets [*, S, H]; in the state dtype
    cell: Array | None = None  # the same, of an LSTM
    marks: Array | None = None  # int32 [*, T]
    offsets: Array | None = None  # int32 [*, S + 1]; tokens outside are padding


@functools.cache
def letters(packed: str | None = None) -> Letters:
    """The axes of a call. No axis after the leading ones is split over devices, because every gate reads all hidden features."""
    state = "S H" if packed == "offsets" else "H"
    states = dict.fromkeys(("hidden", "cell", "final_hidden", "final_cell"), state)
    tokens = {"x": "T G", "weight": "G H", "bias": "H", "marks": "T", "offsets": "S+1", "out": "T H"}
    return Letters.of(tokens | states)


def packed_of(arrays: CellArrays) -> str | None:
    """The description of sequences: `"offsets"`, `"marks"`, or not at all."""
    return "offsets" if arrays.offsets is not None else "marks" if arrays.marks is not None else None


LEARNED = ("x", "weight", "bias", "hidden", "cell")
SHARED = frozenset({"weight", "bias"})


def results_of(cell: str) -> tuple[str, ...]:
    """`out [*, T, H]` in the dtype of `x`, 0 at padding, and final states like `hidden` in the state dtype."""
    return ("out", "final_hidden", "final_cell") if cell == "lstm" else ("out", "final_hidden")
