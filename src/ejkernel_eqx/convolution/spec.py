"""What one causal convolution is, once every option, default and layout has been resolved.

Everything below the public operation (the reference, XLA, Triton) speaks these types only. Letters: `B` leading axes as one, `T` tokens,
`C` channels, `W` width, `K = W - 1` inputs a state holds, `N` packed sequences (1 without offsets).
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
    """Where the tokens of packed or padded rows lie. Kernels see a row's real tokens side by side: place `p` of a row is its real
    token number `p`; the places behind the last one are the padding. Each int32."""

    order: Array  # [*, T]: the token at a place
    first: Array  # [*, T]: the place where its sequence begins; -1 for padding
    enter: Array  # [*, T]: the initial state (0 to N) that its sequence begins with, -1: zeros
    leave: Array  # [*, T]: the entry (0 to N K) of the final states that it is, -1: none
    spans: Array  # [*, N, 4]: places where the sequence that a state enters begins and ends, and the one that it leaves


class ConvArrays(NamedTuple):
    """The arrays of a call; `*` are the leading axes, the same for all but `weight` and `bias`, which have none (or, mapped by
    `jax.vmap`, all of them). What padding holds is never read. The last five are given together."""

    x: Array  # [*, T, C]
    weight: Array  # [C, W], any float dtype
    bias: Array | None = None  # [C]
    initial_state: Array | None = None  # [*, N, K, C], oldest first, the dtype of x
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
RESULTS = ("out", "final_state")  # [*, T, C] and [*, N, K, C], the dtype of x
