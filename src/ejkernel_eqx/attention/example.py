"""Builds a problem for the command line from sizes by letter and option flags by name."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..core.words import read_flags, read_sizes, SWITCH
from ..dispatch import Problem
from .arguments import parse_window
from .core import problem_of
from .spec import AttentionArrays, AttentionSpec, RowRanges

_SHARES = tuple(f"1/{1 << n}" for n in range(11))
_CHOICES = {
    "causal": SWITCH[::-1],
    **dict.fromkeys(("alibi_slopes", "deterministic", "dropout", "log_forget", "lse"), SWITCH),
    **dict.fromkeys(("rows", "segments", "sinks", "soft_cap"), SWITCH),
}


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of self-attention, causal by default.

    **Arguments:**

    - `dims`: at least `T`, `H` and `D`; `S` defaults to `T`, `K` to `H`, `V` to `D` and `B` to 1.
    - `dtype`: the dtype of queries, keys, values and bias.
    - `flags`: `True` or `False` for `causal` (default true), `alibi_slopes`, `deterministic`, `dropout`, `log_forget`, `lse`, `rows` (lengths or
        packed sequences), `segments`, `sinks`, `soft_cap`, `top_left` (causal masks count from the first key); `window`: an int or
        `(left, right)`;
        `tiles`: the share of tiles that a pattern leaves visible, `"1/1"` to `"1/1024"`; `block_size`: of a map of blocks, an int or a pair;
        `bias` and `mask`: their axes after the batch axis, `1` where broadcast, such as `"HTS"` or `"11S"`, or `True` for all.

    Raises `ValueError` for an unknown name, a missing size, or sizes that do not fit together.
    """
    top_left = operation == "scaled_dot_product_attention"
    free = {name: (flags.get(name),) for name in ("bias", "block_size", "mask", "tiles", "window")}
    choices = _CHOICES | free | {"top_left": (top_left, not top_left)}
    given = read_flags(flags, choices)
    same = {"S": dims.get("T", 1), "K": dims.get("H", 1), "V": dims.get("D", 1)}
    size = read_sizes(dims, {"T": None, "H": None, "D": None, "B": 1, **same})
    if size["H"] % size["K"]:
        raise ValueError(f"dims: expected H to be a multiple of K, received H={size['H']}, K={size['K']}.")
    causal, rows = given["causal"], given["rows"]
    left, right = parse_window(_window(given.get("window")), causal)
    spec = AttentionSpec(
        scale=size["D"] ** -0.5,
        logits_soft_cap=1.0 if given["soft_cap"] else None,
        left=None if rows else left,
        right=None if rows else 0 if causal else right,
        offset=0 if given["top_left"] or rows else size["S"] - size["T"],
        dropout_rate=0.5 if given["dropout"] else 0.0,
        deterministic=given["deterministic"],
        return_lse=given["lse"],
        same_segments=given["segments"] and size["T"] == size["S"],
    )
    problem = problem_of(operation, _arrays(size, dtype, given), spec)
    share, blocks = given.get("tiles"), _size_of_block(given.get("block_size"))
    if share is None and blocks is None:
        return problem
    if share is not None and share not in _SHARES:
        raise ValueError(f"flags: expected tiles to be one of {', '.join(_SHARES)}, received {share!r}.")
    tiles = {"tiles": "any" if share is None else share, "block_size": blocks}
    return dataclasses.replace(problem, flags=tuple(sorted({**dict(problem.flags), **tiles}.items())))


def _size_of_block(value: Any) -> Any:
    """A pair, from an int, a pair or the text `"queries,keys"`."""
    size = _window(value)
    size = (size, size) if isinstance(size, int) and not isinstance(size, bool) else size
    if size is not None and (
        not isinstance(size, tuple) or len(size) != 2 or not all(isinstance(x, int) and x > 0 for x in size)
    ):
        raise ValueError(f"flags: expected an int or 'queries,keys' for block_size, received {value!r}.")
    return size


def _window(value: Any) -> Any:
    """An int or a pair, which may be the text `"left,right"`."""
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

    axes = {name: f"1{_axes(name, flags[name])}" for name in ("bias", "mask") if flags[name]}
    axes |= {name: "1H" for name in ("alibi_slopes", "sinks") if flags[name]}
    axes |= {"log_forget": "BSH"} if flags["log_forget"] else {}
    axes |= {"q_segments": "BT", "kv_segments": "BS"} if flags["segments"] else {}
    dtypes = dict.fromkeys(("alibi_slopes", "log_forget", "sinks"), "float32") | {
        "bias": dtype,
        "mask": "bool",
    }
    others = {name: shape(letters, dtypes.get(name, "int32")) for name, letters in axes.items()}
    rows = RowRanges(*[shape("BT", "int32")] * 3) if flags["rows"] else None
    return AttentionArrays(shape("BTHD"), shape("BSKD"), shape("BSKV"), rows=rows, **others)


def _axes(name: str, value: Any) -> str:
    pattern = "HTS" if value is True else value
    fits = isinstance(pattern, str) and len(pattern) == 3
    if not fits or any(x not in ("1", axis) for x, axis in zip(pattern, "HTS", strict=True)):
        raise ValueError(f"flags: expected axes like 'HTS', '1TS' or '11S' for {name}, received {value!r}.")
    return pattern
