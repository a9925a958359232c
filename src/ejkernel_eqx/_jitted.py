"""Calls that are compiled once for their shapes, even if they are made outside `jax.jit`."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax

from ._kernel import Plan
from .dispatch import is_traced_anew


def jitted(function: Callable[..., Any], plan: Plan, *static: Hashable) -> Callable[..., Any]:
    """`jax.jit` of `function(plan, *static, ...)` as a function of the remaining arguments; the same object for equal plans.

    Derivatives, loops and kernels are closures that every call creates anew; outside `jit` JAX would compile and cache each of them. As the
    body of one compiled function they are traced once for their shapes. While choices are being recorded, every call is traced separately,
    with its own plan.
    """
    if is_traced_anew():
        return functools.partial(function, plan, *static)
    # One of two equal plans may know more.
    return compiled_once(function, plan, *static, known=plan.answers)


@functools.lru_cache(maxsize=8192)
def compiled_once(function: Callable[..., Any], *static: Hashable, known: str = "") -> Any:
    """The same for functions that do not depend on a plan."""
    return jax.jit(functools.partial(function, *static))
