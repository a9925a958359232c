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
from .core import SCALED
from .operation import ScaledMatmul
from .spec import GROUP, ScaledArrays, ScaledSpec

_BLOCKS = KINDS["fp8-block"]


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

    def float8_rows(self, x: Array, weight: Any, sizes: Array | None = None) -> Array:
        """Rows `[..., K]` times the weight, in float8."""
        return _product(self.kernel, self.grouped, x, jnp.asarray(weight.array), sizes)


@jax.custom_vjp
def _product(
    kernel: ScaledMatmul, grouped: GroupedMatmul | None, x: Array, weight: Array, sizes: Array | None
) -> Array:
    if sizes is not None:
        return kernel(x, quantised_array(weight, _BLOCKS), sizes)
    return _dense(kernel, x, weight, (False, False))


def _dense(kernel: ScaledMatmul, x: Array, weight: Array, turned: tuple[bool, bool]) -> Array:
    """Rows `[..., K]` times a weight of floats `[N, K]`; turned ones are `[K, M]` and `[K, N]`."""
    arrays = ScaledArrays(x if x.ndim > 1 else x[None], floats=weight)
    out = SCALED.call(kernel.plan, kernel.operation, arrays, ScaledSpec(x.dtype.name, GROUP, turned))["out"]
    return out if x.ndim > 1 else out[0]


def _forward(*given: Any) -> Any:
    return _product(*given), given


def _backward(given: Any, dy: Array) -> Any:
    kernel, grouped, x, weight, sizes = given
    if sizes is None:
        rows = lambda a: a.reshape(-1, a.shape[-1])
        dx = _dense(kernel, dy, weight, (False, True))
        dw = _dense(kernel, rows(dy), rows(x), (True, True))
    else:
        dx = kernel(dy, _transposed(quantised_array(weight, _BLOCKS)), sizes)
        zeros = jnp.zeros(weight.shape, x.dtype)
        (dw,) = jax.vjp(lambda w: grouped(x, w, sizes), zeros)[1](dy)
    return None, None, dx, dw.astype(weight.dtype), None


_product.defvjp(_forward, _backward)


def _transposed(weight: QuantizedWeight) -> QuantizedWeight:
    """The same numbers as the weight `[..., in, out]`, whose codes lie in this order."""
    turned = lambda x: jnp.swapaxes(x, -1, -2)
    return QuantizedWeight(
        turned(weight.codes), turned(weight.scales), None, None, weight.format, weight.dtype
    )
