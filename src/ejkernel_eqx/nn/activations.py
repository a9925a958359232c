"""The activations of gated MLPs, by name."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._signatures import check_one_of
from ..dispatch import Backend, place_of_calls

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu")
UNGATED = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
"""Those of MLPs without a gate."""

_ALPHA, _LIMIT = 1.702, 7.0  # of GPT-OSS


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def gated(name: str, gate: Array, up: Array) -> Array:
    r"""$f(\mathrm{gate}) \odot \mathrm{up}$; `"clamped_swiglu"` is GPT-OSS's
    $(\mathrm{up} + 1) \odot \mathrm{gate} \odot \sigma(1.702\,\mathrm{gate})$, with both clamped at 7.

    Only `gate` and `up` are kept for the gradient, also in a loop over layers, and on GPUs XLA computes both gradients in one pass over
    memory."""
    return _gated(name, gate, up)


@gated.defjvp
def _gated_jvp(name: str, primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    # On GPUs, without the barrier, XLA makes two passes over memory for the gradients, as the result has a part of what they are computed from.
    kept = jax.lax.optimization_barrier(primals) if place_of_calls()[0] is Backend.GPU else primals
    return jax.jvp(jax.checkpoint(functools.partial(_gated, name), prevent_cse=False), kept, tangents)


def _gated(name: str, gate: Array, up: Array) -> Array:
    if name == "clamped_swiglu":
        gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
        return (up + 1) * gate * jax.nn.sigmoid(_ALPHA * gate)
    return ungated(name, gate) * up


def ungated(name: str, x: Array) -> Array:
    """$f(x)$; `"relu2"` is the square of `"relu"`."""
    if name in ("gelu", "gelu_tanh"):
        return jax.nn.gelu(x, approximate=name == "gelu_tanh")
    if name == "silu":
        return jax.nn.silu(x)
    return jax.nn.relu(x) ** 2 if name == "relu2" else jax.nn.relu(x)


def matmul_options(name: str) -> dict[str, Any]:
    """The same as options of [`ejkernel_eqx.GroupedMatmul`][]."""
    if name == "clamped_swiglu":
        return {"activation": "silu", "alpha": _ALPHA, "limit": _LIMIT, "up_shift": 1.0}
    return {"activation": name}


def check_activation(name: str, has_gate: bool = True) -> None:
    check_one_of("activation", name, ACTIVATIONS if has_gate else UNGATED)
