"""The router's parameters, and its logits in float32."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ...core.arguments import accumulator
from ..initial import uniform
from ..projection import product, promoted
from .routing import Choice, choose, Routing


class Router(eqx.Module):
    r"""Chooses the experts of each token: logits $x W^\top + b$, and what a `Choice` makes of them.

    Computes in float32 (float64 for float64): in fewer bits, experts that are nearly as good as others would change places.
    """

    weight: Array  # [N, E]
    bias: Array | None  # [N]
    e_score_correction_bias: Array | None  # [N], at least float32; no gradient reaches it
    choice: Choice = eqx.field(static=True)

    def __init__(
        self,
        embed_dim: int,
        choice: Choice,
        *,
        use_bias: bool,
        use_correction_bias: bool,
        dtype: Any,
        key: Array,
    ):
        bound = 1 / math.sqrt(embed_dim)
        self.weight = uniform(key, (choice.num_experts, embed_dim), dtype, bound)
        self.bias = jnp.zeros(choice.num_experts, dtype) if use_bias else None
        wide = accumulator(jnp.dtype(dtype))
        self.e_score_correction_bias = jnp.zeros(choice.num_experts, wide) if use_correction_bias else None
        self.choice = choice

    def __call__(self, x: Array) -> Routing:
        """The routing of tokens `[..., E]`."""
        wide = accumulator(promoted(x, self.weight))
        with jax.default_matmul_precision("highest"):
            logits = product(x.astype(wide), self.weight, self.bias)
        return choose(logits, self.choice, self.e_score_correction_bias)
