"""The activation xIELU, which has parameters."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._signatures import Module
from ..core.arguments import wide


class XIELU(Module):
    r"""The activation xIELU (Huang and Schlag 2024, arXiv:2411.13010), with $a = \mathrm{softplus}(\alpha_p)$ and
    $b = \beta + \mathrm{softplus}(\alpha_n)$: $a x^2 + \beta x$ for $x > 0$, otherwise $b\,(e^{\min(x, \epsilon)} - 1 - x) + \beta x$."""

    alpha_p: Array  # [1]
    alpha_n: Array  # [1]
    beta: Array  # [], not trained
    eps: Array  # [], not trained

    def __init__(self, dtype: Any):
        filled = lambda value, shape: jnp.full(shape, value, dtype)
        self.alpha_p = filled(math.log(math.expm1(0.8)), 1)
        self.alpha_n = filled(math.log(math.expm1(0.3)), 1)
        self.beta, self.eps = filled(0.5, ()), filled(-1e-6, ())

    def __call__(self, x: Array) -> Array:
        """Computes in float32 or wider. Returns an array of the shape and dtype of `x`."""
        y = wide(x)
        beta, eps = (jax.lax.stop_gradient(wide(a)) for a in (self.beta, self.eps))
        a, b = jax.nn.softplus(wide(self.alpha_p[0])), beta + jax.nn.softplus(wide(self.alpha_n[0]))
        curved = jnp.where(y > 0, a * y * y, b * (jnp.expm1(jnp.minimum(y, eps)) - y))
        return (curved + beta * y).astype(x.dtype)
