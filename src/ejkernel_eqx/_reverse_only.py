"""What a call says in forward mode whose kernels have a reverse-mode derivative only.

JAX gives a function with its own reverse derivative no say in its error. So the arrays of such a call first pass here: in reverse mode nothing
happens, in forward mode their tangents would have to be computed, and that raises.
"""

from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ._errors import UnsupportedError

T = TypeVar("T")

FORWARD_MODE = "Build it with platform='xla' for forward mode and second derivatives."
"""The remedy of operations whose XLA platform JAX differentiates itself."""

_mark_p = Primitive("ejkernel_reverse_only")
_tangent_p = Primitive("ejkernel_reverse_only_tangent")


def reverse_only(arrays: T, operation: str, platform: str, remedy: str) -> T:
    """`arrays`, any pytree of them; `UnsupportedError` with this remedy where they are differentiated in forward mode.

    All arrays of a call go through together, so that what an outer derivative makes of an inner gradient stays as it is.
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

# Where tangents are only passed back, nobody computes this one.
_tangent_p.def_impl(_refuse)
_tangent_p.def_abstract_eval(lambda tangent, *, words: tangent)
mlir.register_lowering(_tangent_p, _refuse)
ad.deflinear2(_tangent_p, lambda cotangent, tangent, *, words: [cotangent])
# Forward mode under `vmap`: JAX's own word at this place would come first.
batching.primitive_batchers[_tangent_p] = lambda leaves, axes, *, words: _refuse(words=words)
