"""A problem from a few words, for the command line: sizes by letter and option flags by name."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..dispatch import Problem
from .core import problem_of, step_problem_of
from .spec import CONSTANT, KEY, NONE, RecurrenceArrays, RecurrenceSpec, SCALAR, StepArrays, StepSpec, VALUE

_DIMS = ("B", "T", "H", "D", "V", "Hq", "Hk", "Hv", "N")
_SWITCHES = ("beta", "delta", "initial_state", "skip", "step", "slots", "transposed")
_FLAGS = (*_SWITCHES, "decay", "packed")
_KINDS = (NONE, CONSTANT, SCALAR, KEY, VALUE)

# What each operation is, where the flags do not say otherwise.
_OPERATIONS: dict[str, dict[str, Any]] = {
    "linear_attention": {"decay": NONE},
    "gated_linear_attention": {"decay": KEY},
    "lightning_attention": {"decay": CONSTANT},
    "kernel_delta_attention": {"decay": KEY, "delta": True, "beta": True},
    "gated_delta_rule": {"decay": SCALAR, "delta": True, "beta": True},
    "delta_rule": {"decay": NONE, "delta": True, "beta": True},
    "state_space_v2": {"decay": SCALAR, "beta": True, "skip": True, "transposed": True, "Hq": 1, "Hk": 1},
}


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of one call, or of one decoding step.

    **Arguments:**

    - `dims`: `T` (but for a step), `H` and `D` at least; `V` defaults to `D`, `Hq`, `Hk`, `Hv` to `H` (of the state; 1 for the B and C of
        `state_space_v2`, whose `D` is the state size and `V` the head dim), `B` to 1; `N` sequences, for `packed=offsets`.
    - `dtype`: of queries, keys, values and beta; decays and states are float32.
    - `flags`: `decay` (`none`, `constant`, `scalar`, `key`, `value`), `delta`, `beta`, `skip` where the operation has a choice;
        `initial_state`, `packed` (`offsets` or `segments`), `step`, `slots` (a step on a pool of states).

    Raises `ValueError` for a name that is none of these, a missing size, or sizes that do not fit.
    """
    known = dict(_OPERATIONS.get(operation, {}))
    given = known | _checked(flags)
    size = _sizes({name: known.pop(name) for name in ("Hq", "Hk") if name in known} | dict(dims), given)
    kind = str(given.get("decay", NONE))
    if kind not in _KINDS:
        raise ValueError(f"flags: expected decay {', '.join(_KINDS)}, received {kind!r}.")
    if given.get("step"):
        return _step_problem(operation, size, dtype, given, SCALAR if kind == CONSTANT else kind)

    def shape(*axes: str, dtype: str = dtype) -> Any:
        return jax.ShapeDtypeStruct(tuple(size[a] for a in axes), jnp.dtype(dtype))

    packed = given.get("packed")
    if packed not in (None, "offsets", "segments"):
        raise ValueError(f"flags: expected packed=offsets or packed=segments, received {packed!r}.")
    state = ("B", "N", "H", "D", "V") if packed == "offsets" else ("B", "H", "D", "V")
    size["N+1"] = size["N"] + 1
    wide = "float64" if dtype == "float64" else "float32"
    axes = {
        CONSTANT: ("B", "H"),
        SCALAR: ("B", "T", "H"),
        KEY: ("B", "T", "H", "D"),
        VALUE: ("B", "T", "H", "V"),
    }
    arrays = RecurrenceArrays(
        q=shape("B", "T", "Hq", "D"),
        k=shape("B", "T", "Hk", "D"),
        v=shape("B", "T", "Hv", "V"),
        g=shape(*axes[kind], dtype=wide) if kind != NONE else None,
        beta=shape("B", "T", "H") if given.get("beta") else None,
        skip=shape("B", "H", "V") if given.get("skip") else None,
        initial_state=shape(*state, dtype=wide) if given.get("initial_state") else None,
        starts=shape("B", "T", dtype="int32") if packed == "segments" else None,
        offsets=shape("B", "N+1", dtype="int32") if packed == "offsets" else None,
    )
    spec = RecurrenceSpec(size["D"] ** -0.5, kind, bool(given.get("delta")), wide)
    return problem_of(operation, arrays, spec)


def _step_problem(
    operation: str, size: dict[str, int], dtype: str, given: dict[str, Any], kind: str
) -> Problem:
    def shape(*axes: str, dtype: str = dtype) -> Any:
        return jax.ShapeDtypeStruct(tuple(size[a] for a in axes), jnp.dtype(dtype))

    wide = "float64" if dtype == "float64" else "float32"
    transposed = bool(given.get("transposed"))
    axes = {SCALAR: ("B", "H"), KEY: ("B", "H", "D"), VALUE: ("B", "H", "V")}
    arrays = StepArrays(
        q=shape("B", "Hq", "D"),
        k=shape("B", "Hk", "D"),
        v=shape("B", "Hv", "V"),
        state=shape("B", "H", *(("V", "D") if transposed else ("D", "V")), dtype=wide),
        g=shape(*axes[kind], dtype=wide) if kind != NONE else None,
        beta=shape("B", "H") if given.get("beta") else None,
        skip=shape("H", "V") if given.get("skip") else None,
        indices=shape("B", dtype="int32") if given.get("slots") else None,
    )
    spec = StepSpec(size["D"] ** -0.5, kind, bool(given.get("delta")), transposed)
    return step_problem_of(operation, arrays, spec)


def _sizes(dims: Mapping[str, int], flags: Mapping[str, Any]) -> dict[str, int]:
    needed = "HD" if flags.get("step") else "THD"
    unknown, missing = sorted(set(dims) - set(_DIMS)), [name for name in needed if name not in dims]
    if unknown or missing:
        raise ValueError(
            f"dims: expected sizes for {', '.join(needed)} and optionally {', '.join(n for n in _DIMS if n not in needed)}, "
            f"received unknown {unknown} and missing {missing}."
        )
    heads = dims["H"]
    size = {"B": 1, "T": 1, "N": 1, "V": dims["D"], "Hq": heads, "Hk": heads, "Hv": heads, **dims}
    shared = [name for name in ("Hk", "Hv") if size[name] < 1 or heads % size[name]]
    if any(n < 1 for n in size.values()) or shared or max(size["Hq"], heads) % min(size["Hq"], heads):
        raise ValueError(
            f"dims: expected positive sizes with head counts that divide H, received {', '.join(f'{n}={size[n]}' for n in _DIMS)}."
        )
    return size


def _checked(flags: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(flags) - set(_FLAGS))
    if unknown:
        raise ValueError(
            f"flags: expected some of {', '.join(sorted(_FLAGS))}, received {', '.join(unknown)}."
        )
    for name, value in flags.items():
        if name in _SWITCHES and not isinstance(value, bool):
            raise ValueError(f"flags: expected true or false for {name}, received {value!r}.")
    return dict(flags)
