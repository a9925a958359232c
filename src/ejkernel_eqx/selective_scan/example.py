"""A problem from a few words, for the command line: sizes by letter and option flags by name."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..dispatch import Problem
from .core import problem_of, step_problem_of
from .spec import ScanArrays, ScanSpec, StepArrays

_DIMS = ("B", "T", "I", "N", "G", "S")
_SWITCHES = ("softplus", "D", "z", "dt_bias", "initial_state", "step", "slots")
_DEFAULTS = {"softplus": True, "D": True, "z": True, "dt_bias": True}


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of one call, or of one decoding step.

    **Arguments:**

    - `dims`: `T` (but for a step) and `I` at least; `N` defaults to 16, `B`, `G` and the number `S` of sequences to 1.
    - `dtype`: of all that has tokens; parameters and states are float32.
    - `flags`: `softplus`, `D`, `z`, `dt_bias` (all true unless said), `initial_state`, `packed` (`offsets` or `segments`), `step`, `slots` (a
        step on a pool of states).

    Raises `ValueError` for a name that is none of these, a missing size, or sizes that do not fit.
    """
    given = _DEFAULTS | _checked(flags)
    size = _sizes(dims, bool(given.get("step")))
    wide = "float64" if dtype == "float64" else "float32"
    spec = ScanSpec(bool(given["softplus"]), wide)

    def shape(*axes: str, dtype: str = dtype) -> Any:
        return jax.ShapeDtypeStruct(tuple(size[a] for a in axes), jnp.dtype(dtype))

    rows = ("B",) if given.get("step") else ("B", "T")
    operands = {
        "x": shape(*rows, "I"),
        "dt": shape(*rows, "I"),
        "A": shape("I", "N", dtype=wide),
        "B": shape(*rows, "G", "N"),
        "C": shape(*rows, "G", "N"),
        "D": shape("I", dtype=wide) if given["D"] else None,
        "z": shape(*rows, "I") if given["z"] else None,
        "dt_bias": shape("I", dtype=wide) if given["dt_bias"] else None,
    }
    if given.get("step"):
        indices = shape("B", dtype="int32") if given.get("slots") else None
        step = StepArrays(**operands, state=shape("B", "I", "N", dtype=wide), indices=indices)
        return step_problem_of(operation, step, spec)
    packed = given.get("packed")
    size["S+1"] = size["S"] + 1
    state = ("B", "S", "I", "N") if packed == "offsets" else ("B", "I", "N")
    arrays = ScanArrays(
        **operands,
        initial_state=shape(*state, dtype=wide) if given.get("initial_state") else None,
        starts=shape("B", "T", dtype="int32") if packed == "segments" else None,
        offsets=shape("B", "S+1", dtype="int32") if packed == "offsets" else None,
    )
    return problem_of(operation, arrays, spec)


def _sizes(dims: Mapping[str, int], is_step: bool) -> dict[str, int]:
    needed = ("I",) if is_step else ("T", "I")
    unknown, missing = sorted(set(dims) - set(_DIMS)), [name for name in needed if name not in dims]
    if unknown or missing:
        raise ValueError(
            f"dims: expected sizes for {', '.join(needed)} and optionally {', '.join(n for n in _DIMS if n not in needed)}, "
            f"received unknown {unknown} and missing {missing}."
        )
    size = {"B": 1, "T": 1, "N": 16, "G": 1, "S": 1, **dims}
    if any(n < 1 for n in size.values()) or size["I"] % size["G"]:
        raise ValueError(
            f"dims: expected positive sizes with G a divisor of I, received {', '.join(f'{n}={size[n]}' for n in _DIMS)}."
        )
    return size


def _checked(flags: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(flags) - {*_SWITCHES, "packed"})
    if unknown:
        raise ValueError(
            f"flags: expected some of {', '.join(sorted((*_SWITCHES, 'packed')))}, received {', '.join(unknown)}."
        )
    for name, value in flags.items():
        if name in _SWITCHES and not isinstance(value, bool):
            raise ValueError(f"flags: expected true or false for {name}, received {value!r}.")
    if flags.get("packed") not in (None, "offsets", "segments"):
        raise ValueError(f"flags: expected packed=offsets or packed=segments, received {flags['packed']!r}.")
    return dict(flags)
