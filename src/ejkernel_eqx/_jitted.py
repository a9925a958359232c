"""Calls that are compiled once for their shapes, even if they are made outside `jax.jit`."""

import functools
import weakref
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


def compiled_once(function: Callable[..., Any], *static: Hashable, known: str = "") -> Any:
    """The same for functions that do not depend on a plan. Only JAX's caches keep what is `static`, so `jax.clear_caches()` frees it."""
    return functools.partial(_of_static, function, static, known)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _of_static(function: Callable[..., Any], static: tuple[Hashable, ...], known: str, *given: Any) -> Any:
    return function(*static, *given)


def while_alive(compute: Callable[..., Any]) -> Callable[..., Any]:
    """`compute` of an object and other arguments, computed once as long as the object lives; results may not refer to it."""
    known: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(compute)
    def call(key: Any, *rest: Hashable) -> Any:
        results = known.setdefault(key, {})
        if rest not in results:
            results[rest] = compute(key, *rest)
        return results[rest]

    return call
