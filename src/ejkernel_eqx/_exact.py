"""The plain mathematics that results are checked by, on the device: compiled once, and of float32 operands computed in float64."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from .dispatch import Backend, device_facts

# It runs once: to look for its fastest matrix products would take longer than to use any.
_UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
_WITH_FLOAT64 = (Backend.CPU, Backend.GPU)

Plain = Callable[[Any, Any], dict[str, Array]]


def compiled(plain: Plain, spec: Any, inputs: Any) -> dict[str, Array]:
    """`plain(spec, inputs)`, compiled without a search for the fastest way."""
    # Inside another function under `jit` there can be no compiler options.
    return (plain if _is_staged(inputs) else functools.partial(_compiled, plain))(spec, inputs)


def exactly(plain: Plain, spec: Any, inputs: Any, dtype: Any) -> dict[str, Array]:
    """`plain(spec, inputs)`, of operands of `dtype`. Those of float32 are widened to float64 where the device has it, and the results rounded:
    a slow decay in float32 is off by up to 2^-25, the same at each of thousands of tokens, which is more than float32 results may be off.

    `plain` computes in float64 where the operands are. It and `spec` are hashable. Inside another function under `jit` nothing is widened.
    """
    if _is_staged(inputs) or dtype != jnp.float32 or device_facts().backend not in _WITH_FLOAT64:
        return compiled(plain, spec, inputs)
    with jax.enable_x64(True):
        return _compiled_in_float64(plain, spec, inputs)


def _is_staged(inputs: Any) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(inputs))


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=_UNTUNED)
def _compiled(plain: Plain, spec: Any, inputs: Any) -> dict[str, Array]:
    return plain(spec, inputs)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=_UNTUNED)
def _compiled_in_float64(plain: Plain, spec: Any, inputs: Any) -> dict[str, Array]:
    wide = lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
    results = plain(spec, jax.tree.map(wide, inputs))
    return {name: x.astype(jnp.float32) for name, x in results.items()}
