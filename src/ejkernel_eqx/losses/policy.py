"""Losses of supervised fine-tuning, of preferences and of policy gradients, from log-probabilities of tokens.

[`ejkernel_eqx.LinearCrossEntropy`][] and [`ejkernel_eqx.cross_entropy`][] return these with `return_statistics=True`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._shapes import AnyArray, Bool, Float
from ..core.arguments import array, check_flags, read_array, wide
from .checks import check_number, floats
from .statistics import mean_of

LogProbs = Float[AnyArray, "*B T"]
OfSequences = Float[AnyArray, "*B"]


def sft_loss(log_probs: LogProbs, token_weights: LogProbs | None = None) -> Float[Array, ""]:
    r"""Supervised fine-tuning, $-\sum_t w_t \log p_t \,/ \sum_t w_t$, where the weights choose the answers among the tokens, or weigh them
    (Ouyang et al. 2022, arXiv:2203.02155, step 1). `LinearCrossEntropy` has the same mean without log-probabilities.

    **Arguments:**

    - `log_probs`: `[..., T]`, of the labels, any float dtype.
    - `token_weights`: `[..., T]`, any float dtype; tokens with a weight of 0 are left out. Default ones.

    **Returns:** a scalar, float32 (float64 for float64); 0 if all weights are 0.
    """
    log_probs = wide(array("log_probs", log_probs, "T"))
    weights = jnp.ones_like(log_probs) if token_weights is None else token_weights
    weights = wide(floats("token_weights", weights, log_probs.shape, "log_probs"))
    losses = jnp.where(weights == 0, jnp.zeros_like(weights), -weights * log_probs)
    return mean_of(jnp.sum(losses), weights)


def dpo_loss(
    chosen: OfSequences,
    rejected: OfSequences,
    reference_chosen: OfSequences,
    reference_rejected: OfSequences,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Float[Array, ""]:
    r"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, equation 7): the mean over pairs of

    $$-(1 - \epsilon) \log \sigma(h) - \epsilon \log \sigma(-h), \qquad
      h = \beta \Big(\log \frac{\pi(y_w)}{\pi_\mathrm{ref}(y_w)} - \log \frac{\pi(y_l)}{\pi_\mathrm{ref}(y_l)}\Big)$$

    where $\epsilon$ is the share of preferences that are assumed to be wrong (Mitchell 2023, *A note on DPO with noisy preferences*).

    **Arguments:**

    - `chosen`, `rejected`: `[...]`, log-probabilities of whole answers: sums of `log_probs` over their tokens.
    - `reference_chosen`, `reference_rejected`: `[...]`, those of the reference model, which gets no gradient.
    - `beta`: how strongly the policy is held to the reference.
    - `label_smoothing`: $\epsilon$, from 0 to 0.5.

    **Returns:** a scalar, float32 (float64 for float64).
    """
    check_number("beta", beta, 0, math.inf)
    check_number("label_smoothing", label_smoothing, 0, 0.5)
    chosen = wide(array("chosen", chosen, "", 0))
    others = {
        "rejected": rejected,
        "reference_chosen": reference_chosen,
        "reference_rejected": reference_rejected,
    }
    rejected, *references = (wide(floats(name, x, chosen.shape, "chosen")) for name, x in others.items())
    reference = jax.lax.stop_gradient(references[0] - references[1])
    margin = beta * (chosen - rejected - reference)
    losses = (1 - label_smoothing) * jax.nn.log_sigmoid(margin) + label_smoothing * jax.nn.log_sigmoid(
        -margin
    )
    return -jnp.mean(losses)


def group_advantages(
    rewards: Float[AnyArray, "*B G"], *, normalize: bool = True, eps: float = 1e-4
) -> Float[Array, "*B G"]:
    r"""How much better each answer is than the others to the same prompt (Shao et al. 2024, arXiv:2402.03300, section 4.1.2):
    $(r_i - \mathrm{mean}(r)) / (\mathrm{std}(r) + \epsilon)$ with the standard deviation of a sample.

    **Arguments:**

    - `rewards`: `[..., G]`, of at least 2 answers to each prompt.
    - `normalize`: whether to divide by the standard deviation; without, as Liu et al. 2025 do (*Dr. GRPO*, arXiv:2503.20783).
    - `eps`: added to it.

    **Returns:** `[..., G]`, float32 (float64 for float64), without a gradient.
    """
    check_flags(normalize=normalize)
    rewards = jax.lax.stop_gradient(wide(array("rewards", rewards, "G")))
    if rewards.shape[-1] < 2:
        raise ValueError(
            f"rewards: expected at least 2 answers to each prompt [..., G], received shape {rewards.shape}; sample more."
        )
    advantages = rewards - jnp.mean(rewards, -1, keepdims=True)
    return advantages / (jnp.std(rewards, -1, keepdims=True, ddof=1) + eps) if normalize else advantages


