"""`LinearCrossEntropy`: a projection to the vocabulary and the cross entropy of its logits, which are never held whole."""

from typing import Any, ClassVar

import equinox as eqx
import jax

from .._kernel import Kernel, Plan
from .._shapes import AnyArray, Float, Int
from ..core.plans import plan_of
from ..dispatch import PlatformLike
from .arguments import Options, resolve
from .core import call
from .token_statistics import LossAndMore, TokenStatistics


class LinearCrossEntropy(Kernel):
    r"""The cross entropy of a projection to a vocabulary, over chunks of tokens, so that the logits of all tokens are never held together:

    $$l = \frac{c}{\tau} \tanh\big((W x + b) / c\big), \qquad
      \mathrm{loss} = \mathrm{lse}(l) - (1 - \epsilon)\, l_y - \frac{\epsilon}{V} \sum_v l_v + \zeta\, \mathrm{lse}(l)^2,
      \qquad \mathrm{lse}(l) = \log \sum_v e^{l_v}$$

    with a soft cap $c$ (or none), a temperature $\tau$, label smoothing $\epsilon$ (Szegedy et al. 2016, arXiv:1512.00567) and a weight
    $\zeta$ of the z-loss (Chowdhery et al. 2022, arXiv:2204.02311, section 5). The loss and its gradients are computed
    in float32 (float64 for float64) from products of matrices in the dtype of `x`. The gradients of a mean or a sum are
    computed together with it, from the same logits, as Liger does (Hsu et al. 2024, arXiv:2410.10989). That takes three
    products of matrices in all. With `reduction="none"`, and for gradients of statistics, the backward computes the logits again.

    Tokens whose label is negative, or `ignore_index`, are left out of the loss, of its gradients and of the mean; their `x` may be NaN.

    A mesh may split the tokens over some of its axes, and the vocabulary over another one. Its devices then exchange a few numbers of each token in
    one collective, and add up the gradient of `x`.

    On the Triton platform logits are rounded to the dtype of `x`, except for those of the labels, which stay in float32. Float16 ends at 65,504, so
    float16 runs on XLA unless Triton is named.

    Platforms: Triton (`"triton"`, `"triton-interpret"`; not for float64), XLA (`"xla"`). Derivatives: reverse mode.
    """

    operation: ClassVar[str] = "linear_cross_entropy"

    options: Options = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(
        self,
        reduction: str = "mean",
        *,
        logits_soft_cap: float | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        ignore_index: int | None = None,
        temperature: float = 1.0,
        vocab_axis: str | None = None,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `reduction`: `"sum"` is the sum of the losses, each times its token's weight. `"mean"` is this sum over the
            sum of the weights, or 0 if that is 0. `"none"` is the weighted loss of each token, 0 for ignored ones.
        - `logits_soft_cap`: bounds logits smoothly to $(-c, c)$, as in Gemma 2.
        - `label_smoothing`: from 0 to 1, the share of the target that is spread evenly over the vocabulary.
        - `z_loss`: weight of the squared log-sum-exp, which keeps logits from drifting.
        - `ignore_index`: a label of tokens that are ignored, besides negative ones.
        - `temperature`: divides the logits, after the cap.
        - `vocab_axis`: the mesh axis that the rows of `weight` and `bias` are split over. Inside `jax.shard_map` they are then one device's rows,
            and labels count all. Explicit meshes need no name: there the type of `weight` says it.
        - `platform`, `config`: as in [`ejkernel_eqx.CausalConv1d`][].
        - `tune_for`: `(x, labels, weight)` or [`ejkernel_eqx.inputs`][]`(...)`, arrays or `jax.ShapeDtypeStruct`s: fix the choice for these
            inputs now.
        """
        self.options = Options(
            reduction, logits_soft_cap, label_smoothing, z_loss, ignore_index, temperature, vocab_axis
        )
        self.plan = plan_of(LinearCrossEntropy, self, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.LinearCrossEntropy")
    def __call__(
        self,
        x: Float[AnyArray, "*B E"],
        labels: Int[AnyArray, "*B"],
        weight: Float[AnyArray, "V E"],
        bias: Float[AnyArray, " V"] | None = None,
        token_weights: Float[AnyArray, "*B"] | None = None,
        *,
        return_statistics: bool = False,
    ) -> LossAndMore:
        """**Arguments:**

        - `x`: `[..., E]`, the features of tokens, with any number of leading axes; bf16, f16, f32, f64.
        - `labels`: integers `[...]` below `V`; negative ones are ignored. The loss of a label that is too large is NaN inside `jit`, where it
            cannot be checked.
        - `weight`: `[V, E]`, such as an embedding; any float dtype, cast to that of `x`.
        - `bias`: `[V]`, any float dtype.
        - `token_weights`: `[...]`, any float dtype; default ones. They are differentiated as well.
        - `return_statistics`: also return log-probability, entropy and more of each token, from the same logits.

        **Returns:** the loss, a scalar, or `[...]` with `reduction="none"`; float32 (float64 for float64). With `return_statistics` the tuple `(loss,
        statistics)`, [`ejkernel_eqx.TokenStatistics`][]. Raises `ValueError` for invalid arguments.
        """
        arrays, spec = resolve(
            self.options, x, labels, weight, bias, token_weights, has_statistics=return_statistics
        )
        lead = x.shape[:-1]
        loss, results = call(self.plan, self.operation, arrays, spec, self.options.reduction, lead)
        return (loss, TokenStatistics.of(results, arrays.labels, lead)) if return_statistics else loss
