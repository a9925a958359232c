"""Raises a clear error in forward mode for calls whose kernels have only a reverse-mode derivative.

A function with a custom reverse derivative cannot customise JAX's own error. So the arrays of such a call first pass through here: in reverse
mode nothing happens; in forward mode their tangents would have to be computed, which raises.
"""

from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._errors import UnsupportedError

T = TypeVar("T")

FORWARD_MODE = "Build it with platform='xla' for forward mode and second derivatives."
"""The remedy for operations whose XLA platform JAX differentiates itself."""

_mark_p = Primitive("ejkernel_reverse_only")
_tangent_p = Primitive("ejkernel_reverse_only_tangent")


def reverse_only(arrays: T, operation: str, platform: str, remedy: str) -> T:
    """Returns `arrays` (any pytree); raises `UnsupportedError` with this remedy if they are differentiated in forward mode.

    All arrays of a call pass through together, so that an outer derivative treats an inner gradient as before.
    """
    leaves, structure = jax.tree.flatten(arrays)
    marked = _mark_p.bind(*leaves, words=(operation, str(platform), remedy))
    return jax.tree.unflatten(structure, marked)


def _mark_jvp(leaves: Any, tangents: Any, *, words: Any) -> tuple[Any, Any]:
    return list(leaves), [t if isinstance(t, ad.Zero) else _tangent_p.bind(t, words=words) for t in tangents]


def _refuse(*_: Any, words: tuple[str, str, str]) -> Any:
    operation, platform, remedy = words
    why = "its kernels have reverse-mode derivatives only (jax.grad, jax.vjp), none in forward mode (jax.jvp, jax.jacfwd)"
    raise UnsupportedError(operation, {platform: why}, remedy)


_mark_p.multiple_results = True
_mark_p.def_impl(lambda *leaves, words: list(leaves))
_mark_p.def_abstract_eval(lambda *leaves, words: list(leaves))
mlir.register_lowering(_mark_p, lambda context, *leaves, words: leaves)
ad.primitive_jvps[_mark_p] = _mark_jvp
batching.primitive_batchers[_mark_p] = lambda leaves, axes, *, words: (
    _mark_p.bind(*leaves, words=words),
    axes,
)

# In reverse mode, where tangents are transposed, this is never computed.
_tangent_p.def_impl(_refuse)
_tangent_p.def_abstract_eval(lambda tangent, *, words: tangent)
mlir.register_lowering(_tangent_p, _refuse)
ad.deflinear2(_tangent_p, lambda cotangent, tangent, *, words: [cotangent])
# Forward mode under `vmap`: otherwise JAX's own error would come first.
batching.primitive_batchers[_tangent_p] = lambda leaves, axes, *, words: _refuse(words=words)