def grpo_loss(
    log_probs: LogProbs,
    advantages: OfSequences,
    mask: Bool[AnyArray, "*B T"],
    *,
    old_log_probs: LogProbs | None = None,
    reference_log_probs: LogProbs | None = None,
    clip: float | tuple[float, float] = 0.2,
    kl_weight: float = 0.0,
    aggregation: str = "sequence",
) -> Float[Array, ""]:
    r"""Group relative policy optimisation (Shao et al. 2024, *DeepSeekMath*, arXiv:2402.03300, equation 3): the mean of

    $$-\min\big(\rho A,\; \mathrm{clip}(\rho, 1 - \epsilon_\mathrm{low}, 1 + \epsilon_\mathrm{high})\, A\big)
      + \beta \Big(\frac{\pi_\mathrm{ref}}{\pi} - \log \frac{\pi_\mathrm{ref}}{\pi} - 1\Big), \qquad
      \rho = \frac{\pi}{\pi_\mathrm{old}}$$

    over the tokens of answers. The last term is Schulman's estimator k3 of $\mathrm{KL}(\pi \,\|\, \pi_\mathrm{ref})$.

    **Arguments:**

    - `log_probs`: `[..., T]`, of the sampled tokens, of the policy that is trained.
    - `advantages`: `[...]`, of each answer, such as those of [`ejkernel_eqx.group_advantages`][].
    - `mask`: bool `[..., T]`, True for tokens of answers. Other arrays may hold NaN elsewhere.
    - `old_log_probs`: `[..., T]`, of the policy that sampled; default `log_probs`, as in the first step after sampling.
    - `reference_log_probs`: `[..., T]`, of the model that the policy is held to, if `kl_weight` is not 0.
    - `clip`: $\epsilon$, or the tuple $(\epsilon_\mathrm{low}, \epsilon_\mathrm{high})$ (*DAPO*, arXiv:2503.14476, section 3.1).
    - `kl_weight`: $\beta$.
    - `aggregation`: `"sequence"` is the mean over answers of the mean over their tokens, as in the paper. `"token"` is the mean over all tokens,
        as in DAPO (section 3.3).

    **Returns:** a scalar, float32 (float64 for float64); no gradient reaches the other models or the advantages. Answers without tokens count as 0.
    """
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    check_number("clip", low, 0, 1)
    check_number("clip", high, 0, math.inf)
    check_number("kl_weight", kl_weight, 0, math.inf)
    if aggregation not in ("sequence", "token"):
        raise ValueError(f"aggregation: expected 'sequence' or 'token', received {aggregation!r}.")
    if kl_weight and reference_log_probs is None:
        raise ValueError(
            f"reference_log_probs: expected an array with kl_weight={kl_weight!r}, received None; give both."
        )
    mask = read_array("mask", mask, "booleans", "[..., T]")
    advantages = jax.lax.stop_gradient(
        wide(floats("advantages", advantages, mask.shape[:-1], "mask[..., 0]"))
    )

    def of_answers(name: str, x: Any) -> Array:
        x = wide(floats(name, x, mask.shape, "mask"))
        return jnp.where(mask, x, jnp.zeros_like(x))

    policy = of_answers("log_probs", log_probs)
    old = policy if old_log_probs is None else of_answers("old_log_probs", old_log_probs)
    ratio = jnp.exp(policy - jax.lax.stop_gradient(old))
    advantages = advantages[..., None]
    losses = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)
    if reference_log_probs is not None:
        change = jax.lax.stop_gradient(of_answers("reference_log_probs", reference_log_probs)) - policy
        losses += kl_weight * (jnp.exp(change) - change - 1)
    weights = mask.astype(losses.dtype)
    if aggregation == "sequence":
        weights = weights / jnp.maximum(jnp.sum(weights, -1, keepdims=True), 1)
        return jnp.sum(weights * losses) / max(weights[..., 0].size, 1)
    return mean_of(jnp.sum(weights * losses), weights)
