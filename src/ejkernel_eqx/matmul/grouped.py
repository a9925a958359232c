"""`GroupedMatmul`: rows of consecutive groups, each multiplied by the matrix of its group."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from .._kernel import Kernel, Plan
from .._shapes import AnyArray, Float, Int, Numbers
from ..core.arguments import check_dtype
from ..core.plans import plan_of
from ..dispatch import PlatformLike
from ..quantised import QuantizedWeight
from .arguments import check_options, resolve, result_shape, RightSide
from .core import GROUPED
from .spec import GroupedSpec


class GroupedMatmul(Kernel):
    r"""Multiplies rows of consecutive groups by the matrix of their group, as the experts of a mixture do.

    With $E$ groups, of which group $g$ has the `group_sizes[g]` rows after those of the groups before,

    $$\mathrm{out}_m = \mathrm{act}(x_m W_g + b_g) \quad\text{for the rows } m \text{ of group } g,$$

    and with a gate, by a second right side $U$ or by columns of both in one,

    $$\mathrm{out}_m = \mathrm{act}(x_m W_g + b_g) \odot (x_m U_g + c_g + s),$$

    where the first product is clipped from above at `limit` and the second on both sides, $s$ is `up_shift`, and `"silu"` is
    $z\,\sigma(\alpha z)$. Groups may be empty. Rows past the last group are 0, whatever they are in `lhs`, with zero gradient. The work
    follows the rows and the groups that have any, and no array of the size of all groups times all rows is made. Sums are in float32
    (float64 for float64), in a fixed order.

    Platforms: Triton (`"triton"`, `"triton-interpret"`), XLA (`"xla"`; on TPU its own `ragged_dot`, the default there),
    Pallas on TPU (`"pallas"`, `"pallas-interpret"`). Pallas runs if it is requested by name, or where it has been
    measured to be faster. Differentiable in reverse mode in `lhs`, `rhs`, `bias`, `up` and `up_bias`; `platform="xla"`
    also supports forward mode and second derivatives. A right side in 8 bits and its scales are constants:
    differentiating them is an error.

    Codes of quantised right sides become numbers tile by tile, of those groups alone that have rows; they and their scales are constants. From 64
    rows a group on average on they become floats as a whole first, as the time is that of the products.

    Source: Gale et al., *MegaBlocks: Efficient Sparse Training with Mixture-of-Experts* (2022); the gate is that of Shazeer, *GLU Variants
    Improve Transformer* (2020), and its clipped form that of GPT-OSS.
    """

    operation: ClassVar[str] = "grouped_matmul"

    spec: GroupedSpec = eqx.field(static=True)
    preferred_element_type: str | None = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(
        self,
        activation: str | None = None,
        *,
        gate_up: str | None = None,
        alpha: float = 1.0,
        limit: float | None = None,
        up_shift: float = 0.0,
        transpose_rhs: bool = False,
        preferred_element_type: Any | None = None,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `activation`: of the product, or of the gate: `None`, `"silu"`, `"gelu"` (exact), `"gelu_tanh"` or `"relu"`.
        - `gate_up`: where the columns of gate and up are, if `rhs` has both. With `"halves"` the first half is the
            gate. With `"interleaved"` even columns are the gate. Default: `rhs` has those of one product.
        - `alpha`: factor of the argument of silu's sigmoid.
        - `limit`: the gate is at most this, the up product at most this in magnitude, before the activation.
        - `up_shift`: added to the up product. GPT-OSS: `"silu"`, `alpha=1.702`, `limit=7.0`, `up_shift=1.0`.
        - `transpose_rhs`: right sides are `[E, N, K]`.
        - `preferred_element_type`: dtype of the result; default that of `lhs`.
        - `platform`, `config`: as in [`ejkernel_eqx.CausalConv1d`][].
        - `tune_for`: `(lhs, rhs, group_sizes)` or [`ejkernel_eqx.inputs`][]`(...)`, arrays or `jax.ShapeDtypeStruct`s: fix the choice for
            these inputs now.
        """
        check_options(activation, gate_up, alpha, limit, up_shift, transpose_rhs)
        self.preferred_element_type = check_dtype("preferred_element_type", preferred_element_type)
        limit = None if limit is None else float(limit)
        self.spec = GroupedSpec(
            "", activation, gate_up, bool(transpose_rhs), float(alpha), limit, float(up_shift)
        )
        self.plan = plan_of(GroupedMatmul, self, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.GroupedMatmul")
    def __call__(
        self,
        lhs: Float[AnyArray, "*B M K"],
        rhs: AnyArray | QuantizedWeight,
        group_sizes: Int[Numbers, "*B E"],
        bias: Float[AnyArray, "E N"] | None = None,
        *,
        rhs_scale: Float[AnyArray, "E N"] | None = None,
        up: AnyArray | QuantizedWeight | None = None,
        up_bias: Float[AnyArray, "E N"] | None = None,
        up_scale: Float[AnyArray, "E N"] | None = None,
        row_indices: Int[Numbers, "*B M"] | None = None,
    ) -> Float[Array, "*B M N"]:
        """**Arguments:**

        - `lhs`: `[..., M, K]` with any number of leading axes; bf16, f16, f32 (f64 on XLA). The rows of a group follow one another.
        - `rhs`: `[E, K, N]` in the dtype of `lhs`, or int8, float8_e4m3fn or float8_e5m2 with `rhs_scale`; `[E, N, K]` with
            `transpose_rhs`. With `gate_up` it has `2 N` columns. Or an [`ejkernel_eqx.QuantizedWeight`][] of this shape whose inputs are `K`.
        - `group_sizes`: int `[..., E]`, the rows of each group, from 0 on; their sum is at most `M`.
        - `bias`: `[E, N]`, as many columns as `rhs`, any float dtype.
        - `rhs_scale`: `[E, N]`: a stored number of `rhs` stands for `scale * number`, with the scale of its group and column.
        - `up`: a second right side like `rhs`, multiplied by the activated first product; quantised, if `rhs` is, in the same format.
        - `up_bias`, `up_scale`: as `bias` and `rhs_scale`.
        - `row_indices`: int `[..., M]`: for each of the `M` rows of the result, its row of `lhs [..., L, K]`. The
            kernel gathers them as it loads. Any number of rows may take the same one. Values past the last group are
            ignored.

        **Returns:** `[..., M, N]` in the dtype of `lhs` or `preferred_element_type`.

        **Raises:** `ValueError` for invalid arguments, and `UnsupportedError` if no platform, or not the requested one, supports the call.
        """
        sides = RightSide(rhs, bias, rhs_scale), RightSide(up, up_bias, up_scale)
        arrays, spec = resolve(lhs, *sides, group_sizes, row_indices, self.spec, self.preferred_element_type)
        shape = result_shape(arrays, spec)
        if 0 in (*shape, *arrays.right.shape):  # no rows, columns or groups: nothing to launch
            return jnp.zeros(shape, spec.out_dtype)
        return GROUPED.call(self.plan, self.operation, arrays, spec)["out"]
