"""What one call of inference attention is, once every layout, option and default has been resolved.

Everything below the public operations (the reference, XLA, Triton) speaks these types only. Letters: `T` packed query tokens, `N`
sequences, `H` query heads, `K` key/value heads, `D` key dim, `V` value dim, `P` pages, `p` tokens a page, `M` pages of the longest
sequence, `*` leading axes.
"""

import dataclasses
from typing import Any, NamedTuple

from jax import Array


@dataclasses.dataclass(frozen=True)
class PagedSpec:
    """The static half of a call.

    Query `t` of a sequence (0 to `q_len - 1`) sits at position `i = kv_len - q_len + t` and sees the keys `j` with
    `max(kv_start, i - left) <= j <= i` whose page is there. The score is `s = scale * q . k_j`, then `cap * tanh(s / cap)`, then
    `+ slope * (j - i)`, then, for the keys of the sequence's own queries (`j >= kv_len - q_len`), `+ qq_bias[t, j - (kv_len - q_len)]`.
    """

    scale: float
    logits_soft_cap: float | None = None
    left: int | None = None
    """Keys that a query sees before its own; `None`: all."""
    max_query_len: int = 1
    """No sequence has more queries; those past it would be left out."""
    latent: bool = False
    """The values are the keys (without `rope`): `PagedArrays.v` is `None`."""
    scales: str | None = None
    """Of those pages that are quantised: `"token"`, one for each token and head, or `"head"`, one for each head; `None`: none are."""
    return_lse: bool = False
    """Whether the caller wants `lse`; every platform gives it."""


class PagedArrays(NamedTuple):
    """The arrays of a call. Pages and what heads or pairs of queries have (`SHARED`) come without leading axes or, mapped by `jax.vmap`,
    with all of them; the others have all leading axes.

    What no query sees may hold NaN: pages of no sequence, slots from `kv_len` on, queries of no sequence. A page number outside
    `0 .. P - 1` is no page: its keys are not seen. Tokens of no sequence give `out` 0 and `lse` minus infinity.
    """

    q: Array  # [*, T, H, D]; latent: [*, T, H, D + Dr], the part for `rope` behind
    k: Array  # [P, p, K, D], bf16, f16, f32 (f64 on XLA), or int8, float8_e4m3fn, float8_e5m2 with scales
    v: Array | None  # [P, p, K, V]; None: the keys
    page_table: Array  # int32 [*, N, M]
    q_start: Array  # int32 [*, N]: the sequence's first query among the T; never decreasing
    q_len: Array  # int32 [*, N]: its number of queries, 0 for none
    kv_len: Array  # int32 [*, N]: its number of keys, those of the queries included
    kv_start: Array | None = None  # int32 [*, N]: its first key
    rope: Array | None = None  # [P, p, K, Dr]: more key channels, which are no values
    k_scale: Array | None = (
        None  # float32 [P, p, K] or [K]: a stored number stands for `scale * number`; None: for itself
    )
    v_scale: Array | None = None  # the same, for v
    rope_scale: Array | None = None  # the same, for rope
    sinks: Array | None = None  # float32 [H], natural log units
    slopes: Array | None = None  # float32 [H]
    qq_bias: Array | None = None  # float32 [Q, Q]

    @classmethod
    def of(cls, given: dict[str, Any]) -> "PagedArrays":
        """From those that there are, by name."""
        return cls(**{"v": None, **given})

    @property
    def given(self) -> dict[str, Any]:
        """Those that there are, or shapes in their place, by name."""
        return {name: x for name, x in self._asdict().items() if x is not None}


PAGES = ("k", "v", "rope")
SCALES = ("k_scale", "v_scale", "rope_scale")
SHARED = frozenset({*PAGES, *SCALES, "sinks", "slopes", "qq_bias"})
# [*, T, H, V] in the dtype of q; [*, T, H] float32 (float64 for float64), natural log, sinks included
RESULTS = ("out", "lse")


def axes_of(arrays: PagedArrays, spec: PagedSpec) -> dict[str, tuple[str, ...]]:
    """The axes behind the leading ones of every array that there may be and of both results; `H<n>` are n heads."""
    heads, kv_heads = f"H{arrays.q.shape[-2]}", f"H{arrays.k.shape[-2]}"
    scale = ("P", "p", kv_heads) if spec.scales == "token" else (kv_heads,)
    return {
        "q": ("T", heads, "D"),
        "k": ("P", "p", kv_heads, "Dk"),
        "v": ("P", "p", kv_heads, "V"),
        "rope": ("P", "p", kv_heads, "Dr"),
        "page_table": ("N", "M"),
        **dict.fromkeys(("q_start", "q_len", "kv_len", "kv_start"), ("N",)),
        **dict.fromkeys(SCALES, scale),
        "sinks": (heads,),
        "slopes": (heads,),
        "qq_bias": ("Q", "Q2"),
        "out": ("T", heads, "V"),
        "lse": ("T", heads),
    }


def page_dtypes(problem: Any) -> tuple[str, str]:
    """Of a problem the dtypes of keys and of values or, of latent pages, of latents and of rotary keys."""
    dtypes = dict(problem.dtypes)
    return dtypes["kv"], dtypes.get("rope" if problem.flag("latent") else "v", dtypes["kv"])


def unmapped(arrays: PagedArrays, spec: PagedSpec) -> frozenset[str]:
    """What comes without leading axes, the same for all of them."""
    axes, given = axes_of(arrays, spec), arrays.given
    return frozenset(name for name in SHARED.intersection(given) if given[name].ndim == len(axes[name]))


class WriteArrays(NamedTuple):
    """The arrays of one write into pages, which become the results of the same names.

    Token `t` goes to slot `slots[t] = page * p + place`; a slot outside `0 .. P * p - 1` writes nowhere. No slot may be given twice.
    With scales a token [P, p, K] each token and head is stored with its own (largest magnitude / largest stored number); with scales
    a head [K] the given ones stay, and what they cannot hold is clipped.
    """

    pages: dict[str, Array]  # of PAGES and SCALES, as in PagedArrays
    new: dict[str, Array]  # of PAGES: [*, T, K, D]
    slots: Array  # int32 [*, T]
