"""Reference computations on the device, against which results are checked: compiled once, and in float64 for float32 operands."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from ..dispatch import Backend, device_facts

# It runs once, so searching for its fastest matrix products would take longer than using any.
_UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
_WITH_FLOAT64 = (Backend.CPU, Backend.GPU)

Plain = Callable[[Any, Any], dict[str, Array]]


def compiled(plain: Plain, spec: Any, inputs: Any) -> dict[str, Array]:
    """`plain(spec, inputs)`, compiled without XLA's autotuning."""
    # Compiler options are not possible inside another function under `jit`.
    return (plain if _is_staged(inputs) else functools.partial(_compiled, plain))(spec, inputs)


def exactly(plain: Plain, spec: Any, inputs: Any, dtype: Any) -> dict[str, Array]:
    """`plain(spec, inputs)` for operands of `dtype`. Float32 operands are widened to float64 if the device supports it,
    and the results are rounded. The reason is slow decays. In float32 such a decay is off by up to 2^-25, in the same
    direction at each of thousands of tokens. That exceeds the tolerance of float32 results.

    `plain` computes in float64 for float64 operands. It and `spec` are hashable. Inside another function under `jit` nothing is widened.
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
