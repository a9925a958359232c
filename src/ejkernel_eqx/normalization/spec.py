"""The description of a gated RMS norm, or of the norm of a sum, once every option and layout is resolved.

Everything below the public operations (the reference, XLA, Triton) uses only these types. Letters: `B` merged
leading axes, `M` rows of each, `G` groups per row, an axis that the norm of a sum lacks, `F` features per
group."""

import dataclasses
from typing import NamedTuple

from jax import Array

from ..core.letters import Letters

ACTIVATIONS = ("silu", "sigmoid")
COPIES = ("out", "out_2", "out_3")


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """The static half of a call. `readers`: 0 for a gated norm, which returns `out`. The norm of a sum
    returns the `sum` and, as often as it has readers, `out`, as `out`, `out_2` and `out_3`, whose gradients
    are added."""

    activation: str = "silu"
    norm_before_gate: bool = False
    eps: float = 1e-6
    readers: int = 0

    def results(self, out: Array, total: Array) -> dict[str, Array]:
        """The results of a call by name."""
        return dict.fromkeys(COPIES[: self.readers], out) | {"sum": total} if self.readers else {"out": out}


class NormArrays(NamedTuple):
    """The arrays of a call; `*` are the leading axes, the same for all except `weight`, which has none (or,
    mapped by `jax.vmap`, all). A gated norm has no branch, and the norm of a sum has no gate and no axis
    `G`."""

    x: Array  # [*, M, G, F]
    z: Array | None = None  # [*, M, G, F], any float dtype
    weight: Array | None = None  # [G, F], any float dtype
    branch: Array | None = None  # [*, M, F], in the dtype of x


_GATED = Letters.of({"x": "M G F", "z": "M G F", "weight": "G F", "out": "M G F"}, heads="G")
_OF_SUM = Letters.of(dict.fromkeys(("x", "branch", "sum", *COPIES), "M F") | {"weight": "F"})
LEARNED = ("x", "z", "branch", "weight")
SHARED = frozenset({"weight"})


def letters_of(spec: NormSpec) -> Letters:
    return _OF_SUM if spec.readers else _GATED
