"""The float8 product in plain XLA, whose operands are the numbers of the codes in the dtype of the rows. JAX differentiates it."""

import jax.numpy as jnp
from jax import Array, lax

from ...core.arguments import accumulator
from ...core.platforms import Plain
from .. import xla as grouped
from ..xla_products import Form, rows
from .core import problem_of
from .reference import laid_out, merged, rows_of, weight_of
from .spec import ScaledArrays, ScaledSpec


def apply(arrays: ScaledArrays, spec: ScaledSpec) -> dict[str, Array]:
    """The result."""
    x = rows_of(arrays, spec)
    weight = weight_of(arrays, spec).astype(x.dtype)
    if arrays.sizes is not None:
        tile = grouped.default_config(problem_of("scaled_matmul", arrays, spec), None)
        form = Form(spec.out_dtype, x.dtype.name, True, tile.block_m)
        out = rows(x, merged(weight), arrays.sizes, None, form)
        return {"out": out.reshape(*out.shape[:-1], *weight.shape[-3:-1])}
    mapped = tuple(range(weight.ndim - 3))
    axes = (((x.ndim - 1,), (weight.ndim - 1,)), (mapped, mapped))
    # In the dtype of the rows if the result has it, so that the gradient multiplies in it, too; sums are in float32.
    out = jnp.dtype(spec.out_dtype)
    wide = out if out == x.dtype else accumulator(x.dtype)
    made = lax.dot_general(x, weight, axes, preferred_element_type=wide).astype(out)
    return {"out": laid_out(made, arrays)}


platform = Plain(apply)
