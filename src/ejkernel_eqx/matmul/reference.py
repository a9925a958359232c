"""The grouped matmul as in its equation, one group after the other: the oracle of every test, in float64 for float64 inputs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._broadcast import like
from ..core import Named
from ..core.arguments import accumulator
from .spec import GroupedArrays, GroupedSpec, INTERLEAVED, PAIR, right_of


def multiply(arrays: GroupedArrays, spec: GroupedSpec) -> Named:
    """`out [*, M, N]` in float32 (float64 for float64 inputs)."""
    wide = accumulator(arrays.lhs.dtype)
    count = arrays.sizes.shape[-1]
    group = group_of(arrays.sizes, arrays.num_rows)
    real = (group < count)[..., None]
    lhs = arrays.lhs
    if arrays.rows is not None:
        lhs = jnp.take_along_axis(lhs, jnp.where(real, arrays.rows[..., None], 0), -2)
    # Rows past the last group may hold NaN, which a product with 0 would keep.
    lhs = jnp.where(real, lhs.astype(wide), 0)

    def total(right: Array, scale: Array | None, bias: Array | None) -> Array:
        right = right.swapaxes(-1, -2) if spec.transpose_rhs else right
        per_group = {"right": jnp.moveaxis(right, -3, 0)}
        per_group |= {
            name: jnp.moveaxis(x, -2, 0)[..., None, :]
            for name, x in (("scale", scale), ("bias", bias))
            if x is not None
        }

        def add(sum: Array, turn: tuple[Array, Named]) -> tuple[Array, None]:
            number, one = turn[0], {name: like(x.astype(wide), lhs) for name, x in turn[1].items()}
            z = jnp.matmul(lhs, one["right"], precision="highest")
            z = z * one["scale"] if "scale" in one else z
            z = z + one["bias"] if "bias" in one else z
            return sum + jnp.where((group == number)[..., None], z, 0), None

        zeros = jnp.zeros((*lhs.shape[:-1], right.shape[-1]), wide)
        return lax.scan(add, zeros, (jnp.arange(count, dtype=group.dtype), per_group))[0]

    numbers = lambda right: right if spec.form is None else right.astype(wide)
    first = total(numbers(right_of(arrays, spec)), arrays.scale, arrays.bias)
    if spec.gated is None:
        return {"out": activation(first, spec)}
    if spec.gated == PAIR:
        gate, up = first, total(numbers(right_of(arrays, spec, up=True)), arrays.up_scale, arrays.up_bias)
    elif spec.gated == INTERLEAVED:
        gate, up = first[..., 0::2], first[..., 1::2]
    else:
        gate, up = jnp.split(first, 2, -1)
    if spec.limit is not None:
        gate, up = jnp.minimum(gate, spec.limit), jnp.clip(up, -spec.limit, spec.limit)
    # A shifted up is not 0 past the last group.
    return {"out": jnp.where(real, activation(gate, spec) * (up + spec.up_shift), 0)}


def activation(z: Array, spec: Any) -> Array:
    if spec.activation == "silu":
        return z * jax.nn.sigmoid(spec.alpha * z)
    if spec.activation is None:
        return z
    functions = {
        "gelu": lambda z: jax.nn.gelu(z, approximate=False),
        "gelu_tanh": lambda z: jax.nn.gelu(z, approximate=True),
        "relu": jax.nn.relu,
    }
    return functions[spec.activation](z)


def group_of(sizes: Array, rows: int) -> Array:
    """The group of each row, int32 `[*, rows]`; the number of groups for rows past the last."""
    ends = jnp.cumsum(sizes, -1)
    ends = ends[..., None, :]
    row = like(jnp.arange(rows, dtype=ends.dtype)[:, None], ends)
    return jnp.sum(ends <= row, -1, dtype=jnp.int32)
