"""The description of a rotation of heads, once every option and layout is resolved. Letters: `B` merged leading axes, `T` tokens of each, `Hq` and
`Hk` heads, `D` features of a head, `R` pairs that are rotated."""

import dataclasses
from typing import NamedTuple

from jax import Array

from ...core.letters import Letters


@dataclasses.dataclass(frozen=True)
class HeadsSpec:
    """The static half of a call. `eps`: of the norm of each head; `None` without one."""

    interleaved: bool = False
    eps: float | None = None


class HeadsArrays(NamedTuple):
    """The arrays of a call; `*` are the leading axes, the same for all but the weights, which have none (or, mapped by `jax.vmap`, all)."""

    q: Array  # [*, T, Hq, D]
    k: Array  # [*, T, Hk, D], in the dtype of q
    cos: Array  # float32 (float64 for float64) [*, T, R]
    sin: Array  # as cos
    q_norm: Array | None = None  # [D], any float dtype
    k_norm: Array | None = None  # as q_norm


LETTERS = Letters.of(
    {"q": "T Hq D", "k": "T Hk D", "cos": "T R", "sin": "T R", "q_norm": "D", "k_norm": "D"}
    | {"out": "T Hq D", "k_out": "T Hk D"},
    heads="Hq Hk",
)
LEARNED = ("q", "k", "cos", "sin", "q_norm", "k_norm")
SHARED = frozenset({"q_norm", "k_norm"})
RESULTS = ("out", "k_out")
