"""`GatedRMSNorm`: an RMS norm with a gate in one pass."""

from typing import Any, ClassVar

import equinox as eqx
import jax
from jax import Array

from .._kernel import Kernel, Plan
from .._shapes import AnyArray, Float
from ..core.plans import plan_of
from ..dispatch import PlatformLike
from .arguments import check_options, resolve
from .core import NORMALIZE
from .spec import NormSpec


class GatedRMSNorm(Kernel):
    r"""An RMS norm (Zhang & Sennrich 2019, arXiv:1910.07467) with a gate, in one pass over memory each way:

    $$y = \mathrm{norm}(x \odot \sigma(z)) \odot w \quad\text{or, with norm\_before\_gate,}\quad y = \mathrm{norm}(x) \odot w \odot \sigma(z), \qquad
      \mathrm{norm}(h) = \frac{h}{\sqrt{\mathrm{mean}(h^2) + \epsilon}}$$

    with $\sigma$ the activation and the mean over all features or over each group of them. Accumulates in float32 (float64 for float64). The
    backward keeps only the inputs.

    Platforms and derivatives: as for [`ejkernel_eqx.CausalConv1d`][].

    Source: Dao & Gu, *Transformers are SSMs* (2024), section 7.
    """

    operation: ClassVar[str] = "gated_rms_norm"

    spec: NormSpec = eqx.field(static=True)
    group_size: int | None = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(
        self,
        activation: str = "silu",
        norm_before_gate: bool = False,
        group_size: int | None = None,
        eps: float = 1e-6,
        *,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `activation`: activation of the gate, `"silu"` or `"sigmoid"`.
        - `norm_before_gate`: apply the gate after the norm; by default it is applied before.
        - `group_size`: number of features per group; each group is normalised separately. Default all features.
        - `eps`: added to the mean square.
        - `platform`, `config`: as in [`ejkernel_eqx.CausalConv1d`][].
        - `tune_for`: `(x, z, weight)` or [`ejkernel_eqx.inputs`][]`(...)`, arrays or `jax.ShapeDtypeStruct`s: fix the choice for these inputs now.
        """
        check_options(activation, group_size, eps)
        self.spec = NormSpec(activation, bool(norm_before_gate), float(eps))
        self.group_size = group_size
        self.plan = plan_of(GatedRMSNorm, self, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.GatedRMSNorm")
    def __call__(
        self,
        x: Float[AnyArray, "*B C"],
        z: Float[AnyArray, "*B C"] | None = None,
        weight: Float[AnyArray, " C"] | None = None,
    ) -> Float[Array, "*B C"]:
        """**Arguments:**

        - `x`: `[..., features]` with any number of leading axes; bf16, f16, f32 (f64 on XLA).
        - `z`: the gate, in the shape of `x`, any float dtype; `None` for no gate.
        - `weight`: `[features]`, or `[group_size]` shared by all groups, any float dtype; default ones.

        **Returns:** `[..., features]` in the dtype of `x`. Raises the errors of [`ejkernel_eqx.CausalConv1d`][].
        """
        arrays = resolve(x, z, weight, self.group_size)
        if not arrays.x.size:  # nothing to launch
            return arrays.x.reshape(x.shape)
        return NORMALIZE.call(self.plan, self.operation, arrays, self.spec)["out"].reshape(x.shape)
