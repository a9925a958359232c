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
    wide = wide_dtype(dtype)
    dtypes = {"x": dtype, "dt": dtype, "A": wide, "B": dtype, "C": dtype}
    dtypes |= {name: dtype if name == "z" else wide for name in ("D", "z", "dt_bias") if options[name]}
    spec = ScanSpec(options["softplus"], wide)
    if options["step"]:
        dtypes |= {"state": wide} | ({"indices": "int32"} if options["slots"] else {})
        sizes = {**size, "B": 1, "rows": size["B"], "slots": size["B"]}
        return step_problem_of(
            operation,
            StepArrays(**step_letters("rows", "slots").shapes(sizes, dtypes, SHARED, lead="")),
            spec,
        )
    packed = options["packed"]
    dtypes |= {"initial_state": wide} if options["initial_state"] else {}
    dtypes |= {"starts" if packed == "segments" else packed: "int32"} if packed else {}
    return problem_of(operation, ScanArrays(**letters("T", packed).shapes(size, dtypes, SHARED)), spec)
