"""What depends on the values of an argument: checked where they are known, and where they are traced on request.

One policy for offsets, lengths, indices and ids of every family. Values are known outside of `jit`, `vmap` and the like; then a
wrong one is a `ValueError` before anything is launched. Traced ones are checked while the program runs, if `check_values` or
`EJKERNEL_EQX_CHECK_VALUES` asks for it.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from .dispatch.environment import declare

FAR = 2**29
"""Positions stay within this many of 0, and so do lengths: sums of a position, a length and a window clipped to `2 * FAR` fit 32 bits."""

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
    """While it is open, calls that are traced check their offsets, lengths and indices each time that they run.

    Outside of `jit`, `vmap` and the like wrong values are a `ValueError` at once, asked or not. Inside, nobody knows them while
    tracing, and without checks a wrong one gives wrong numbers. With them the program stops with an error that
    `equinox.error_if` raises, of the same words. It costs a few operations and a callback for each argument, so it is for looking
    for a fault.

    ```python
    with ejx.check_values():
        out = eqx.filter_jit(attend)(q, k, v, cu_seqlens=offsets)
    ```

    A function that has been compiled keeps what it was traced with. The environment variable `EJKERNEL_EQX_CHECK_VALUES=1` asks
    for the whole process; a context comes before it. It is a context variable: a thread started inside sees it if it runs in a
    copy of the context.

    **Arguments:** `enabled`: whether to check; `False` turns off what the variable or an outer context asks for.
    """
    if not isinstance(enabled, bool):
        raise ValueError(f"enabled: expected True or False, received {enabled!r}.")
    token = _REQUESTED.set(enabled)
    try:
        yield
    finally:
        _REQUESTED.reset(token)


def checks_traced() -> bool:
    """Whether traced values are to be checked here: the context's word, else the environment's."""
    requested = _REQUESTED.get()
    return CHECK_VALUES.read() if requested is None else requested


def known(given: Any) -> np.ndarray | None:
    """The values of an argument, a number, a list or an array; `None` where they are traced or on another host."""
    if any(
        isinstance(x, Tracer) or (isinstance(x, Array) and not x.is_fully_addressable)
        for x in jax.tree.leaves(given)
    ):
        return None
    return np.asarray(given)


def shown(values: np.ndarray) -> str:
    """Values in a message: all of a few, else the first and the last."""
    return np.array2string(values, threshold=20) if values.ndim else str(values)


def checked(
    array: Array,
    given: Any,
    wrong: Callable[[Any], Any],
    say: Callable[[str], str],
    show: Callable[[np.ndarray], str] = shown,
) -> Array:
    """`array`, what an argument `given` was read to, unless any of its values is wrong.

    `wrong` marks the wrong ones of a numpy or JAX array; `say` makes the message from the words for what was received, which
    `show` finds where the values are known.
    """
    values = known(given)
    if values is not None:
        if np.any(wrong(values)):
            raise ValueError(say(show(values)))
    elif checks_traced() and array.size:
        return eqx.error_if(array, jnp.any(wrong(array)), say("other values while the program ran"))
    return array


def check_between(name: str, array: Array, given: Any, least: int, most: int, remedy: str) -> Array:
    """Lengths, positions or indices from `least` to `most`."""
    return checked(
        array,
        given,
        lambda x: (x < least) | (x > most),
        lambda found: f"{name}: expected numbers from {least} to {most}, received {found}; {remedy}.",
    )


def check_int32(name: str, array: Array, given: Any) -> Array:
    """Ids of any size that 32 bits hold."""
    return check_between(name, array, given, -(2**31), 2**31 - 1, "number them anew from 0 on")


def check_offsets(
    name: str,
    array: Array,
    given: Any,
    most: int | None,
    *,
    limit: str | None = None,
    zeros_behind: bool = False,
) -> Array:
    """Offsets `[..., N + 1]` that never decrease, from 0 or more to at most `most`; tokens outside them are padding.

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
            "give the padded length."
        ),
        show=lambda values: str(values.max()),
    )


def check_distinct(name: str, array: Array, given: Any, count: int, remedy: str) -> Array:
    """Indices of which none from 0 to `count - 1` comes twice in one row, `[..., n]`."""

    def twice(x: Any) -> Any:
        xp = np if isinstance(x, np.ndarray) else jnp
        ordered = xp.sort(x, axis=-1)
        same = ordered[..., 1:] == ordered[..., :-1]
        return same & (ordered[..., 1:] >= 0) & (ordered[..., 1:] < count)

    return checked(
        array,
        given,
        twice,
        lambda found: f"{name}: expected no number twice, received {found}; {remedy}.",
    )


def check_slots(name: str, array: Array, given: Any, count: int) -> Array:
    """Places in a pool of `count`, -1 for none, no place twice."""
    array = check_between(name, array, given, -1, count - 1, "-1 has no slot")
    return check_distinct(name, array, given, count, "each row has a slot of its own")
