"""Products of training in float8: a weight of floats, whose product and gradients multiply codes."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ..._shapes import AnyArray
from ...quantised.quantise import KINDS, quantised_array
from ...quantised.weight import QuantizedWeight
from ..grouped import GroupedMatmul
from .operation import ScaledMatmul


class Float8Weight(eqx.Module):
    r"""A weight of floats that layers multiply in float8, in training too ([`ejkernel_eqx.with_float8_training`][]). It
    stands where the array stood. With the cotangent $dy$ of the result:

    $$y = R(x) \, B(W)^\top, \qquad dx = R(dy) \, B(W), \qquad dW = R(dy^\top) \, B(x^\top)^\top$$

    $R$ rounds to float8_e4m3fn with a scale for each row and 128 numbers, and $B$ with a scale for each block of 128 x 128. A scale is the
    largest number of its group over 448. The products are those of [`ejkernel_eqx.ScaledMatmul`][].

    Of experts, `[N, out, in]`, the gradient of the weight is that of [`ejkernel_eqx.GroupedMatmul`][] in the dtype of the rows, as few
    groups of 128 rows belong to one expert.

    - `array`: the floats, `[..., out, in]`. Gradients, optimisers and weight decay take them as before.
    - `kernel`: the `ScaledMatmul`.
    - `grouped`: of experts the `GroupedMatmul`, else `None`.
    """

    array: AnyArray
    kernel: ScaledMatmul
    grouped: GroupedMatmul | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def astype(self, dtype: Any) -> Array:
        """The array in this dtype."""
        return jnp.asarray(self.array).astype(dtype)

    def __jax_array__(self) -> Array:
        return jnp.asarray(self.array)

    def __matmul__(self, x: Any) -> Array:
        return self.array @ x

    def float8_rows(self, x: Array, weight: "Float8Weight", sizes: Array | None = None) -> Array:
        """Rows `[..., K]` times the weight, in float8."""
        return _product(self.kernel, self.grouped, x, jnp.asarray(weight.array), sizes)


@jax.custom_vjp
def _product(
    kernel: ScaledMatmul, grouped: GroupedMatmul | None, x: Array, weight: Array, sizes: Array | None
) -> Array:
    return kernel(x, _blocks(weight), sizes)


def _forward(kernel: Any, grouped: Any, x: Array, weight: Array, sizes: Array | None) -> Any:
    blocks = _blocks(weight)
    # Dense products keep codes of the rows only.
    kept = x if sizes is not None else _blocks(x.reshape(-1, x.shape[-1]).T)
    like = jnp.empty((0,), weight.dtype)
    return kernel(x, blocks, sizes), (kernel, grouped, kept, _transposed(blocks), sizes, like)


def _backward(saved: Any, dy: Array) -> Any:
    kernel, grouped, kept, transposed, sizes, like = saved
    dx = kernel(dy, transposed, sizes)
    if sizes is None:
        dw = kernel(dy.reshape(-1, dy.shape[-1]).T, kept)
    else:
        zeros = jnp.zeros((*transposed.shape[:-2], dy.shape[-1], kept.shape[-1]), kept.dtype)
        (dw,) = jax.vjp(lambda w: grouped(kept, w, sizes), zeros)[1](dy)
    return None, None, dx, dw.astype(like.dtype), None


_product.defvjp(_forward, _backward)


def _blocks(x: Array) -> QuantizedWeight:
    return quantised_array(x, KINDS["fp8-block"])


def _transposed(weight: QuantizedWeight) -> QuantizedWeight:
    """The same numbers as the weight `[..., in, out]`, whose codes lie in this order."""
    turned = lambda x: jnp.swapaxes(x, -1, -2)
    return QuantizedWeight(
        turned(weight.codes), turned(weight.scales), None, None, weight.format, weight.dtype
    )
