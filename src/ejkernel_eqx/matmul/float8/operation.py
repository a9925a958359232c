"""`ScaledMatmul`: rows by a float8 weight, in float8."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array, lax

from ..._kernel import Kernel, Plan
from ..._shapes import AnyArray, Float, Int
from ...core.arguments import array, check_dtype, fitting, is_finite
from ...core.plans import plan_of
from ...dispatch import PlatformLike
from ...quantised import QuantizedWeight
from ...quantised.numbers import floats
from ..arguments import sizes_of_groups
from .core import SCALED
from .spec import blocks_of, GROUP, ScaledArrays, ScaledSpec


class ScaledMatmul(Kernel):
    r"""Multiplies rows by a float8 weight, in float8. Rows are quantised, too. So tensor cores multiply twice as many
    numbers as in bfloat16.

    $$\mathrm{out}_{mn} = \sum_g s_{mg} \, t_{ng} \sum_{k \in g} \mathrm{e4m3}\!\left(\frac{x_{mk}}{s_{mg}}\right) c_{nk}, \qquad
      s_{mg} = \frac{\max_{k \in g} |x_{mk}|}{448}$$

    with the codes $c$ and scales $t$ of the weight, and groups $g$ of 128 features, as in DeepSeek-V3
    (arXiv:2412.19437, section 3.3). Each token and group has a scale of its own, or all share the scale `x_scale`.
    Tensor cores sum over a group, and Hopper's keep about 14 bits. These sums are scaled and added up in float32.

    With `group_sizes`, rows of consecutive groups are each multiplied by the weight of their group, as in [`ejkernel_eqx.GroupedMatmul`][];
    rows past the last group are 0.

    It is for many rows, as in prefill. The time of few rows is that of reading the weight. XLA multiplies the numbers
    that the codes stand for, rounded to the dtype of the rows.

    The gradient of `x` is that of a product without rounding, with the numbers of the weight, in the dtype of `x`. The
    weight and `x_scale` are constants.

    Platforms: Triton (`"triton"`, on GPUs from compute capability 8.9, and `"triton-interpret"`), XLA (`"xla"`). Differentiable in reverse mode
    in `x`; `platform="xla"` also supports forward mode.
    """

    operation: ClassVar[str] = "scaled_matmul"

    preferred_element_type: str | None = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(
        self,
        *,
        preferred_element_type: Any | None = None,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `preferred_element_type`: dtype of the result; default that of `x`.
        - `platform`, `config`: as in [`ejkernel_eqx.CausalConv1d`][].
        - `tune_for`: `(x, weight)` or [`ejkernel_eqx.inputs`][]`(...)`, arrays or `jax.ShapeDtypeStruct`s: fix the choice for these inputs now.
        """
        self.preferred_element_type = check_dtype("preferred_element_type", preferred_element_type)
        self.plan = plan_of(ScaledMatmul, self, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.ScaledMatmul")
    def __call__(
        self,
        x: Float[AnyArray, "*B K"],
        weight: QuantizedWeight,
        group_sizes: Int[AnyArray, "*C E"] | None = None,
        *,
        x_scale: Float[AnyArray, ""] | float | None = None,
    ) -> Float[Array, "*B N"]:
        """**Arguments:**

        - `x`: `[..., K]` with any number of leading axes, the rows; bf16, f16, f32 (f64 on XLA).
        - `weight`: `[N, K]` in float8_e4m3fn, with a scale per block of any rows by a multiple of 128 columns, per channel or for all;
            with `group_sizes` `[E, N, K]`.
        - `group_sizes`: integers `[..., E]`, the number of rows of each group in `x [..., M, K]`, one group after the
            other. Their sum is at most M.
        - `x_scale`: a number above 0, the scale of all rows, such as a published `input_scale` or `jnp.abs(x).max() /
            448`. Numbers larger than 448 times the scale are clipped. Default: a scale for each row and 128 features.

        **Returns:** `[..., N]` in the dtype of `x` or `preferred_element_type`. A row with NaN or infinities is NaN.

        **Raises:** `ValueError` for invalid arguments, and `UnsupportedError` if no platform, or not the requested one, supports the call.
        """
        x = array("x", x, "K")
        _check_weight(weight, x.shape[-1], group_sizes is not None)
        if x_scale is not None:
            if isinstance(x_scale, int | float) and not (is_finite(x_scale) and x_scale > 0):
                raise ValueError(f"x_scale: expected a number above 0, received {x_scale!r}.")
            x_scale = fitting("x_scale", jnp.asarray(x_scale), (), "")
            x_scale = lax.stop_gradient(x_scale).astype(jnp.float32)
        if group_sizes is not None:
            x = array("x", x, "M K")
            group_sizes = sizes_of_groups(group_sizes, (*x.shape[:-2], weight.shape[0]), x.shape[-2])
        lead, dtype = x.shape[:-1], self.preferred_element_type or x.dtype.name
        if 0 in lead:  # no rows: nothing to launch
            return jnp.zeros((*lead, weight.shape[-2]), dtype)
        arrays, columns = _arranged(x if x.ndim > 1 else x.reshape(1, -1), weight, x_scale)
        arrays = arrays._replace(sizes=group_sizes)
        out = SCALED.call(self.plan, self.operation, arrays, ScaledSpec(dtype, columns))["out"]
        return out.reshape(*lead, weight.shape[-2])


def _arranged(x: Array, weight: QuantizedWeight, x_scale: Array | None) -> tuple[ScaledArrays, int]:
    """The arrays of a call, and the columns of the weight that share a scale."""
    form, (*lead, height, width) = weight.format, weight.shape
    rows, columns = blocks_of((height, width), form.block)
    scales = floats(jnp.asarray(weight.scales), form.scale)
    if weight.tensor_scale is not None:
        scales = scales * floats(jnp.asarray(weight.tensor_scale), "float32")[..., None, None]
    if rows == 1 and form.block[0] > 1:  # blocks that do not divide the rows: a scale for each of them
        scales = jnp.repeat(scales, form.block[0], -2)[..., :height, :]
    codes = jnp.asarray(weight.codes).reshape(*lead, height // rows, rows, width)
    return ScaledArrays(x, codes, scales, x_scale), columns


def _check_weight(weight: Any, features: int, is_grouped: bool) -> None:
    known = isinstance(weight, QuantizedWeight)
    if not known or weight.format.element != "float8_e4m3fn" or weight.format.block[1] % GROUP:
        received = repr(weight) if known else type(weight).__name__
        raise ValueError(
            f"weight: expected an ejx.QuantizedWeight in float8_e4m3fn with a scale per block of a multiple of {GROUP} columns, or per channel, "
            f"received {received}; quantise it by ejx.quantise(weight, 'fp8-block'), or multiply by weight.astype(x.dtype)."
        )
    is_right = weight.ndim == 2 + is_grouped and weight.shape[-1] == features
    if not is_right or weight.transposed or 0 in weight.shape:
        raise ValueError(
            f"weight: expected [{'E, ' * is_grouped}N, {features}], the features of x, not transposed, received {weight!r}; weights are "
            "[out, in], as in equinox.nn.Linear."
        )
