"""Calls that are compiled once for their shapes, also where a user calls them outside `jax.jit`."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax

from ._kernel import Plan
from .dispatch import is_traced_anew


def jitted(function: Callable[..., Any], plan: Plan, *static: Hashable) -> Callable[..., Any]:
    """`jax.jit` of `function(*static)`, `plan` the first of them, as a function of the other arguments: the same object for equal plans.

    Derivatives, loops and kernels are closures, made anew by every call: outside `jit` JAX would compile each, and keep it. As the body of
    one compiled function they are traced once for the shapes they are called with. Where somebody asks for the choices that are made, every call is
    traced by itself, with its own plan.
    """
    if is_traced_anew():
        return functools.partial(function, plan, *static)
    # Of two equal plans one may know more.
    return compiled_once(function, plan, *static, known=plan.answers)


@functools.lru_cache(maxsize=8192)
def compiled_once(function: Callable[..., Any], *static: Hashable, known: str = "") -> Any:
    """The same for what no plan decides."""
    return jax.jit(functools.partial(function, *static))
