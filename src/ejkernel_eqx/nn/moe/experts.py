"""The experts' parameters, and all of them at once on rows in the order of the experts."""

import math
from typing import Any

import jax
from jax import Array

from ..._shapes import is_symbolic
from ..._signatures import Module
from ...dispatch import PlatformLike
from ...matmul import GroupedMatmul
from ...matmul.arguments import MANY_ROWS
from ...matmul.epilogue import finished
from ...quantised.dequantise import is_quantised
from ...weights.experts import experts as filled_experts
from ..activations import matmul_options
from ..parts import Parts
from ..projection import in_float8


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
        weights: tuple[Any, ...] = (self.gate_proj, self.up_proj, self.down_proj)
        gate, up, down = weights
        if self._are_in_float8(rows):
            gate, up = gate.float8_rows(rows, gate, sizes), up.float8_rows(rows, up, sizes)
            return down.float8_rows(finished(gate, up, self.hidden.spec), down, sizes)
        # One product takes gate and up stored alike, `[N, out, in]`.
        alike = jax.tree.structure(gate) == jax.tree.structure(up)
        as_is = lambda w: is_quantised(w) and not w.transposed
        gate, up = (w if alike and as_is(w) else w.astype(rows.dtype) for w in (gate, up))
        down = down if as_is(down) else down.astype(rows.dtype)
        biases = {"bias": self.gate_proj_bias, "up_bias": self.up_proj_bias}
        hidden = self.hidden(rows, gate, sizes, up=up, **biases)
        return self.out(hidden, down, sizes, bias=self.down_proj_bias)

    def _are_in_float8(self, rows: Array) -> bool:
        """Returns whether all weights multiply these rows in float8, which no bias follows."""
        weights: tuple[Any, ...] = (self.gate_proj, self.up_proj, self.down_proj)
        if self.gate_proj_bias is not None or not all(is_quantised(w) and not w.transposed for w in weights):
            return False
        # Of an average expert. Symbolic sizes are no fewer than any number.
        many = is_symbolic(rows.shape[-2]) or rows.shape[-2] > MANY_ROWS * self.gate_proj.shape[0]
        return many and all(in_float8(rows, w) for w in weights)

    _published = filled_experts
