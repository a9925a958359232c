"""The description of a norm of a sum once every layout has been resolved.

Everything below the public operation (the reference, XLA, Triton) uses only these types. Letters: `B` merged leading axes, `M` rows of
each, `F` features.
"""

import dataclasses
from typing import NamedTuple

from jax import Array

from ...core.letters import Letters


@dataclasses.dataclass(frozen=True)
class ResidualSpec:
    """The static half of a call. `readers`: how often `out` is returned, as `out`, `out_2` and `out_3`, whose gradients are added."""

    eps: float = 1e-6
    readers: int = 1


class ResidualArrays(NamedTuple):
    """The arrays of a call; `*` are the leading axes, the same for all except `weight`, which has none (or, mapped by `jax.vmap`, all)."""

    x: Array  # [*, M, F]
    branch: Array | None = None  # [*, M, F], in the dtype of x
    weight: Array | None = None  # [F], any float dtype


COPIES = ("out", "out_2", "out_3")
_AXES = {"x": "M F", "branch": "M F", "weight": "F", "out": "M F", "sum": "M F"}
LETTERS = Letters.of(_AXES)
WITH_COPIES = Letters.of(_AXES | dict.fromkeys(COPIES, "M F"))
LEARNED = ("x", "branch", "weight")
SHARED = frozenset({"weight"})
RESULTS = ("out", "sum")  # [*, M, F] each, in the dtype of x
