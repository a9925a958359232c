"""The epilogue of the products, and its gradient: the activation, the gate and its limits, in plain XLA."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from ..core.arguments import accumulator
from .spec import GroupedSpec, HALVES, INTERLEAVED


class Epilogue(Protocol):
    """The options of an activation and of what it multiplies."""

    @property
    def activation(self) -> str | None: ...
    @property
    def alpha(self) -> float: ...
    @property
    def limit(self) -> float | None: ...
    @property
    def up_shift(self) -> float: ...


def finished(gate: Array, up: Array | None, spec: Epilogue) -> Array:
    """The result from the products, in their dtype."""
    if up is None:
        return activated(gate, spec)
    if spec.limit is not None:
        gate = jnp.where(gate > spec.limit, spec.limit, gate)
        up = jnp.where(up > spec.limit, spec.limit, jnp.where(up < -spec.limit, -spec.limit, up))
    return activated(gate, spec) * (up + spec.up_shift)


def activated(z: Array, spec: Epilogue) -> Array:
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
