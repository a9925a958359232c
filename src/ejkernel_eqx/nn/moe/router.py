"""The router's parameters, and its logits in float32."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ..._broadcast import like
from ..._signatures import Module
from ...core.arguments import accumulator
from ..few_rows import normed
from ..initial import uniform
from ..projection import product, promoted
from .routing import Choice, choose, Routing


class Router(Module):
    r"""Chooses the experts of each token: logits $x W^\top + b$, and what a `Choice` makes of them.

    Computes in float32 (float64 for float64): in fewer bits, experts that are nearly as good as others would change places.
    """

    weight: Array  # [N, E]
    bias: Array | None  # [N]
    e_score_correction_bias: Array | None  # [N], at least float32; no gradient reaches it
    norm: eqx.nn.RMSNorm | None  # [E], of what the experts receive
    scale: Array | None  # [E]
    expert_scale: Array | None  # [N]
    choice: Choice = eqx.field(static=True)

    def __init__(
        self,
        embed_dim: int,
        choice: Choice,
        *,
        use_bias: bool,
        use_correction_bias: bool,
        norm_eps: float | None,
        dtype: Any,
        key: Array,
    ):
        bound = 1 / math.sqrt(embed_dim)
        self.weight = uniform(key, (choice.num_experts, embed_dim), dtype, bound)
        self.bias = jnp.zeros(choice.num_experts, dtype) if use_bias else None
        wide = accumulator(jnp.dtype(dtype))
        self.e_score_correction_bias = jnp.zeros(choice.num_experts, wide) if use_correction_bias else None
        self.norm = self.scale = self.expert_scale = None
        if norm_eps is not None:
            self.norm = eqx.nn.RMSNorm(embed_dim, norm_eps, use_bias=False, dtype=wide)
            self.scale, self.expert_scale = jnp.ones(embed_dim, wide), jnp.ones(choice.num_experts, wide)
        self.choice = choice

    def for_experts(self, x: Array) -> Array:
        """What the experts receive of tokens `[..., E]`."""
        return normed(self.norm, x)

    def __call__(self, x: Array) -> Routing:
        """The routing of tokens `[..., E]`."""
        wide = accumulator(promoted(x, self.weight))
        x = x.astype(wide)
        if self.norm is not None and self.scale is not None:
            mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.norm.eps
            x = x * jax.lax.rsqrt(mean_square) * like(self.scale.astype(wide), x) / math.sqrt(x.shape[-1])
        with jax.default_matmul_precision("highest"):
            logits = product(x, self.weight, self.bias)
        routing = choose(logits, self.choice, self.e_score_correction_bias)
        if self.expert_scale is None:
            return routing
        scales = self.expert_scale.astype(wide)[routing.indices]
        return routing._replace(weights=routing.weights * scales)
