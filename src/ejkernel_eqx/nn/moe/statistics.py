"""Defines what a router did with the tokens of a call, and what training makes of it: losses, the correction bias, noise."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..._shapes import AnyArray, Float, Int
from ..._signatures import Module
from ...core.arguments import wide
from ..arguments import check_key, check_numbers, read_array
from .routing import probabilities_of, Routing


class RouterStatistics(Module):
    """Sums over the tokens of a call, padding left out. They add up: those of several layers, batches or devices are the sums of theirs.

    - `tokens_per_expert`: how many tokens each expert got, int32 `[..., experts]`.
    - `probability_sums`: the sum of each expert's probability over the tokens, `[..., experts]`. The probability is the
        softmax of the logits. For a router with `scoring="sigmoid"` it is the scores divided by their sum.
    - `z_square_sum`: the sum of the squared logarithms of the softmax's denominator, `[...]`.
    - `num_tokens`: how many tokens there were, int32 `[...]`.

    Leading axes are layers.
    """

    tokens_per_expert: Array
    probability_sums: Array
    z_square_sum: Array
    num_tokens: Array

    @property
    def fractions(self) -> Array:
        """The fraction of its tokens that each expert got, `[..., experts]`; the sum is the number of experts that a token goes to."""
        return self.tokens_per_expert.astype(jnp.float32) / _at_least_one(self.num_tokens)[..., None]

    @property
    def imbalance(self) -> Array:
        """The tokens of the busiest expert over the mean of all, `[...]`: 1 if all got the same."""
        counts = self.tokens_per_expert.astype(jnp.float32)
        return jnp.max(counts, axis=-1) / jnp.maximum(jnp.mean(counts, axis=-1), 1e-9)  # of no tokens 0


def statistics_of(routing: Routing, scoring: str, real: Array | None) -> RouterStatistics:
    """The sums over all leading axes of a routing; `real` says which tokens count."""
    logits, indices = routing.logits, routing.indices
    experts = logits.shape[-1]
    probabilities = probabilities_of(logits, scoring).reshape(-1, experts)
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1)).reshape(-1)
    if real is None:
        count = jnp.asarray(squares.shape[0], jnp.int32)
    else:
        real = real.reshape(-1)
        count = jnp.sum(real, dtype=jnp.int32)
        # A sum with weights 0 would keep the NaN of padding.
        probabilities = jnp.where(real[:, None], probabilities, jnp.zeros_like(probabilities))
        squares = jnp.where(real, squares, jnp.zeros_like(squares))
        indices = jnp.where(real.reshape(*indices.shape[:-1], 1), indices, experts)
    return RouterStatistics(
        counts_of(indices, experts), jnp.sum(probabilities, axis=0), jnp.sum(squares), count
    )


def counts_of(indices: Array, count: int) -> Array:
    """Returns how often each of 0 to `count - 1` is among the integers, int32 `[count]`. As a sum over comparisons: no atomics."""
    found = indices.reshape(-1, 1) == jnp.arange(count, dtype=indices.dtype)[None]
    return jnp.sum(found, axis=0, dtype=jnp.int32)


def load_balancing_loss(statistics: RouterStatistics | Sequence[RouterStatistics]) -> Float[Array, ""]:
    r"""The load-balancing loss of Switch Transformers (Fedus et al. 2021, equations 4 to 6), as Mixtral, OLMoE and Qwen are trained with it:

    $$N \sum_{i=1}^{N} f_i P_i$$

    with the fraction $f_i$ of the tokens that go to expert $i$ of $N$, and the mean $P_i$ of its probability. Its gradient is through $P$ alone.
    With every expert equally likely it is the number of experts that a token goes to.

    **Arguments:**

    - `statistics`: of one layer, or of several (leading axes or a sequence). $f$ and $P$ are taken over the tokens of
        all layers, as in published code.

    **Returns:** a scalar, float32 (float64 for float64).
    """
    whole = _total(statistics)
    sums = whole.probability_sums
    means = sums / _at_least_one(whole.num_tokens).astype(sums.dtype)
    return jnp.sum(whole.fractions.astype(sums.dtype) * means) * sums.shape[-1]


def router_z_loss(statistics: RouterStatistics | Sequence[RouterStatistics]) -> Float[Array, ""]:
    r"""The router's z-loss (Zoph et al. 2022, *ST-MoE*, equation 5): the mean over tokens of $(\log \sum_i e^{\mathrm{logit}_i})^2$, which keeps
    logits small.

    **Arguments:**

    - `statistics`: as for [`load_balancing_loss`][ejkernel_eqx.nn.load_balancing_loss].

    **Returns:** a scalar, float32 (float64 for float64).
    """
    whole = _total(statistics)
    return whole.z_square_sum / _at_least_one(whole.num_tokens).astype(whole.z_square_sum.dtype)


def update_correction_bias(
    bias: Float[AnyArray, "*B N"], tokens_per_expert: Int[AnyArray, "*B N"], rate: float = 1e-3
) -> Float[Array, "*B N"]:
    r"""Balancing without a loss (Wang et al. 2024, *Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts*; DeepSeek-V3): after a step,
    experts with fewer tokens than the mean are ranked higher and those with more lower:

    $$b_i \leftarrow b_i + \mathrm{rate} \cdot \mathrm{sign}(\bar{c} - c_i)$$

    **Arguments:**

    - `bias`: the router's `e_score_correction_bias`, `[..., experts]`.
    - `tokens_per_expert`: `[..., experts]`, of [`RouterStatistics`][ejkernel_eqx.nn.RouterStatistics].
    - `rate`: DeepSeek-V3's is 0.001.

    **Returns:** the new bias, of the shape and dtype of the old. Put it in place with `equinox.tree_at`; no gradient reaches it, and an optimiser
    should leave it alone.
    """
    check_numbers(rate=rate)
    bias = read_array("bias", bias, "floats", "[..., experts]")
    counts = read_array("tokens_per_expert", tokens_per_expert, "integers", "[..., experts]")
    if counts.shape != bias.shape:
        raise ValueError(
            f"tokens_per_expert: expected the shape of bias, {bias.shape}, received {counts.shape}; give the statistics of the same layers."
        )
    found = counts.astype(jnp.float32)
    behind = jnp.mean(found, axis=-1, keepdims=True) - found
    return bias + jnp.asarray(rate, bias.dtype) * jnp.sign(behind).astype(bias.dtype)


def router_jitter(x: Float[AnyArray, "*B E"], amount: float, *, key: PRNGKeyArray) -> Float[Array, "*B E"]:
    r"""Noise on what a router sees, against experts that are never tried: $x \odot u$ with $u$ uniform in
    $[1 - \mathrm{amount}, 1 + \mathrm{amount}]$ (Fedus et al. 2021).

    **Arguments:**

    - `x`: features `[..., E]`. Mixtral adds the noise to what its experts see, too: `moe(ejx.nn.router_jitter(x, 0.01, key=key))`.
    - `amount`: from 0, for none, to 1.
    - `key`: a PRNG key.

    **Returns:** an array of the shape and dtype of `x`. In 16 bits, a small amount is less than the distance between
    numbers. There the product is rounded up or down at random, so that its mean is right.
    """
    check_numbers(amount=amount)
    if not 0 <= amount <= 1:
        raise ValueError(f"amount: expected a number from 0 to 1, received {amount!r}; 0 is no noise.")
    check_key(key)
    x = read_array("x", x, "floats", "[..., E]")
    product = wide(x)
    product *= jax.random.uniform(key, x.shape, product.dtype, 1 - amount, 1 + amount)
    return _rounded_at_random(product, x.dtype, jax.random.fold_in(key, 1))


def _rounded_at_random(x: Array, dtype: Any, key: Array) -> Array:
    """One of the two numbers of the dtype around each of `x`, the nearer one more often; its gradient is that of rounding to the nearest."""
    if x.dtype == dtype:
        return x
    nearest = x.astype(dtype)
    near, rest = lax.stop_gradient((nearest, x - nearest.astype(x.dtype)))
    step = jnp.nextafter(near, jnp.where(rest > 0, jnp.inf, -jnp.inf).astype(dtype)) - near
    is_other = jax.random.uniform(key, x.shape, x.dtype) * jnp.abs(step.astype(x.dtype)) < jnp.abs(rest)
    return nearest + jnp.where(is_other, step, jnp.zeros_like(step))


def _total(statistics: Any) -> RouterStatistics:
    """The sum over layers."""
    parts = [statistics] if isinstance(statistics, RouterStatistics) else list(statistics)
    if not parts or not all(isinstance(part, RouterStatistics) for part in parts):
        raise ValueError(
            f"statistics: expected RouterStatistics, or a sequence of them, received {statistics!r}; a layer returns them with "
            "return_statistics=True."
        )
    if len({part.tokens_per_expert.shape[-1] for part in parts}) > 1:
        raise ValueError(
            "statistics: expected layers with the same number of experts, received several numbers; take the loss of each kind and add them."
        )
    ranks = (1, 1, 0, 0)  # of the fields of one layer
    over_layers = lambda x, rank: jnp.sum(x, axis=tuple(range(x.ndim - rank)))
    sums = (map(over_layers, jax.tree.leaves(part), ranks) for part in parts)
    total: Any = (sum(arrays[1:], arrays[0]) for arrays in zip(*sums))
    return RouterStatistics(*total)


def _at_least_one(count: Array) -> Array:
    return jnp.maximum(count, 1).astype(jnp.float32)
