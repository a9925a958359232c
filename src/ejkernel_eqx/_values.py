"""Checks that depend on the values of arguments: always if they are known, and on request if they are traced.

The same policy applies to offsets, lengths, indices and ids of every family. Outside `jit`, `vmap` and other transformations values are
known, and a wrong one raises `ValueError` before anything is launched. Traced values are checked while the program runs if
`check_values` or `EJKERNEL_EQX_CHECK_VALUES` requests it.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.custom_batching import custom_vmap

from .dispatch import Backend, place_of_calls
from .dispatch.environment import declare
from .dispatch.overlay import within

FAR = 2**29
"""Bound on positions and lengths: sums of a position, a length and a window clipped to `2 * FAR` fit in 32 bits."""

_SWITCH = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def _parse_switch(text: str) -> bool:
    try:
        return _SWITCH[text.lower()]
    except KeyError:
        raise ValueError(f"expected one of {', '.join(_SWITCH)}, received {text!r}.") from None


CHECK_VALUES = declare(
    "EJKERNEL_EQX_CHECK_VALUES",
    "whether traced offsets, lengths and indices are checked while a program runs: 1 or 0",
    _parse_switch,
    False,
)
_REQUESTED: ContextVar[bool | None] = ContextVar("ejkernel_eqx_check_values", default=None)


@contextlib.contextmanager
def check_values(enabled: bool = True) -> Iterator[None]:
    """Calls traced inside this context check their offsets, lengths and indices whenever they run.

    Outside `jit`, `vmap` and other transformations, wrong values always raise `ValueError` immediately. Inside, values are unknown while
    tracing, and without checks wrong values produce wrong results. With checks the program stops with the same message, the
    last line of its error. This costs a few operations and a callback per argument, so use it for debugging.

    ```python
    with ejx.check_values():
        out = eqx.filter_jit(attend)(q, k, v, cu_seqlens=offsets)
    ```

    A compiled function keeps the setting it was traced with. The environment variable `EJKERNEL_EQX_CHECK_VALUES=1` enables checks
    for the whole process; this context takes precedence. It is a context variable: a thread started inside sees it if it runs in a
    copy of the context.

    **Arguments:** `enabled`: whether to check; `False` disables checks enabled by the variable or an outer context, and those of full caches,
        which programs have on other devices than GPUs. Programs with such checks call the host, so `jax.export` cannot write them to a file.
    """
    if not isinstance(enabled, bool):
        raise ValueError(f"enabled: expected True or False, received {enabled!r}.")
    with within(_REQUESTED, enabled):
        yield


def checks_traced() -> bool:
    """Returns whether traced values are checked here, according to the context or else the environment."""
    requested = _REQUESTED.get()
    return CHECK_VALUES.read() if requested is None else requested


def known(given: Any) -> np.ndarray | None:
    """The values of an argument (a number, a list or an array); `None` if they are traced or on another host."""
    return np.asarray(given) if all(map(_has_value, jax.tree.leaves(given))) else None


Check = Callable[[Sequence[Any]], None]
"""Raises for wrong values of the inputs of a call."""


@dataclasses.dataclass(eq=False)
class _Inputs:
    """The arrays of a call that is compiled, which have values although they are traced."""

    arrays: Sequence[Any]
    traced: Sequence[Any] = ()  # while the program is traced
    checks: list[Check] | None = None  # from then on

    def place_of(self, given: Any) -> int | None:
        return next(iter([place for place, x in enumerate(self.traced) if x is given]), None)


_INPUTS: ContextVar[_Inputs | None] = ContextVar("ejkernel_eqx_inputs", default=None)


@contextlib.contextmanager
def inputs_of_call(arrays: Sequence[Any]) -> Iterator[_Inputs]:
    """Inside this context a program with these inputs runs, and is traced if it is new: the values of the inputs are known then. The
    checks that were made are those to repeat at calls that do not trace."""
    inputs = _Inputs(arrays)
    with within(_INPUTS, inputs):
        try:
            yield inputs
        finally:
            inputs.arrays = ()


@contextlib.contextmanager
def traced_inputs(traced: Sequence[Any]) -> Iterator[None]:
    """Inside this context a program of such a call is traced, with its inputs as they are traced."""
    inputs = _INPUTS.get() or _Inputs(())
    inputs.traced, inputs.checks = traced, []
    try:
        yield
    finally:
        inputs.traced = ()


def check_known(given: Any, check: Callable[[Any], None]) -> bool:
    """Calls `check` with the values of an argument, or of several as a tree, and returns whether they are known."""
    leaves, tree = jax.tree.flatten(given)
    inputs = _INPUTS.get() or _Inputs(())
    places = [inputs.place_of(x) for x in leaves]
    constants = [x if place is None else None for x, place in zip(leaves, places, strict=True)]

    def check_inputs(arrays: Sequence[Any]) -> None:
        values = [x if place is None else arrays[place] for x, place in zip(constants, places, strict=True)]
        with jax.ensure_compile_time_eval():
            check(jax.tree.unflatten(tree, values))

    if not all(map(_has_value, constants)):
        return False
    if inputs.checks is not None and any(place is not None for place in places):
        inputs.checks.append(check_inputs)
    check_inputs(inputs.arrays)
    return True


def _has_value(x: Any) -> bool:
    return not isinstance(x, Tracer) and (not isinstance(x, Array) or x.is_fully_addressable)


def shown(values: np.ndarray) -> str:
    """Values for a message: all if they are few, else the first and the last."""
    return np.array2string(values, threshold=20) if values.ndim else str(values)


def checked(
    array: Array,
    given: Any,
    wrong: Callable[[Any], Any],
    say: Callable[[str], str],
    show: Callable[[np.ndarray], str] = shown,
) -> Array:
    """Returns `array`, the converted argument `given`, unless any of its values is wrong.

    `wrong` marks wrong values of a numpy or JAX array; `say` builds the message from a description of what was received, which
    `show` creates if the values are known.
    """

    def check(given: Any) -> None:
        values = np.asarray(given)
        if np.any(wrong(values)):
            raise ValueError(say(show(values)))

    if not check_known(given, check) and checks_traced() and array.size:
        return stopped(array, wrong(array), say("other values while the program ran"))
    return array


def stops_programs() -> bool:
    """Returns whether a program compiled here stops with an error where data do not fit. On a GPU that takes a conditional and a copy to the
    host in every call, so there it is done on request only. `check_values(False)` leaves it out everywhere."""
    return checks_traced() or (place_of_calls()[0] is not Backend.GPU and _REQUESTED.get() is None)


def refused_if(wrong: Any, array: Array, message: str) -> Array:
    """`array`; a `ValueError` where `wrong` is known to be true, and an error while the program runs where it is traced."""
    values = known(wrong)
    if values is None:
        return stopped(array, wrong, message)
    if np.any(values):
        raise ValueError(message)
    return array


_ON_ERROR = os.environ.get("EQX_ON_ERROR", "raise")
"""What Equinox does on errors, which it reads when it is imported, too: "off" leaves checks out of programs."""


def stopped(array: Array, wrong: Array, message: str) -> Array:
    """`array`, computed in a program that stops with the message as its error's last line if anything is wrong."""
    # From a TPU, a callback's error may not reach Python.
    if _ON_ERROR != "raise" or place_of_calls()[0] is Backend.TPU:
        return eqx.error_if(array, wrong, message)

    def stop(_: Any) -> Any:
        raise ValueError(message)

    result, is_wrong = jax.eval_shape(lambda: array), _anywhere(wrong)
    # Inside `shard_map`, both branches need the array's type, which a choice from it has.
    typed = lambda x: jnp.where(jnp.zeros_like(array, bool), array, x)
    return jax.lax.cond(is_wrong, lambda: typed(jax.pure_callback(stop, result, is_wrong)), lambda: array)


