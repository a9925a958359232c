"""`ResidualRMSNorm`: the sum of a residual and a branch, and its RMS norm, in one pass."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
from jax import Array

from .._kernel import Kernel, Plan
from .._shapes import AnyArray, Float
from ..core.arguments import is_finite
from ..core.plans import plan_of
from ..dispatch import PlatformLike
from .arguments import resolve_sum
from .core import KINDS
from .spec import COPIES, NormSpec


class ResidualRMSNorm(Kernel):
    r"""Adds the output of a branch to a residual, and returns the sum with its RMS norm (Zhang & Sennrich 2019,
    arXiv:1910.07467). In a pre-norm decoder the norm is the input of the next branch:

    $$s = x + b, \qquad y = \frac{s}{\sqrt{\mathrm{mean}(s^2) + \epsilon}} \odot w$$

    Each direction is one pass over memory. The backward adds the gradient of $s$ from after this norm to that through
    the norm. It keeps only $s$. Without a branch, $s$ is $x$ itself. Use it as the residual after the norm. Then both
    of its gradients are added in the same pass. Accumulates in float32 (float64 for float64); $s$ is rounded to the
    dtype of $x$ before the norm.

    Platforms and derivatives: as for [`ejkernel_eqx.CausalConv1d`][].
    """

    operation: ClassVar[str] = "residual_rms_norm"

    spec: NormSpec = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(
        self,
        eps: float = 1e-6,
        *,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `eps`: added to the mean square.
        - `platform`, `config`: as in [`ejkernel_eqx.CausalConv1d`][].
        - `tune_for`: `(x, branch, weight)` or [`ejkernel_eqx.inputs`][]`(...)`, arrays or `jax.ShapeDtypeStruct`s: fix the choice for these
            inputs now.
        """
        if not (is_finite(eps) and eps >= 0):
            raise ValueError(f"eps: expected a finite number >= 0, received {eps!r}.")
        self.spec = NormSpec(eps=float(eps), readers=1)
        self.plan = plan_of(ResidualRMSNorm, self, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.ResidualRMSNorm")
    def __call__(
        self,
        x: Float[AnyArray, "*B C"],
        branch: Float[AnyArray, "*B C"] | None = None,
        weight: Float[AnyArray, " C"] | None = None,
    ) -> tuple[Float[Array, "*B C"], Float[Array, "*B C"]]:
        """**Arguments:**

        - `x`: the residual, `[..., features]` with any number of leading axes; bf16, f16, f32 (f64 on XLA).
        - `branch`: what is added to it, in its shape and dtype; `None` for nothing.
        - `weight`: `[features]`, any float dtype; default ones.

        **Returns:** the norm of the sum, and the sum, `[..., features]` in the dtype of `x`. Raises the errors of [`ejkernel_eqx.CausalConv1d`][].
        """
        (out,), total = self.for_readers(1, x, branch, weight)
        return out, total

    def for_readers(
        self,
        readers: int,
        x: Float[AnyArray, "*B C"],
        branch: Float[AnyArray, "*B C"] | None = None,
        weight: Float[AnyArray, " C"] | None = None,
    ) -> tuple[tuple[Float[Array, "*B C"], ...], Float[Array, "*B C"]]:
        """A call whose norm several others read, such as the projections of queries, keys and values: each is given the norm as an array of
        its own, and the backward adds their gradients in the same pass. It is computed and stored once.

        **Arguments:** those of a call, and `readers`, 1 to 3.

        **Returns:** the norm for each reader, and the sum.
        """
        if readers not in range(1, len(COPIES) + 1):
            raise ValueError(
                f"readers: expected 1 to {len(COPIES)}, received {readers!r}; let others share the last one."
            )
        arrays = resolve_sum(x, branch, weight)
        if not arrays.x.size:  # nothing to launch
            return (arrays.x.reshape(x.shape),) * readers, arrays.x.reshape(x.shape)
        spec = dataclasses.replace(self.spec, readers=readers)
        results = KINDS[readers].call(self.plan, self.operation, arrays, spec)
        outs = tuple(results[name].reshape(x.shape) for name in COPIES[:readers])
        return outs, results["sum"].reshape(x.shape)
