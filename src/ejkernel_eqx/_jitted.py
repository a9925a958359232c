"""Calls that are compiled once for their shapes, even if they are made outside `jax.jit`."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax import Array
from jax.core import Tracer

from ._kernel import kernels_of, Plan
from ._values import Check, checks_traced, inputs_of_call, traced_inputs
from .dispatch import is_traced_anew

F = TypeVar("F", bound=Callable[..., Any])


def jitted(function: Callable[..., Any], plan: Plan, *static: Hashable) -> Callable[..., Any]:
    """`jax.jit` of `function(plan, *static, ...)` as a function of the remaining arguments; the same object for equal plans.

    Derivatives, loops and kernels are closures that every call creates anew; outside `jit` JAX would compile and cache each of them. As the
    body of one compiled function they are traced once for their shapes. While choices are being recorded, every call is traced separately,
    with its own plan.
    """
    if is_traced_anew():
        return functools.partial(function, plan, *static)
    # One of two equal plans may know more.
    return functools.partial(_of_static, function, (plan, *static), plan.answers)


def compiled_once(function: Callable[..., Any], *static: Hashable) -> Any:
    """Does the same for functions that do not depend on a plan. Only JAX's caches keep what is `static`, so `jax.clear_caches()` frees it."""
    return functools.partial(_of_static, function, static, "")


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _of_static(function: Callable[..., Any], static: tuple[Hashable, ...], known: str, *given: Any) -> Any:
    return function(*static, *given)


def while_alive(compute: Callable[..., Any]) -> Callable[..., Any]:
    """`compute` of an object and other arguments, computed once as long as the object lives; results may not refer to it.
    `cache_clear()` forgets all."""
    known: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(compute)
    def call(key: Any, *rest: Hashable) -> Any:
        results = known.setdefault(key, {})
        if rest not in results:
            results[rest] = compute(key, *rest)
        return results[rest]

    call.cache_clear = known.clear  # pyright: ignore[reportAttributeAccessIssue]
    return call


def compiled_call(name: str | None = None) -> Callable[[F], F]:
    """Decorates a method of a layer or model, whose calls outside of `jit` are then compiled once for their shapes and static fields.

    Inside `jit`, `grad`, `vmap` and other transformations the method runs as it is. So it does where single operations are looked at
    (`jax.disable_jit`, `jax.debug_nans`, `jax.debug_infs`, `check_values`, recorded choices), with arrays on several devices, whose mesh
    only concrete arrays tell, and with fields that have no hash. Known values are checked before each call.

    `name`: of the scope of its operations.
    """

    def decorate(method: Any) -> Any:
        scoped = method if name is None else jax.named_scope(name)(method)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = jax.tree.flatten((args, kwargs))
            static = _static_of(scoped, tree, leaves, args[0]) if all(map(_is_here, leaves)) else None
            return scoped(*args, **kwargs) if static is None else _compiled(static, leaves)

        return call

    return decorate


@dataclasses.dataclass(frozen=True)
class _Static:
    """Holds what a program depends on besides the numbers in its arrays."""

    method: Callable[..., Any]
    tree: Any
    leaves: tuple[
        tuple[Any, ...], ...
    ]  # with their types, since True == 1; of arrays their shapes and dtypes
    answers: tuple[str, ...]  # of plans: one of two equal ones may know more

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.method, self.tree, self.leaves, self.answers))

    def __hash__(self) -> int:
        return self._hash


# What is checked of the values of a program's arrays, as long as JAX keeps the program; `None` until it is traced. Of equal keys it holds the
# first, as JAX does.
_CHECKS: weakref.WeakKeyDictionary[_Static, list[Check] | None] = weakref.WeakKeyDictionary()


def _static_of(method: Callable[..., Any], tree: Any, leaves: list[Any], module: Any) -> _Static | None:
    """`None` if the call is not to be compiled."""
    watched = ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs")
    if is_traced_anew() or checks_traced() or any(getattr(jax.config, name) for name in watched):
        return None
    kinds = [(Array, x.shape, x.dtype) if _is_array(x) else (type(x), x) for x in leaves]
    static = _Static(method, tree, tuple(kinds), tuple(k.plan.answers for k in kernels_of(module)))
    try:
        # Of fields the hash of a tree takes no notice.
        return static if static in _CHECKS or _fields_have_hashes(tree) else None
    except TypeError:
        return None


def _fields_have_hashes(tree: Any) -> bool:
    node = tree.node_data()
    if node is not None and issubclass(node[0], eqx.Module):
        hash(node[1])
    return all(map(_fields_have_hashes, tree.children()))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, Array | np.ndarray)


def _is_here(leaf: Any) -> bool:
    """Returns whether a leaf is none of a transformation, and no array that is split over devices or holds objects."""
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind not in "OSUMm"
    return not isinstance(leaf, Tracer) and (
        not isinstance(leaf, Array) or len(leaf.sharding.device_set) == 1
    )


def _compiled(static: _Static, leaves: list[Any]) -> Any:
    arrays = [leaf for leaf in leaves if _is_array(leaf)]
    checks = _CHECKS.setdefault(static, None)
    for check in checks or ():
        check(arrays)
    with inputs_of_call(arrays) as inputs:
        results = _compiled_program(static, arrays)
        if checks is None and inputs.checks is None:  # JAX has the program under an equal key
            eqx.filter_eval_shape(_program, static, arrays)
    if inputs.checks is not None:
        _CHECKS[static] = inputs.checks
    return results


def _program(static: _Static, arrays: list[Array]) -> Any:
    rest = iter(arrays)
    leaves = [next(rest) if kind is Array else leaf[0] for kind, *leaf in static.leaves]
    args, kwargs = jax.tree.unflatten(static.tree, leaves)
    with traced_inputs(arrays):
        return static.method(*args, **kwargs)


_compiled_program = eqx.filter_jit(_program)