@custom_vmap
def _anywhere(wrong: Array) -> Array:
    """Returns whether anything is true in any example of a batch: a condition that differed between examples would be computed for all."""
    return jnp.any(wrong)


@_anywhere.def_vmap
def _(size: int, batched: list[bool], wrong: Array) -> tuple[Array, bool]:
    return _anywhere(wrong), False


def check_between(name: str, array: Array, given: Any, least: int, most: int, remedy: str) -> Array:
    """Lengths, positions or indices from `least` to `most`."""
    return checked(
        array,
        given,
        lambda x: (x < least) | (x > most),
        lambda found: f"{name}: expected numbers from {least} to {most}, received {found}; {remedy}.",
    )


def check_int32(name: str, array: Array, given: Any) -> Array:
    """Arbitrary ids that fit in 32 bits."""
    return check_between(name, array, given, -(2**31), 2**31 - 1, "renumber them from 0")


def check_offsets(
    name: str,
    array: Array,
    given: Any,
    most: int | None,
    *,
    limit: str | None = None,
    zeros_behind: bool = False,
) -> Array:
    """Non-decreasing offsets `[..., N + 1]` from at least 0 to at most `most`; tokens outside them are padding.

    With `zeros_behind` the last ones may be 0 instead, as in a batch with room for more sequences.
    """

    def falls(x: Any) -> Any:
        lower = x[..., 1:] < x[..., :-1]
        if not zeros_behind:
            return lower
        more_to_come = (x[..., 1:] != 0)[..., ::-1].cumsum(-1)[..., ::-1] > 0
        return lower & more_to_come

    def say(found: str) -> str:
        return (
            f"{name}: expected offsets that never decrease, from 0 on, received {found}; "
            "offsets are the cumulative sum of the lengths after a leading 0."
        )

    array = checked(array, given, lambda x: falls(x).any(-1) | (x < 0).any(-1), say)
    if most is None:
        return array
    return checked(
        array,
        given,
        lambda x: x > most,
        lambda found: (
            f"{name}: expected offsets of at most {limit or f'{most}, the number of tokens'}, received {found}; "
            "pass the padded length."
        ),
        show=lambda values: str(values.max()),
    )


def check_distinct(name: str, array: Array, given: Any, count: int, remedy: str) -> Array:
    """Indices `[..., n]` in which none from 0 to `count - 1` occurs twice in one row."""

    def twice(x: Any) -> Any:
        xp = np if isinstance(x, np.ndarray) else jnp
        ordered = xp.sort(x, axis=-1)
        same = ordered[..., 1:] == ordered[..., :-1]
        return same & (ordered[..., 1:] >= 0) & (ordered[..., 1:] < count)

    return checked(
        array, given, twice, lambda found: f"{name}: expected distinct numbers, received {found}; {remedy}."
    )


def check_slots(name: str, array: Array, given: Any, count: int) -> Array:
    """Distinct slots in a pool of `count`, or -1 for none."""
    array = check_between(name, array, given, -1, count - 1, "-1 means no slot")
    return check_distinct(name, array, given, count, "each row needs its own slot")
