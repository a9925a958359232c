"""The description of a call of a linear-time recurrence once every option, default and layout has been resolved.

Everything below the public operations (the reference, XLA, Triton) uses only these types. Letters: `B` batch, `T` tokens,
`R` output heads, `HS` state heads, `D` key dim, `V` value dim, `N` packed sequences. `Hq`, `Hk`, `Hv`, `Hg`, `Hb`, `Ha`, `Hw` are head counts that
each divide `R` (all except `Hq` divide `HS`); output head `r` reads head `r // (R / n)` of an operand with `n` heads, state head
`s` reads `s // (HS / n)`, and output head `r` reads state head `r // (R / HS)`.
"""

import dataclasses
import functools
from typing import NamedTuple

from jax import Array

from ..core.letters import Letters

NONE, CONSTANT, SCALAR, KEY, VALUE = "none", "constant", "scalar", "key", "value"
"""Kinds of decay: none; one number per head; per head and token; per key channel and token; per value channel and token."""


@dataclasses.dataclass(frozen=True)
class RecurrenceSpec:
    r"""The static half of a call.

    With $\alpha_t = e^{g_t}$ over the axes of the kind of decay, and $\beta_t = 1$ if `beta` is `None`,

    $$\bar S_t = \alpha_t \odot S_{t-1}, \qquad
      S_t = \bar S_t + \beta_t k_t (v_t - \bar S_t^\top k_t)^\top \;\text{(delta)} \quad\text{or}\quad
      S_t = \bar S_t + \beta_t k_t v_t^\top \;\text{(linear)} \quad\text{or}\quad
      S_t = \bar S_t + b_t (a_t^\top S_{t-1}) + \beta_t k_t v_t^\top \;\text{(rank one)}, \qquad
      o_t = \mathrm{scale}\; S_t^\top q_t + \mathrm{skip} \odot v_t .$$

    A call is of rank one if its arrays have `a` and `b`.
    """

    scale: float
    decay: str = NONE
    """Never `CONSTANT` in a step."""
    delta: bool = False
    state_dtype: str = "float32"
    """Dtype of initial and final states: float32, bfloat16 (storage only), or float64 for float64 operands."""
    transposed: bool = False
    """True if the states of a step are `[V, D]`."""
    before: bool = False
    """True if outputs read the state before their token and its decay, $S_{t-1}$. Not with a decay per value channel."""


class RecurrenceArrays(NamedTuple):
    """The arrays of a call; `*` are the leading axes, the same for all.

    Padding tokens are already neutralised: `q`, `k`, `v`, `beta` and `g` are zero there, so that the state is unchanged.
    `g` is a natural logarithm, never positive. `starts` and `offsets` are mutually exclusive.
    """

    q: Array  # [*, T, Hq, D]
    k: Array  # [*, T, Hk, D], in the dtype of q
    v: Array  # [*, T, Hv, V], in the dtype of q
    g: Array | None = (
        None  # constant [*, Hg], scalar [*, T, Hg], key [*, T, Hg, D], value [*, T, Hg, V]; any float dtype
    )
    beta: Array | None = None  # [*, T, Hb], any float dtype
    skip: Array | None = None  # [*, HS, V]: requires `R == HS == Hv`
    initial_state: Array | None = None  # [*, HS, D, V]; with offsets [*, N, HS, D, V]; in the state dtype
    starts: Array | None = None
    """int32 `[*, T]`, for segments within a row: the token where this token's segment starts, -1 in the row's first segment,
    which the initial state enters. Token `i` sees token `j <= i` iff `j >= starts[i]`, and the incoming state of a chunk
    that begins at token `c` iff `starts[i] < c`. Non-decreasing along a row."""
    offsets: Array | None = None
    """int32 `[*, N + 1]`, non-decreasing, within `0 .. T`: sequence `n` is the tokens `offsets[n] .. offsets[n + 1]`. The first may be
    greater than 0. Tokens outside all sequences need neither be read nor written, as their outputs are masked afterwards."""
    a: Array | None = None  # [*, T, Ha, D], in the dtype of q: reads the state before a token
    b: Array | None = None  # [*, T, Hw, D], in the dtype of q: writes what `a` reads; there if `a` is


