"""The experts' parameters, and all of them at once on rows in the order of the experts."""

import math
from typing import Any

import jax
from jax import Array

from ..._signatures import Module
from ...dispatch import PlatformLike
from ...matmul import GroupedMatmul
from ...quantised.dequantise import is_quantised
from ...weights.experts import experts as filled_experts
from ..activations import matmul_options
from ..parts import Parts


class Experts(Module):
    r"""Gated MLPs beside one another, $W_{down}(f(W_{gate} x) \odot W_{up} x)$: their parameters are those of all experts, stacked."""

    gate_proj: Array  # [N, F, E]
    up_proj: Array  # [N, F, E]
    down_proj: Array  # [N, E, F]
    gate_proj_bias: Array | None  # [N, F]
    up_proj_bias: Array | None  # [N, F]
    down_proj_bias: Array | None  # [N, E]
    hidden: GroupedMatmul
    out: GroupedMatmul

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        activation: str,
        use_bias: bool,
        platform: PlatformLike | None,
        dtype: Any,
        key: Array,
    ):
        parts = Parts(key, 6, dtype, None)
        drawn = lambda inputs, *shape: parts.uniform((num_experts, *shape), 1 / math.sqrt(inputs))
        self.gate_proj = drawn(embed_dim, hidden_dim, embed_dim)
        self.up_proj = drawn(embed_dim, hidden_dim, embed_dim)
        self.down_proj = drawn(hidden_dim, embed_dim, hidden_dim)
        self.gate_proj_bias = drawn(embed_dim, hidden_dim) if use_bias else None
        self.up_proj_bias = drawn(embed_dim, hidden_dim) if use_bias else None
        self.down_proj_bias = drawn(hidden_dim, embed_dim) if use_bias else None
        self.hidden = GroupedMatmul(transpose_rhs=True, platform=platform, **matmul_options(activation))
        self.out = GroupedMatmul(transpose_rhs=True, platform=platform)

    def __call__(self, rows: Array, sizes: Array) -> Array:
        """Rows `[M, E]` in the order of their experts, of which `sizes [N]` says how many each has; rows behind them give 0."""
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        # One product takes gate and up stored alike, `[N, out, in]`.
        alike = jax.tree.structure(gate) == jax.tree.structure(up)
        as_is = lambda w: is_quantised(w) and not w.transposed
        gate, up = (w if alike and as_is(w) else w.astype(rows.dtype) for w in (gate, up))
        down = down if as_is(down) else down.astype(rows.dtype)
        biases = {"bias": self.gate_proj_bias, "up_bias": self.up_proj_bias}
        hidden = self.hidden(rows, gate, sizes, up=up, **biases)
        return self.out(hidden, down, sizes, bias=self.down_proj_bias)

    _published = filled_experts
