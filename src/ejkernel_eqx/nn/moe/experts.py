"""The experts' parameters, and all of them at once on rows in the order of the experts."""

import math
from typing import Any

import equinox as eqx
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
from ..projection import in_float8, project


class Experts(Module):
    r"""MLPs beside one another, $W_{down}(f(W_{gate} x) \odot W_{up} x)$ or without a gate $W_{down}\,f(W_{up} x)$: their parameters are those of
    all experts, stacked. With `latent_dim`, `E` is that width, and two projections that all experts share lead there and back."""

    gate_proj: Array | None  # [N, F, E]
    up_proj: Array  # [N, F, E]
    down_proj: Array  # [N, E, F]
    fc1_latent_proj: eqx.nn.Linear | None  # [E, width of the tokens]
    fc2_latent_proj: eqx.nn.Linear | None  # [width of the tokens, E]
    gate_proj_bias: Array | None  # [N, F]
    up_proj_bias: Array | None  # [N, F]
    down_proj_bias: Array | None  # [N, E]
    hidden: GroupedMatmul
    out: GroupedMatmul
    is_squared: bool = eqx.field(static=True)

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        activation: str,
        gated: bool,
        latent_dim: int | None,
        use_bias: bool,
        platform: PlatformLike | None,
        dtype: Any,
        key: Array,
    ):
        # Keys of experts do not depend on whether there are latents.
        latent, parts = Parts(jax.random.fold_in(key, 1), 2, dtype, None), Parts(key, 6, dtype, None)
        self.fc1_latent_proj = None if latent_dim is None else latent.linear(embed_dim, latent_dim)
        self.fc2_latent_proj = None if latent_dim is None else latent.linear(latent_dim, embed_dim)
        embed_dim = embed_dim if latent_dim is None else latent_dim
        drawn = lambda inputs, *shape: parts.uniform((num_experts, *shape), 1 / math.sqrt(inputs))
        self.gate_proj = drawn(embed_dim, hidden_dim, embed_dim) if gated else parts.left_out()
        self.up_proj = drawn(embed_dim, hidden_dim, embed_dim)
        self.down_proj = drawn(hidden_dim, embed_dim, hidden_dim)
        self.gate_proj_bias = drawn(embed_dim, hidden_dim) if use_bias and gated else None
        self.up_proj_bias = drawn(embed_dim, hidden_dim) if use_bias else None
        self.down_proj_bias = drawn(hidden_dim, embed_dim) if use_bias else None
        self.is_squared = activation == "relu2"
        options = matmul_options("relu" if self.is_squared else activation)
        self.hidden = GroupedMatmul(transpose_rhs=True, platform=platform, **options)
        self.out = GroupedMatmul(transpose_rhs=True, platform=platform)

    def __call__(self, rows: Array, sizes: Array) -> Array:
        """Rows `[M, E]` in the order of their experts, of which `sizes [N]` says how many each has; rows behind them give 0."""
        sides: list[Any] = [w for w in (self.gate_proj, self.up_proj) if w is not None]
        down: Any = self.down_proj
        if self._are_in_float8(rows):
            first, *second = (w.float8_rows(rows, w, sizes) for w in sides)
            hidden = finished(first, second[0] if second else None, self.hidden.spec)
            return down.float8_rows(self._squared(hidden), down, sizes)
        # One product takes gate and up stored alike, `[N, out, in]`.
        alike = len(set(map(jax.tree.structure, sides))) == 1
        as_is = lambda w: is_quantised(w) and not w.transposed
        first, *second = (w if alike and as_is(w) else w.astype(rows.dtype) for w in sides)
        down = down if as_is(down) else down.astype(rows.dtype)
        if second:
            gated: Any = {"up": second[0], "bias": self.gate_proj_bias, "up_bias": self.up_proj_bias}
        else:
            gated = {"bias": self.up_proj_bias}
        hidden = self._squared(self.hidden(rows, first, sizes, **gated))
        return self.out(hidden, down, sizes, bias=self.down_proj_bias)

    def _squared(self, hidden: Array) -> Array:
        return hidden * hidden if self.is_squared else hidden

    def entering(self, x: Array) -> Array:
        """The inputs of experts of tokens `[..., width]`."""
        layer = self.fc1_latent_proj
        return x if layer is None else project("fc1_latent_proj", layer, x, self.up_proj.shape[-1])

    def leaving(self, y: Array, x: Array) -> Array:
        """The sums `y` of what the experts of tokens return, in the width of the tokens `x`."""
        layer = self.fc2_latent_proj
        return y if layer is None else project("fc2_latent_proj", layer, y.astype(x.dtype), x.shape[-1])

    def _are_in_float8(self, rows: Array) -> bool:
        """Returns whether all weights multiply these rows in float8, which no bias follows."""
        weights: list[Any] = [w for w in (self.gate_proj, self.up_proj, self.down_proj) if w is not None]
        if self.up_proj_bias is not None or any(getattr(w, "transposed", False) for w in weights):
            return False
        # Of an average expert. Symbolic sizes are no fewer than any number.
        many = is_symbolic(rows.shape[-2]) or rows.shape[-2] > MANY_ROWS * self.up_proj.shape[0]
        return many and all(in_float8(rows, w) for w in weights)

    _published = filled_experts
