"""The routed part of a mixture of experts on one device."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from .dispatch import combined, dispatched, order_of
from .routing import Routing
from .statistics import RouterStatistics, statistics_of


def routed(router: Any, experts: Any, x: Array, real: Array | None) -> tuple[Array, RouterStatistics]:
    """The weighted sum of the experts of each token `[..., E]`, at least float32, and the statistics; `real [...]` says which tokens are none
    of padding."""
    routing = router(x)
    statistics = statistics_of(routing, router.choice.scoring, real)
    count, top_k = routing.logits.shape[-1], routing.indices.shape[-1]
    order = order_of(numbers_of(routing, real).reshape(-1), count)
    rows = dispatched(x.reshape(-1, x.shape[-1]), top_k, order)
    y = combined(experts(rows, order.sizes), routing.weights.reshape(-1, top_k), order)
    return y.reshape(x.shape), statistics


def numbers_of(routing: Routing, real: Array | None) -> Array:
    """The expert of each choice `[..., k]`; for padding the number of experts, which is none of them."""
    if real is None:
        return routing.indices
    return jnp.where(real[..., None], routing.indices, jnp.int32(routing.logits.shape[-1]))
