"""A problem from a few words, for the command line: sizes by letter and option flags by name."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..dispatch import Problem
from .arguments import parse_window
from .core import problem_of
from .spec import AttentionArrays, AttentionSpec, RowRanges

_DIMS = ("B", "T", "S", "H", "K", "D", "V")
_SWITCHES = (
    "alibi_slopes",
    "causal",
    "deterministic",
    "dropout",
    "lse",
    "rows",
    "segments",
    "sinks",
    "soft_cap",
)
_FLAGS = (*_SWITCHES, "bias", "mask", "top_left", "window")


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of self-attention, causal unless said otherwise.

    **Arguments:**

    - `dims`: `T`, `H` and `D` at least; `S` defaults to `T`, `K` to `H`, `V` to `D` and `B` to 1.
    - `dtype`: of queries, keys, values and bias.
    - `flags`: `True` or `False` for `causal` (default true), `alibi_slopes`, `deterministic`, `dropout`, `lse`, `rows` (lengths or packed
        sequences), `segments`, `sinks`, `soft_cap`, `top_left` (causality counts from the first key); `window`: an int or `(left, right)`;
        `bias` and `mask`: their axes behind the batch, `1` where broadcast, as `"HTS"` or `"11S"`, or `True` for all.

    Raises `ValueError` for a name that is none of these, a missing size, or sizes that do not fit.
    """
    size, given = _sizes(dims), _checked(flags)
    top_left = given.get("top_left", operation == "scaled_dot_product_attention")
    causal, rows = given.get("causal", True), given.get("rows", False)
    left, right = parse_window(_window(given.get("window")), causal)
    spec = AttentionSpec(
        scale=size["D"] ** -0.5,
        logits_soft_cap=1.0 if given.get("soft_cap") else None,
        left=None if rows else left,
        right=None if rows else 0 if causal else right,
        offset=0 if top_left or rows else size["S"] - size["T"],
        dropout_rate=0.5 if given.get("dropout") else 0.0,
        deterministic=given.get("deterministic", False),
        return_lse=given.get("lse", False),
        same_segments=bool(given.get("segments")) and size["T"] == size["S"],
    )
    return problem_of(operation, _arrays(size, dtype, given), spec)


def _sizes(dims: Mapping[str, int]) -> dict[str, int]:
    unknown, missing = sorted(set(dims) - set(_DIMS)), [name for name in "THD" if name not in dims]
    if unknown or missing:
        raise ValueError(
            f"dims: expected sizes for T, H, D and optionally B, K, S, V, received unknown {unknown} and missing {missing}."
        )
    size = {"B": 1, "S": dims["T"], "K": dims["H"], "V": dims["D"], **dims}
    if any(n < 1 for n in size.values()) or size["H"] % size["K"]:
        raise ValueError(
            f"dims: expected positive sizes with H a multiple of K, received {', '.join(f'{n}={size[n]}' for n in _DIMS)}."
        )
    return size


def _checked(flags: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(flags) - set(_FLAGS))
    if unknown:
        raise ValueError(
            f"flags: expected some of {', '.join(sorted(_FLAGS))}, received {', '.join(unknown)}."
        )
    for name, value in flags.items():
        if name in (*_SWITCHES, "top_left") and not isinstance(value, bool):
            raise ValueError(f"flags: expected true or false for {name}, received {value!r}.")
    return dict(flags)


def _window(value: Any) -> Any:
    """An int or a pair, also as the text `"left,right"`."""
    if not isinstance(value, str):
        return value
    try:
        sides = [None if side.strip() == "None" else int(side) for side in value.split(",")]
    except ValueError:
        raise ValueError(f"flags: expected an int or 'left,right' for window, received {value!r}.") from None
    return sides[0] if len(sides) == 1 else tuple(sides)


def _arrays(size: dict[str, int], dtype: str, flags: dict[str, Any]) -> AttentionArrays:
    def shape(letters: str, dtype: str = dtype) -> Any:
        return jax.ShapeDtypeStruct(tuple(1 if x == "1" else size[x] for x in letters), jnp.dtype(dtype))

    arrays = AttentionArrays(shape("BTHD"), shape("BSKD"), shape("BSKV"))
    for name, axes_dtype in (("bias", dtype), ("mask", "bool")):
        if flags.get(name):
            arrays = arrays._replace(**{name: shape(f"1{_axes(name, flags[name])}", axes_dtype)})
    for name in ("alibi_slopes", "sinks"):
        if flags.get(name):
            arrays = arrays._replace(**{name: shape("1H", "float32")})
    if flags.get("segments"):
        arrays = arrays._replace(q_segments=shape("BT", "int32"), kv_segments=shape("BS", "int32"))
    if flags.get("rows"):
        arrays = arrays._replace(rows=RowRanges(*[shape("BT", "int32")] * 3))
    return arrays


def _axes(name: str, value: Any) -> str:
    pattern = "HTS" if value is True else value
    fits = isinstance(pattern, str) and len(pattern) == 3
    if not fits or any(x not in ("1", axis) for x, axis in zip(pattern, "HTS", strict=True)):
        raise ValueError(f"flags: expected axes like 'HTS', '1TS' or '11S' for {name}, received {value!r}.")
    return pattern
