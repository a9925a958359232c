"""Builds a problem for the command line from sizes by letter and option flags by name."""

from collections.abc import Mapping
from typing import Any

from ..core.letters import wide_dtype
from ..core.words import read_flags, read_sizes, SWITCH
from ..dispatch import Problem
from .core import problem_of, step_problem_of
from .spec import letters, ScanArrays, ScanSpec, SHARED, step_letters, StepArrays

_CHOICES = {
    **dict.fromkeys(("softplus", "D", "z", "dt_bias"), SWITCH[::-1]),
    **dict.fromkeys(("initial_state", "step", "slots"), SWITCH),
    "packed": (None, "offsets", "segments"),
}


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of one call, or of one decoding step.

    **Arguments:**

    - `dims`: at least `T` (except for a step) and `I`; `N` defaults to 16, `B`, `G` and the number `S` of sequences to 1.
    - `dtype`: the dtype of all arrays over tokens; parameters and states are float32.
    - `flags`: `softplus`, `D`, `z`, `dt_bias` (all true by default), `initial_state`, `packed` (`offsets` or `segments`), `step`, `slots` (a
        step on a pool of states).

    Raises `ValueError` for an unknown name, a missing size, or sizes that do not fit together.
    """
    options = read_flags(flags, _CHOICES)
    size = read_sizes(dims, {"T": 1 if options["step"] else None, "I": None, "B": 1, "N": 16, "G": 1, "S": 1})
    if size["I"] % size["G"]:
        raise ValueError(f"dims: expected G to be a divisor of I, received I={size['I']}, G={size['G']}.")
    size |= {"slots": size["B"]} if options["slots"] else {}
    dtypes = dict.fromkeys(("x", "dt", "B", "z"), dtype) | {"state": wide_dtype(dtype)}
    make = step_problem_of if options["step"] else problem_of
    return make(operation, *shapes_of(size, options, dtypes))


def shapes_of(
    size: Mapping[str, int], flags: Mapping[str, Any], dtypes: Mapping[str, str]
) -> tuple[Any, ScanSpec]:
    """The shapes of the arrays of a call or a step, and its spec, from the sizes, flags and dtypes of its problem."""
    wide, state, spec = wide_dtype(dtypes["x"]), dtypes["state"], ScanSpec(flags["softplus"], dtypes["state"])
    given = {"x": dtypes["x"], "dt": dtypes["dt"], "A": wide, "B": dtypes["B"], "C": dtypes["B"]}
    given |= {name: dtypes["z"] if name == "z" else wide for name in ("D", "z", "dt_bias") if flags[name]}
    if flags["step"]:
        given |= {"state": state} | ({"indices": "int32"} if flags["slots"] else {})
        size = {**size, "rows": size["B"], "slots": size.get("slots", size["B"])}
        return StepArrays(**step_letters("rows", "slots").shapes(size, given, SHARED, lead="")), spec
    packed = flags["packed"]
    given |= {"initial_state": state} if flags["initial_state"] else {}
    given |= {"starts" if packed == "segments" else packed: "int32"} if packed else {}
    return ScanArrays(**letters("T", packed).shapes(size, given, SHARED)), spec
