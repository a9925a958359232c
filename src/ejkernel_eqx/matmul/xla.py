"""The grouped matmul in plain XLA: tiles of rows, each by the matrix of its group. JAX differentiates it; `xla_products.py` has the products."""

import bisect
import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from ..core.arguments import accumulator
from ..core.platforms import supports_all
from ..dispatch import Problem
from ..launch.fields import Checked, Power
from .epilogue import finished
from .spec import GroupedArrays, GroupedSpec, INTERLEAVED, PAIR, right_of
from .xla_products import Form, rows

_BLOCKS = (8, 16, 32, 64, 128, 256, 512)


@dataclasses.dataclass(frozen=True)
class XlaConfig(Checked):
    """Rows of a tile, a power of two."""

    block_m: Power


config_type = XlaConfig
unsupported = supports_all


def default_config(problem: Problem, device: Any) -> XlaConfig:
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: Any) -> list[XlaConfig]:
    """Configurations worth timing, the heuristic first: tiles of as many rows as a group has."""
    each = -(-problem.dim("M") // max(problem.dim("E"), 1))
    # The smallest tile that holds an average group, or else the largest tile.
    near = min(bisect.bisect_left(_BLOCKS, each), len(_BLOCKS) - 1)
    order = (near, near - 1, near + 1, near - 2, near + 2)
    return [XlaConfig(_BLOCKS[i]) for i in order if 0 <= i < len(_BLOCKS)]


def apply(arrays: GroupedArrays, spec: GroupedSpec, config: XlaConfig) -> dict[str, Array]:
    """`out [*, M, N]`. Leading axes are not merged, as they may be sharded."""
    first = _product(arrays, right_of(arrays, spec), arrays.scale, arrays.bias, spec, config)
    if spec.gated is None:
        return {"out": finished(first, None, spec).astype(spec.out_dtype)}
    if spec.gated == PAIR:
        up = _product(arrays, right_of(arrays, spec, up=True), arrays.up_scale, arrays.up_bias, spec, config)
        gate = first
    elif spec.gated == INTERLEAVED:
        gate, up = first[..., 0::2], first[..., 1::2]
    else:
        gate, up = jnp.split(first, 2, -1)
    return {"out": finished(gate, up, spec).astype(spec.out_dtype)}


def _product(
    arrays: GroupedArrays,
    right: Any,
    scale: Array | None,
    bias: Array | None,
    spec: GroupedSpec,
    config: XlaConfig,
) -> Array:
    """`x w[g] scale[g] + bias[g]`, in float32 unless it is the result."""
    operand = arrays.lhs.dtype
    wide = accumulator(operand).__name__
    # A scale may be so small that gradients times it are too small for float16.
    multiplied = wide if scale is not None and operand == jnp.float16 else operand.name
    plain = spec.is_linear and scale is None and bias is None
    form = Form(spec.out_dtype if plain else wide, multiplied, spec.transpose_rhs, config.block_m)
    z = rows(arrays.lhs, right, arrays.sizes, arrays.rows, form)
    if plain:
        return z
    # What each group has one row of reaches its rows in the same way: as a product with a column of ones.
    ones = jnp.ones((*arrays.sizes.shape[:-1], arrays.num_rows, 1), wide)
    spread = lambda x: rows(
        ones, x[..., None, :].astype(wide), arrays.sizes, None, Form(wide, wide, False, config.block_m)
    )
    z = z if scale is None else z * spread(scale)
    return z if bias is None else z + spread(bias)
