"""A problem from sizes by letter and option flags by name, for the command line."""

from collections.abc import Mapping
from typing import Any

from ..core.words import read_flags, read_sizes, SWITCH
from ..dispatch import Problem
from .cache.quantise import LARGEST
from .core import problem_of
from .samples import shapes_from, spec_from

_DECODES = ("paged_attention", "ragged_decode_attention")
_DENSE = "ragged_decode_attention"
_SCORES = ("alibi_slopes", "qq_bias")
_QUANTISED = tuple(LARGEST)


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of one call.

    **Arguments:**

    - `dims`: required are `S`, the keys of the longest sequence, `H` query heads, `D` channels and, where a sequence may have several
        queries, `T` tokens. Optional are `N` sequences (default 1), `K` key heads (`H`), `V` value channels (`D`), `p` tokens per page
        (16), and `Q`, the maximum number of queries per sequence (`T`). A latent of `V` channels with a rotary key of `D - V` has one
        key head. Decoding on dense keys takes `B` rows and neither `N` nor `p`.
    - `dtype`: the dtype of the queries.
    - `flags`: `True` or `False` for `window`, `soft_cap`, `sinks`, `lse`, `latent`, and for unified attention `alibi_slopes` and `qq_bias`;
        `scales`: `token` or `head`; `kv`: the dtype of the pages if it differs from that of the queries (int8 with scales); `v`: the dtype
        of the values (for a latent, of the rotary keys) if it differs from `kv`.

    Raises `ValueError` for an unknown name, a missing size, or inconsistent sizes.
    """
    flags, dims = dict(flags), dict(dims)
    if "p" in flags and "p" not in dims:  # `explain` accepts only capital letters as sizes
        dims["p"] = flags.pop("p")
    size = _sizes(operation, dims)
    given = _flags(operation, flags)
    if given["latent"]:
        size["K"] = dims.get("K", 1)
        if size["K"] != 1 or not size["V"] < size["D"]:
            raise ValueError(
                f"dims: expected K=1 and V < D for a latent of V channels, received K={size['K']}, V={size['V']}, D={size['D']}."
            )
    if size["H"] % size["K"]:
        raise ValueError(f"dims: expected H to be a multiple of K, received H={size['H']}, K={size['K']}.")
    kv = given["kv"] or ("int8" if given["scales"] else dtype)
    v = given["v"] or kv
    if (kv in _QUANTISED or v in _QUANTISED) != (given["scales"] is not None):
        names = kv if kv == v else f"{kv} and {v}"
        raise ValueError(
            f"flags: expected scales only with pages of {', '.join(_QUANTISED)}, received {names}."
        )
    given["ranged"] = operation == _DENSE
    return problem_of(operation, shapes_from(size, dtype, (kv, v), given), spec_from(size, given))


def _sizes(operation: str, dims: Mapping[str, int]) -> dict[str, int]:
    wanted: dict[str, int | None] = {"S": None, "H": None, "D": None}
    wanted |= {"K": dims.get("H", 1), "V": dims.get("D", 1)}
    wanted |= {"B": 1} if operation == _DENSE else {"N": 1, "p": 16}
    if operation not in _DECODES:
        wanted |= {"T": None, "Q": dims.get("T", 1)}
    size = read_sizes(dims, wanted)
    if operation == _DENSE:
        size |= {"N": size["B"], "p": size["S"]}
    if operation in _DECODES:
        size |= {"T": size["N"], "Q": 1}
    if size["Q"] > size["T"]:
        raise ValueError(
            f"dims: expected Q, the maximum number of queries per sequence, to be at most T={size['T']}, received {size['Q']}."
        )
    size["M"] = -(-size["S"] // size["p"])
    return size


def _flags(operation: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    choices: dict[str, Any] = dict.fromkeys(("window", "soft_cap", "sinks", "lse"), SWITCH)
    kinds = (None, "bfloat16", "float16", "float32", "float64")
    if operation == _DENSE:
        choices["kv"] = kinds
    else:
        kinds = (*kinds, *_QUANTISED)
        choices |= {"latent": SWITCH, "scales": (None, "token", "head"), "kv": kinds, "v": kinds}
    if operation == "unified_attention":
        choices |= dict.fromkeys(_SCORES, SWITCH)
    default = {"latent": False, "scales": None, "v": None, **dict.fromkeys(_SCORES, False)}
    return default | read_flags(flags, choices)
