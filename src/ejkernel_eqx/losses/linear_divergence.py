"""`LinearDivergence`: how far a projection to a vocabulary is from a teacher, where neither side's logits are held whole."""

from typing import Any, ClassVar

import equinox as eqx
import jax
from jax import Array

from .._kernel import Kernel, Plan
from .._shapes import AnyArray, Bool, Float
from ..core.plans import plan_of
from ..dispatch import PlatformLike
from .arguments import labels_of_mask, Options, resolve
from .core import call
from .teacher import Teacher


class LinearDivergence(Kernel):
    r"""The divergence of the distributions of a projection to a vocabulary from those of a teacher, over chunks of tokens. With $q =
    \mathrm{softmax}(l)$ of the logits of [`ejkernel_eqx.LinearCrossEntropy`][], and $p$ of the teacher

    $$\mathrm{KL}(a \,\|\, b) = \sum_v a_v \log \frac{a_v}{b_v}, \qquad m = \beta p + (1 - \beta) q$$

    | `divergence` | loss of a token, in nats |
    |---|---|
    | `"forward_kl"` | $\mathrm{KL}(p \,\|\, q)$: distillation (Hinton et al. 2015, arXiv:1503.02531) |
    | `"reverse_kl"` | $\mathrm{KL}(q \,\|\, p)$ (Gu et al. 2023, *MiniLLM*, arXiv:2306.08543) |
    | `"jensen_shannon"` | $\beta\, \mathrm{KL}(p \,\|\, m) + (1 - \beta)\, \mathrm{KL}(q \,\|\, m)$ (Agarwal et al. 2024, *GKD*, arXiv:2306.13649) |

    A temperature $\tau$ divides the logits of both sides. The loss is not multiplied by $\tau^2$, as Hinton et al. do to keep the size of
    gradients. Everything is computed in float32 (float64 for float64) from products of matrices in the dtype of the features. Gradients of
    a mean or a sum are computed together with it.

    On the Triton platform the logits of both sides are rounded to the dtype of `x`, but for a teacher's that are given, or made of float16 features.
    Float16 ends at 65,504, so float16 runs on XLA unless Triton is named. A teacher of the top k runs on XLA.

    Platforms: Triton (`"triton"`, `"triton-interpret"`; not for float64 or the top k), XLA (`"xla"`). Derivatives: reverse mode, in `x`, `weight`,
    `bias` and `token_weights`; none reaches the teacher.
    """

    operation: ClassVar[str] = "linear_divergence"

    options: Options = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(
        self,
        divergence: str = "forward_kl",
        *,
        beta: float = 0.5,
        temperature: float = 1.0,
        reduction: str = "mean",
        logits_soft_cap: float | None = None,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `divergence`: `"forward_kl"`, `"reverse_kl"` or `"jensen_shannon"`.
        - `beta`: of `"jensen_shannon"`, more than 0 and less than 1: the share of the teacher in the mixture.
        - `temperature`: divides the logits of both sides, after soft caps.
        - `reduction`: as in [`ejkernel_eqx.LinearCrossEntropy`][], over tokens; the sum over the vocabulary is part of the loss of a token.
        - `logits_soft_cap`: of the student's logits.
        - `platform`, `config`: as in [`ejkernel_eqx.CausalConv1d`][].
        - `tune_for`: `(x, weight, teacher)` or [`ejkernel_eqx.inputs`][]`(...)`: fix the choice for these inputs now.
        """
        self.options = Options(
            reduction, logits_soft_cap, temperature=temperature, divergence=divergence, beta=beta
        )
        self.plan = plan_of(LinearDivergence, self, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.LinearDivergence")
    def __call__(
        self,
        x: Float[AnyArray, "*B E"],
        weight: Float[AnyArray, "V E"],
        teacher: Teacher,
        bias: Float[AnyArray, " V"] | None = None,
        token_weights: Float[AnyArray, "*B"] | None = None,
        *,
        mask: Bool[AnyArray, "*B"] | None = None,
    ) -> Float[Array, "..."]:
        """**Arguments:**

        - `x`, `weight`, `bias`: the student's features and head, `[..., E]`, `[V, E]`, `[V]`, as in `LinearCrossEntropy`.
        - `teacher`: an [`ejkernel_eqx.Teacher`][] with the leading axes of `x`.
        - `token_weights`: `[...]`, any float dtype; default ones. They are differentiated as well.
        - `mask`: bool `[...]`, False for tokens that are left out, such as prompts and padding; all arrays may hold NaN there.

        **Returns:** the loss, a scalar, or `[...]` with `reduction="none"`; float32 (float64 for float64). Raises `ValueError` for invalid arguments.
        """
        if not isinstance(teacher, Teacher):
            raise ValueError(
                f"teacher: expected an ejx.Teacher, received {type(teacher).__name__}; Teacher.from_logits(logits) makes one."
            )
        labels = labels_of_mask(x, mask)
        arrays, spec = resolve(self.options, x, labels, weight, bias, token_weights, teacher=teacher)
        return call(self.plan, self.operation, arrays, spec, self.options.reduction, x.shape[:-1])[0]
