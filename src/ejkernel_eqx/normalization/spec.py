"""The description of a gated RMS norm once every option, default and layout has been resolved.

Everything below the public operation (the reference, XLA, Triton) uses only these types. Letters: `B` merged leading axes, `M` rows of
each, `G` groups per row, `F` features per group.
"""

import dataclasses
from typing import NamedTuple

from jax import Array

from ..core.letters import Letters

ACTIVATIONS = ("silu", "sigmoid")


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """The static half of a call."""

    activation: str = "silu"
    norm_before_gate: bool = False
    eps: float = 1e-6


class NormArrays(NamedTuple):
    """The arrays of a call; `*` are the leading axes, the same for all except `weight`, which has none (or, mapped by `jax.vmap`, all)."""

    x: Array  # [*, M, G, F]
    z: Array | None = None  # [*, M, G, F], any float dtype
    weight: Array | None = None  # [G, F], any float dtype


LETTERS = Letters.of({"x": "M G F", "z": "M G F", "weight": "G F", "out": "M G F"}, heads="G")
LEARNED = ("x", "z", "weight")
SHARED = frozenset({"weight"})
RESULTS = ("out",)  # [*, M, G, F], in the dtype of x