FLOATS = ("q", "k", "v", "g", "beta", "skip", "initial_state", "a", "b")
"""The arrays that have gradients."""


_TOKENS = {"q": "{} Hq D", "k": "{} Hk D", "v": "{} Hv V", "beta": "{} Hb", "skip": "HS V", "out": "{} R V"}
_TOKENS |= {"a": "{} Ha D", "b": "{} Hw D"}
_DECAYS = {CONSTANT: "Hg", SCALAR: "{} Hg", KEY: "{} Hg D", VALUE: "{} Hg V"}
_HEADS = "Hq Hk Hv Hg Hb Ha Hw HS R"


@functools.cache
def letters(decay: str, packed: str | None = None) -> Letters:
    """The axes of a call on sequences."""
    state = "N HS D V" if packed == "offsets" else "HS D V"
    more = {"initial_state": state, "final_state": state, "starts": "T", "offsets": "N+1"}
    return Letters.of(_of_tokens("T", decay) | more, heads=_HEADS)


@functools.cache
def step_letters(rows: str, slots: str, decay: str, transposed: bool) -> Letters:
    """The axes of a call on one token per row."""
    more = {"state": f"{slots} HS V D" if transposed else f"{slots} HS D V", "indices": rows}
    return Letters.of(_of_tokens(rows, decay) | more, heads=_HEADS)


def _of_tokens(rows: str, decay: str) -> dict[str, str]:
    axes = _TOKENS | ({} if decay == NONE else {"g": _DECAYS[decay]})
    return {name: letters.format(rows) for name, letters in axes.items()}


class Heads(NamedTuple):
    """The head counts of a call."""

    out: int  # R
    state: int  # HS


def heads_of(arrays: "RecurrenceArrays | StepArrays", spec: RecurrenceSpec) -> Heads:
    counts = [arrays.k.shape[-2], arrays.v.shape[-2]]
    if arrays.g is not None:
        counts.append(arrays.g.shape[-1 if spec.decay in (CONSTANT, SCALAR) else -2])
    if arrays.beta is not None:
        counts.append(arrays.beta.shape[-1])
    counts += [x.shape[-2] for x in (arrays.a, arrays.b) if x is not None]
    return Heads(max(arrays.q.shape[-2], *counts), max(counts))


class StepArrays(NamedTuple):
    """One token per row; `state` may be a pool of slots."""

    q: Array  # [*, B, Hq, D]
    k: Array  # [*, B, Hk, D]
    v: Array  # [*, B, Hv, V]
    state: Array  # [*, S, HS, D, V], or [*, S, HS, V, D] if the spec is transposed; S == B without indices
    g: Array | None = None  # scalar [*, B, Hg] (constant too), key [*, B, Hg, D], value [*, B, Hg, V]
    beta: Array | None = None  # [*, B, Hb]
    skip: Array | None = None  # [*, HS, V]
    indices: Array | None = (
        None  # int32 [*, B]: the slot of each row; for -1 the output is 0 and nothing is written
    )
    a: Array | None = None  # [*, B, Ha, D]
    b: Array | None = None  # [*, B, Hw, D]


STEP_FLOATS = ("q", "k", "v", "state", "g", "beta", "skip", "a", "b")
"""The arrays of a step that have gradients."""


def letters_of(arrays: RecurrenceArrays | StepArrays, spec: RecurrenceSpec) -> Letters:
    """The axes of a call. In a step, rows with their own states are split over devices like leading axes; a pool of states is replicated."""
    if isinstance(arrays, RecurrenceArrays):
        return letters(spec.decay, None if arrays.offsets is None else "offsets")
    # Without indices, a row's state is its own, so both have the same axis.
    rows, slots = ("b", "b") if arrays.indices is None else ("rows", "slots")
    return step_letters(rows, slots, spec.decay, spec.transposed)


def sizes_of(arrays: RecurrenceArrays | StepArrays, spec: RecurrenceSpec) -> dict[str, int]:
    size = {"HS": heads_of(arrays, spec).state} | letters_of(arrays, spec).sizes(arrays)
    return size | {"R": max(size["HS"], size["Hq"])}
