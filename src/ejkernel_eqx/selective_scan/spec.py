"""The description of a call of a selective scan once every option, default and layout has been resolved.

Everything below the public operation (the reference, XLA, Triton) uses only these types. Letters: `B` batch, `T` tokens,
`I` channels, `G` groups of channels, `N` state size of a channel, `S` packed sequences. Channel `i` reads group `i // (I / G)`.
"""

import dataclasses
import functools
from typing import NamedTuple

from jax import Array

from ..core.letters import Letters


@dataclasses.dataclass(frozen=True)
class ScanSpec:
    r"""The static half of a call.

    With the time step $\Delta_t$ = `dt` `+ dt_bias`, optionally passed through a softplus,

    $$h_t = e^{\Delta_t A} \odot h_{t-1} + \Delta_t x_t B_t^\top, \qquad y_t = (h_t C_t + D \odot x_t) \odot \mathrm{silu}(z_t) .$$
    """

    softplus: bool
    state_dtype: str = "float32"
    """Dtype of initial and final states: float32, bfloat16 (storage only), or float64 for float64 operands."""


class ScanArrays(NamedTuple):
    """The arrays of a call; `*` are the leading axes, the same for all that have them.

    Padding tokens are already neutralised: `dt` is `NO_TIME`, which makes the time step 0 with any bias, and everything else is 0.
    `starts` and `offsets` are mutually exclusive.
    """

    x: Array  # [*, T, I]
    dt: Array  # [*, T, I], any float dtype
    A: Array  # [I, N], any float dtype
    B: Array  # [*, T, G, N], any float dtype
    C: Array  # [*, T, G, N], any float dtype
    D: Array | None = None  # [I]
    z: Array | None = None  # [*, T, I], any float dtype
    dt_bias: Array | None = None  # [I]
    initial_state: Array | None = None  # [*, I, N]; with offsets [*, S, I, N]; in the state dtype
    starts: Array | None = None  # int32 [*, T], as in `recurrence.spec.RecurrenceArrays`
    offsets: Array | None = None  # int32 [*, S + 1], as there


_TOKENS = dict.fromkeys(("x", "dt", "z", "out"), "{} I") | dict.fromkeys(("B", "C"), "{} G N")
_PARAMETERS = {"A": "I N", "D": "I", "dt_bias": "I"}


def _letters(rows: str, more: dict[str, str]) -> Letters:
    """The axes of a call. Channels are independent and may be split like heads."""
    tokens = {name: axes.format(rows) for name, axes in _TOKENS.items()}
    return Letters.of(tokens | _PARAMETERS | more, heads="I G")


@functools.cache
def letters(rows: str, packed: str | None = None) -> Letters:
    """The axes of a call on sequences."""
    state = "S I N" if packed == "offsets" else "I N"
    more = {"initial_state": state, "final_state": state, "starts": rows, "offsets": "S+1"}
    return _letters(rows, more)


@functools.cache
def step_letters(rows: str, slots: str) -> Letters:
    """The axes of a call on one token per row."""
    return _letters(rows, {"state": f"{slots} I N", "indices": rows})


def letters_of(arrays: "ScanArrays | StepArrays") -> Letters:
    """The axes of a call. In a step, rows with their own states are split over devices like leading axes; a pool of states is replicated."""
    if isinstance(arrays, ScanArrays):
        return letters("T", None if arrays.offsets is None else "offsets")
    return step_letters("b", "b") if arrays.indices is None else step_letters("rows", "slots")


NO_TIME = -65504.0
"""A `dt` of at most this means a time step of 0. It is the smallest float16 and finite, because `jax_debug_infs` checks residuals too."""

FLOATS = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")
"""The arrays that have gradients."""

SHARED = frozenset({"A", "D", "dt_bias"})
"""The arrays without leading axes."""


PART = 256


def parts_of(channels: int, groups: int) -> int:
    """The number of parts, of `PART` channels each, in which kernels return the gradients of `B` and `C`; a mesh that splits the channels
    sums them."""
    return channels // PART if groups == 1 and channels % PART == 0 else 1


class StepArrays(NamedTuple):
    """One token per row; `state` may be a pool of slots."""

    x: Array  # [*, B, I]
    dt: Array  # [*, B, I]
    A: Array  # [I, N]
    B: Array  # [*, B, G, N]
    C: Array  # [*, B, G, N]
    state: Array  # [*, S, I, N]; S == B without indices
    D: Array | None = None  # [I]
    z: Array | None = None  # [*, B, I]
    dt_bias: Array | None = None  # [I]
    # int32 [*, B]: the slot of each row; for -1 the output is 0 and nothing is written
    indices: Array | None = None


STEP_FLOATS = ("x", "dt", "A", "B", "C", "state", "D", "z", "dt_bias")
