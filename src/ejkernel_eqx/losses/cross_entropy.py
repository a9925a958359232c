"""`cross_entropy`: the cross entropy of logits that are at hand."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._jitted import compiled_once
from .._shapes import AnyArray, Float, Int
from ..core.arguments import array, check_flags, wide
from . import statistics as by_token
from .arguments import labels_of, Options
from .checks import floats
from .token_statistics import LossAndMore, TokenStatistics


def cross_entropy(
    logits: Float[AnyArray, "*B V"],
    labels: Int[AnyArray, "*B"],
    token_weights: Float[AnyArray, "*B"] | None = None,
    *,
    reduction: str = "mean",
    logits_soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    temperature: float = 1.0,
    vocab_axis: str | None = None,
    return_statistics: bool = False,
) -> LossAndMore:
    """The cross entropy of logits that are at hand, with the equation of [`ejkernel_eqx.LinearCrossEntropy`][]. JAX differentiates it in any mode.
    On a mesh, logits whose vocabulary is split are not gathered.

    ```python
    loss, statistics = ejx.cross_entropy(logits, labels, return_statistics=True)
    ```

    **Arguments:**

    - `logits`: `[..., V]`, before soft cap and temperature; bf16, f16, f32, f64. They are read in float32 (float64 for float64).
    - `labels`, `token_weights`: `[...]`, as in `LinearCrossEntropy`.
    - `reduction`, `logits_soft_cap`, `label_smoothing`, `z_loss`, `ignore_index`, `temperature`: as in `LinearCrossEntropy`.
    - `vocab_axis`: inside `jax.shard_map`, the mesh axis that the vocabulary is split over.
    - `return_statistics`: also return [`ejkernel_eqx.TokenStatistics`][].

    **Returns:** the loss, a scalar, or `[...]` with `reduction="none"`; float32 (float64 for float64). With `return_statistics` the tuple `(loss,
    statistics)`. Raises `ValueError` for invalid arguments.
    """
    options = Options(
        reduction, logits_soft_cap, label_smoothing, z_loss, ignore_index, temperature, vocab_axis
    )
    check_flags(return_statistics=return_statistics)
    logits = array("logits", logits, "V")
    lead, words = logits.shape[:-1], logits.shape[-1] * by_token.devices(options.spec())
    if words == 0:
        raise ValueError(f"logits: expected at least one word [..., V], received shape {logits.shape}.")
    labels = labels_of(ignore_index, labels, lead, words)
    weights = None if token_weights is None else floats("token_weights", token_weights, lead, "the labels")
    # Compiled: outside of a program, the numbers of words cannot be made where the logits are.
    loss, results = compiled_once(_cross_entropy, options, return_statistics)(logits, labels, weights)
    return (loss, TokenStatistics.of(results, labels, lead)) if return_statistics else loss


@jax.named_scope("ejkernel_eqx.cross_entropy")
def _cross_entropy(
    options: Options, has_statistics: bool, logits: Array, labels: Array, weights: Array | None
) -> tuple[Array, dict[str, Array]]:
    spec, real = options.spec(has_statistics), labels >= 0
    logits = wide(logits)
    logits = jnp.where(real[..., None], logits, jnp.zeros_like(logits))
    logits, _ = by_token.curved(logits, spec.logits_soft_cap, spec.temperature)
    words = logits.shape[-1]
    where = jax.typeof(logits).sharding
    numbers = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1, out_sharding=where)
    part = by_token.part_of(logits, by_token.place_of(spec, labels, words)[..., None] == numbers, spec)
    words *= by_token.devices(spec)
    results = by_token.results_of(by_token.tokens_of(by_token.merged(part, spec), words), real, spec)
    results = {name: by_token.as_one(x, spec) for name, x in results.items()}
    losses = jnp.where(labels < words, results.pop("losses"), jnp.nan)
    weights = by_token.weights_of(labels, weights, losses.dtype)
    loss = weights * losses if options.reduction == "none" else jnp.sum(weights * losses)
    return (by_token.mean_of(loss, weights) if options.reduction == "mean" else loss), results
