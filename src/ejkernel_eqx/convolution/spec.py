"""The description of a causal convolution once every option, default and layout has been resolved.

Everything below the public operation (the reference, XLA, Triton) uses only these types. Letters: `B` merged leading axes, `T` tokens,
`C` channels, `W` width, `K = W - 1` inputs held by a state, `N` packed sequences (1 without offsets).
"""

import dataclasses
from typing import NamedTuple

from jax import Array

from ..core.letters import Letters

ACTIVATIONS = (None, "silu")


@dataclasses.dataclass(frozen=True)
class ConvSpec:
    """The static half of a call."""

    activation: str | None = None


class Places(NamedTuple):
    """The locations of the tokens of packed or padded rows. Kernels see a row's real tokens contiguously: place `p` of a row is its
    `p`-th real token, and the places after the last one are padding. All int32."""

    order: Array  # [*, T]: the token at each place
    first: Array  # [*, T]: the place where its sequence begins; -1 for padding
    enter: Array  # [*, T]: the initial state (0 to N) that its sequence begins with; -1 for zeros
    leave: Array  # [*, T]: its entry (0 to N K) in the final states; -1 for none
    spans: Array  # [*, N, 4]: places where the sequence that a state enters begins and ends, and the one that it leaves


class ConvArrays(NamedTuple):
    """The arrays of a call; `*` are the leading axes, the same for all except `weight` and `bias`, which have none (or, mapped by
    `jax.vmap`, all of them). Values at padding are never read. The last five are given together."""

    x: Array  # [*, T, C]
    weight: Array  # [C, W], any float dtype
    bias: Array | None = None  # [C]
    initial_state: Array | None = None  # [*, N, K, C], oldest first, in the dtype of x
    order: Array | None = None
    first: Array | None = None
    enter: Array | None = None
    leave: Array | None = None
    spans: Array | None = None

    @property
    def places(self) -> Places | None:
        if self.order is None:
            return None
        assert self.first is not None and self.enter is not None
        assert self.leave is not None and self.spans is not None
        return Places(self.order, self.first, self.enter, self.leave, self.spans)


PLACES = dict.fromkeys(("order", "first", "enter", "leave"), "T") | {"spans": "N four"}
LETTERS = Letters.of(
    {
        "x": "T C",
        "weight": "C W",
        "bias": "C",
        "initial_state": "N K C",
        **PLACES,
        "out": "T C",
        "final_state": "N K C",
    },
    heads="C",
)
LEARNED = ("x", "weight", "bias", "initial_state")
SHARED = frozenset({"weight", "bias"})
RESULTS = ("out", "final_state")  # [*, T, C] and [*, N, K, C], in the dtype of x
