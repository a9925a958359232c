"""Builds a problem for the command line from sizes by letter and option flags by name."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..core.letters import wide_dtype
from ..core.words import read_flags, read_sizes, SWITCH
from ..dispatch import Problem
from .core import problem_of, step_problem_of
from .spec import (
    CONSTANT,
    KEY,
    letters,
    NONE,
    RecurrenceArrays,
    RecurrenceSpec,
    SCALAR,
    step_letters,
    StepArrays,
    VALUE,
)

_HEADS = ("H", "Hq", "Hk", "Hv")
_CHOICES = {
    **dict.fromkeys(
        ("before", "beta", "delta", "initial_state", "rank_one", "skip", "step", "slots", "transposed"),
        SWITCH,
    ),
    "decay": (NONE, CONSTANT, SCALAR, KEY, VALUE),
    "packed": (None, "offsets", "segments"),
}

# The defaults of each operation, which flags override.
_OPERATIONS: dict[str, dict[str, Any]] = {
    "linear_attention": {"decay": NONE},
    "gated_linear_attention": {"decay": KEY},
    "lightning_attention": {"decay": CONSTANT},
    "kernel_delta_attention": {"decay": KEY, "delta": True, "beta": True},
    "gated_delta_rule": {"decay": SCALAR, "delta": True, "beta": True},
    "delta_product": {"decay": SCALAR, "delta": True, "beta": True},
    "delta_rule": {"decay": NONE, "delta": True, "beta": True},
    "dplr_delta_rule": {"decay": KEY, "rank_one": True},
    "rwkv7": {"decay": KEY, "rank_one": True},
    "state_space_v2": {"decay": SCALAR, "beta": True, "skip": True, "transposed": True, "Hq": 1, "Hk": 1},
    "state_space_v3": {"decay": SCALAR, "transposed": True},
}


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of one call, or of one decoding step.

    **Arguments:**

    - `dims`: at least `T` (except for a step), `H` and `D`; `V` defaults to `D`, `Hq`, `Hk`, `Hv` to `H` (the state heads; 1 for the B and C of
        `state_space_v2`, whose `D` is the state size and `V` the head dim), `B` to 1; `N` is the number of sequences for `packed=offsets`.
    - `dtype`: the dtype of queries, keys, values and beta; decays and states are float32.
    - `flags`: `decay` (`none`, `constant`, `scalar`, `key`, `value`), `delta`, `beta`, `rank_one`, `before`, `skip` if the operation has a choice;
        `initial_state`, `packed` (`offsets` or `segments`), `step`, `slots` (a step on a pool of states).

    Raises `ValueError` for an unknown name, a missing size, or sizes that do not fit together.
    """
    known = dict(_OPERATIONS.get(operation, {}))
    few = {name: known.pop(name) for name in ("Hq", "Hk") if name in known}
    options = read_flags(known | dict(flags), _CHOICES)
    heads, step = dims.get("H", 1), options["step"]
    defaults = {"T": 1 if step else None, "H": None, "D": None, "V": dims.get("D", 1), "N": 1, "B": 1}
    size = read_sizes(few | dict(dims), defaults | dict.fromkeys(("Hq", "Hk", "Hv"), heads))
    if any(heads % size[name] for name in ("Hk", "Hv")) or max(size["Hq"], heads) % min(size["Hq"], heads):
        raise ValueError(
            f"dims: expected head counts that divide H, received {', '.join(f'{n}={size[n]}' for n in _HEADS)}."
        )
    size["HS"] = heads
    size |= {"slots": size["B"]} if options["slots"] else {}
    dtypes = {"qkv": dtype, "g": wide_dtype(dtype), "state": wide_dtype(dtype)}
    return (step_problem_of if step else problem_of)(operation, *shapes_of(size, options, dtypes))


def shapes_of(
    size: Mapping[str, int], flags: Mapping[str, Any], dtypes: Mapping[str, str]
) -> tuple[Any, RecurrenceSpec]:
    """The shapes of the arrays of a call or a step, and its spec, from the sizes, flags and dtypes of its problem."""
    decay, delta, step = flags["decay"], flags["delta"], flags["step"]
    layout = {"transposed": bool(step and flags["transposed"]), "before": bool(flags.get("before"))}
    spec = RecurrenceSpec(size["D"] ** -0.5, decay, delta, dtypes["state"], **layout)
    given = {name: dtypes["qkv"] for name in ("q", "k", "v", "beta", "skip") if flags.get(name, True)}
    given |= {} if decay == NONE else {"g": dtypes["g"]}
    given |= dict.fromkeys("ab", dtypes["qkv"]) if flags.get("rank_one") else {}
    size = dict.fromkeys(("Hg", "Hb", "Ha", "Hw"), size["HS"]) | dict(size)
    if step:
        spec = dataclasses.replace(spec, decay=SCALAR) if decay == CONSTANT else spec
        given |= {"state": dtypes["state"]} | ({"indices": "int32"} if flags["slots"] else {})
        size |= {"rows": size["B"], "slots": size.get("slots", size["B"])}
        axes = step_letters("rows", "slots", spec.decay, spec.transposed)
        return StepArrays(**axes.shapes(size, given, lead="")), spec
    packed = flags["packed"]
    given |= {"initial_state": dtypes["state"]} if flags["initial_state"] else {}
    given |= {"starts" if packed == "segments" else packed: "int32"} if packed else {}
    return RecurrenceArrays(**letters(decay, packed).shapes(size, given)), spec
