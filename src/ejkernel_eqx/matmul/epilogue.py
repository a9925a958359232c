"""The epilogue of the products, and its gradient: the activation, the gate and its limits, in plain XLA."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..core.arguments import accumulator
from .spec import GroupedSpec, HALVES, INTERLEAVED


def finished(gate: Array, up: Array | None, spec: Any) -> Array:
    """The result from the products, in their dtype. `spec` has an activation, its `alpha`, a `limit` and an `up_shift`."""
    if up is None:
        return activated(gate, spec)
    if spec.limit is not None:
        gate = jnp.where(gate > spec.limit, spec.limit, gate)
        up = jnp.where(up > spec.limit, spec.limit, jnp.where(up < -spec.limit, -spec.limit, up))
    return activated(gate, spec) * (up + spec.up_shift)


def activated(z: Array, spec: Any) -> Array:
    if spec.activation == "silu":
        return z * jax.nn.sigmoid(spec.alpha * z)
    if spec.activation == "gelu":
        # Not by erfc, as JAX's does: kernels on TPU have only erf.
        return 0.5 * z * (1.0 + jax.lax.erf(z * 0.5**0.5))
    if spec.activation == "gelu_tanh":
        return jax.nn.gelu(z, approximate=True)
    return jax.nn.relu(z) if spec.activation == "relu" else z


def before_activation(
    dout: Array, saved: dict[str, Array], spec: GroupedSpec, dtype: Any
) -> tuple[Array, Array | None]:
    """The gradients of the products of `rhs` and, if there is one, of `up`, in the layout of the right sides' columns. Those of rows past the last
    group are arbitrary."""
    dtype = jnp.dtype(dtype)
    if spec.is_linear:  # no wider than what it is multiplied by
        return dout.astype(dtype) if dout.dtype.itemsize > dtype.itemsize else dout, None
    wide = accumulator(dtype)
    products = tuple(saved[name].astype(wide) for name in ("gate", "up_z") if name in saved)
    function = lambda gate, up=None: finished(gate, up, spec)
    dz, *du = jax.vjp(function, *products)[1](dout.astype(wide))
    dz, *du = (x.astype(dtype) for x in (dz, *du))
    if not du:
        return dz, None
    if spec.gated == HALVES:
        return jnp.concatenate([dz, *du], -1), None
    if spec.gated == INTERLEAVED:
        return jnp.stack([dz, *du], -1).reshape(*dz.shape[:-1], 2 * dz.shape[-1]), None
    return dz, du[0]
