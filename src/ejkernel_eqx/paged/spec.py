"""A call of inference attention after every layout, option and default has been resolved.

Everything below the public operations (the reference, XLA, Triton) uses only these types. Letters: `T` packed query tokens, `N`
sequences, `H` query heads, `K` key/value heads, `D` key dim, `V` value dim, `P` pages, `p` tokens per page, `M` pages of the longest
sequence, `*` leading axes.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ..core import Named
from ..core.letters import Letters


@dataclasses.dataclass(frozen=True)
class PagedSpec:
    """The static half of a call.

    Query `t` of a sequence (0 to `q_len - 1`) has position `i = kv_len - q_len + t` and sees the keys `j` with
    `max(kv_start, i - left) <= j <= i` that have a page. The score is `s = scale * q . k_j`, then `cap * tanh(s / cap)`, then
    `+ slope * (j - i)`, then `+` the sum of the gates from `j + 1` to `i`, then, for the keys of the sequence's new tokens
    (`j >= kv_len - q_len`), `+ qq_bias[t, j - (kv_len - q_len)]`.
    """

    scale: float
    logits_soft_cap: float | None = None
    left: int | None = None
    """The number of keys before its own that a query sees; `None`: all."""
    max_query_len: int = 1
    """The maximum number of queries per sequence; queries beyond it are ignored."""
    latent: bool = False
    """The values are the keys (without `rope`): `PagedArrays.v` is `None`."""
    scales: str | None = None
    """The scales of quantised pages: `"token"`, one per token and head, or `"head"`, one per head; `None`: no pages are quantised."""
    return_lse: bool = False
    """True if the caller requests `lse`; every platform returns it."""


class PagedArrays(NamedTuple):
    """The arrays of a call. Pages and the arrays per head or per pair of queries (`SHARED`) have no leading axes or, mapped by `jax.vmap`,
    all of them; the others have all leading axes.

    Positions that no query sees may hold NaN: pages of no sequence, slots from `kv_len` on, queries of no sequence. A page number
    outside `0 .. P - 1` stands for a missing page, whose keys are not visible. Tokens of no sequence return `out` 0 and `lse` minus
    infinity.
    """

    q: Array  # [*, T, H, D]; latent: [*, T, H, D + Dr], the part for `rope` last
    k: Array  # [P, p, K, D], bf16, f16, f32 (f64 on XLA), or int8, float8_e4m3fn, float8_e5m2 with scales
    v: Array | None  # [P, p, K, V]; None: the keys
    page_table: Array  # int32 [*, N, M]
    q_start: Array  # int32 [*, N]: index of the sequence's first query; never decreasing
    q_len: Array  # int32 [*, N]: its number of queries, 0 for none
    kv_len: Array  # int32 [*, N]: its number of keys, including those of the queries
    kv_start: Array | None = None  # int32 [*, N]: its first key
    rope: Array | None = None  # [P, p, K, Dr]: further key channels, which are not values
    # float32 [P, p, K] or [K]: a stored number stands for `scale * number`; None: not quantised
    k_scale: Array | None = None
    v_scale: Array | None = None  # the same, for v
    rope_scale: Array | None = None  # the same, for rope
    sinks: Array | None = None  # float32 [H], natural log units
    slopes: Array | None = None  # float32 [H]
    qq_bias: Array | None = None  # float32 [Q, Q]
    # Sums of forget gates up to each key, [P, p, H, 2], and up to each query, [*, T, H, 2], as in `cache/forget.py`
    gates: Array | None = None
    own_gates: Array | None = None

    @classmethod
    def of(cls, given: dict[str, Any]) -> "PagedArrays":
        """The arrays of a call from those that are present, by name."""
        return cls(**{"v": None, **given})

    @property
    def given(self) -> dict[str, Any]:
        """The arrays that are present, or shapes in their place, by name."""
        return {name: x for name, x in self._asdict().items() if x is not None}

    @property
    def value_channels(self) -> int:
        return (self.k if self.v is None else self.v).shape[-1]

    @property
    def kernel_operand(self) -> Any:
        """The dtype of the products of kernels: that of the queries for quantised pages, otherwise the wider one."""
        given = self.given
        plain = (given[name].dtype for name in PAGES if name in given and f"{name}_scale" not in given)
        return self.q.dtype if all(dtype == self.q.dtype for dtype in plain) else jnp.dtype(jnp.float32)


PAGES = ("k", "v", "rope")
SCALES = ("k_scale", "v_scale", "rope_scale")
STORED = (*PAGES, *SCALES, "gates")
SHARED = frozenset({*STORED, "sinks", "slopes", "qq_bias"})
# [*, T, H, V] in the dtype of q; [*, T, H] float32 (float64 for float64), natural log, sinks included
RESULTS = ("out", "lse")


_AXES = {"q": "T H D", "k": "P p K Dk", "v": "P p K V", "rope": "P p K Dr", "page_table": "N M"}
_AXES |= dict.fromkeys(("q_start", "q_len", "kv_len", "kv_start"), "N")
_AXES |= {"sinks": "H", "slopes": "H", "qq_bias": "Q Q2", "out": "T H V", "lse": "T H"}
_AXES |= {"gates": "P p H two", "own_gates": "T H two"}
_SCALES = {"token": "P p K", "head": "K", None: "K"}
LETTERS = {kind: Letters.of(_AXES | dict.fromkeys(SCALES, x), heads="H K") for kind, x in _SCALES.items()}
"""The axes after the leading ones of every possible array and of both results, by the kind of scales."""


def axes_of(arrays: PagedArrays, spec: PagedSpec) -> dict[str, tuple[str, ...]]:
    """The axes of a call; `H<n>` stands for n heads."""
    return LETTERS[spec.scales].axes_of(arrays)


def page_dtypes(problem: Any) -> tuple[str, str]:
    """The dtypes of keys and values in a problem or, with latent pages, of latents and rotary keys."""
    dtypes = dict(problem.dtypes)
    return dtypes["kv"], dtypes.get("rope" if problem.flag("latent") else "v", dtypes["kv"])


def unmapped(arrays: PagedArrays, spec: PagedSpec) -> frozenset[str]:
    """The arrays without leading axes, which all rows share."""
    axes, given = axes_of(arrays, spec), arrays.given
    return frozenset(name for name in SHARED.intersection(given) if given[name].ndim == len(axes[name]))


class WriteArrays(NamedTuple):
    """The arrays of one write into pages. The results have the same names.

    Token `t` goes to slot `slots[t] = page * p + place`; a slot outside `0 .. P * p - 1` is not written. Slots must be distinct.
    With a scale per token [P, p, K], each token and head is stored with its own (largest magnitude / largest stored number). With a
    scale per head [K], the given scales are kept, and numbers outside their range are clipped.
    """

    pages: Named  # of PAGES and SCALES, as in PagedArrays
    new: Named  # of PAGES: [*, T, K, D]
    slots: Array  # int32 [*, T]
