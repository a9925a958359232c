"""A call that `jax.vmap` folds into its leading axes before it is differentiated, also in `grad(vmap(f))`.

JAX maps the two halves of a function with a custom derivative separately. It sums the gradients of unmapped arrays
afterwards. A bias that all examples share would then have one gradient of its size per example. So the call is a
primitive of its own. `vmap` adds one axis to the whole call, and the bias keeps its size; differentiation then replaces
the primitive by its derivative.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import jaxpr_as_fun, Primitive
from jax.interpreters import ad, batching, mlir

from ..dispatch import replaceable
from ..parallel import Leading, widened

Arrays = dict[str, Array]
_call_p = Primitive("ejkernel_call")


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """Holds what is needed to trace a call again."""

    function: Callable[[Arrays], Arrays]
    leading: Leading
    structure: Any
    take_back: Callable[[], None]


def fold_first(function: Callable[[Arrays], Arrays], arrays: Arrays, leading: Leading) -> Arrays:
    """`function(arrays)` for arrays with any number of leading axes."""
    with replaceable() as take_back:
        jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(arrays)
    leaves, structure = jax.tree.flatten(arrays)
    call = _Call(function, leading, structure, take_back)
    return jax.tree.unflatten(jax.tree.structure(shapes), _call_p.bind(*leaves, jaxpr=jaxpr, call=call))


def _run(*leaves: Array, jaxpr: Any, call: _Call) -> list[Array]:
    return jaxpr_as_fun(jaxpr)(*leaves)


def _map(leaves: Any, axes: Any, *, jaxpr: Any, call: _Call) -> tuple[Any, Any]:
    call.take_back()
    size = next(x.shape[axis] for x, axis in zip(leaves, axes, strict=True) if axis is not None)
    front = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(leaves, axes, strict=True)]
    is_mapped = jax.tree.unflatten(call.structure, [axis is not None for axis in axes])
    arrays = widened(jax.tree.unflatten(call.structure, front), is_mapped, size, call.leading)
    results = jax.tree.leaves(fold_first(call.function, arrays, call.leading))
    return results, [0] * len(results)


def _differentiate(leaves: Any, tangents: Any, *, jaxpr: Any, call: _Call) -> tuple[Any, Any]:
    live = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def of_live(*given: Array) -> list[Array]:
        every = dict(enumerate(leaves)) | dict(zip(live, given, strict=True))
        return _run(*every.values(), jaxpr=jaxpr, call=call)

    return jax.jvp(of_live, [leaves[i] for i in live], [tangents[i] for i in live])


_call_p.multiple_results = True
_call_p.def_impl(_run)
# Simulated TPU kernels have effects, and types of their own that are replaced before anything is compiled.
_call_p.def_effectful_abstract_eval(lambda *_, jaxpr, call: (jaxpr.out_avals, jaxpr.effects))
_call_p.to_lojax = _run  # pyright: ignore[reportAttributeAccessIssue]
mlir.register_lowering(_call_p, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_jvps[_call_p] = _differentiate
batching.primitive_batchers[_call_p] = _map
