"""The two passes of a platform that goes over chunks of tokens, `over_chunks(arrays, spec, config, cotangents) -> results, gradients`.

A reduced loss has one cotangent. So its gradients, but for that factor, are computed with the loss, from the same logits, and kept for the
backward. Otherwise the backward computes the logits again.

`over_chunks` returns what `statistics.results_of` says of all tokens; with `cotangents [B, M, N]` of some of it, also the gradients of x, weight
and bias by name.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ..core.arguments import accumulator
from .chunks import Named
from .spec import LossArrays, LossSpec
from .statistics import weights_of

OverChunks = Callable[[LossArrays, LossSpec, Any, Named], tuple[Named, Named]]


def forward(
    over_chunks: OverChunks, arrays: LossArrays, spec: LossSpec, config: Any, *, save: bool = True
) -> Named:
    """`out`, the statistics of a call that has them, and what the backward needs of a sum of one row of the call."""
    weights = weights_of(arrays.labels, arrays.token_weights, accumulator(arrays.x.dtype))
    is_kept = save and spec.reduction == "sum" and arrays.x.shape[0] == 1
    results, grads = over_chunks(arrays, spec, config, {"losses": weights} if is_kept else {})
    losses = results.pop("losses")
    out = weights * losses
    results["out"] = jnp.sum(out, (1, 2)) if spec.reduction == "sum" else out
    if not is_kept:
        return results
    of_row = {f"d{name}": x[None] for name, x in grads.items() if name != "x"}
    return results | {"losses": losses, "dx": grads["x"], **of_row}


def backward(
    over_chunks: OverChunks, arrays: LossArrays, spec: LossSpec, config: Any, saved: Named, cotangents: Named
) -> Named:
    """The gradients of all float arrays, from logits that are computed again; those of weight and bias are summed over all rows."""
    weights = weights_of(arrays.labels, arrays.token_weights, accumulator(arrays.x.dtype))
    factor = cotangents.get("out", jnp.zeros_like(weights[:, 0, 0])).astype(weights.dtype)
    each = factor[:, None, None] if factor.ndim == 1 else factor
    others = {
        name: x.astype(weights.dtype) for name, x in cotangents.items() if name not in ("out", "margin")
    }
    others |= {"losses": weights * each} if "out" in cotangents else {}
    spec = dataclasses.replace(spec, has_statistics="entropy" in others)
    results, grads = over_chunks(arrays, spec, config, others)
    return grads | ({} if arrays.token_weights is None else {"token_weights": each * results["losses"]})
