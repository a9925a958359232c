"""The MLP of a layer, and the norms of models."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from .._jitted import compiled_call
from .._signatures import Module
from ..dispatch import PlatformLike
from ..matmul import Matmul
from ..nn.activations import gated, matmul_options, ungated
from ..nn.few_rows import added, Block, check_block, Norm, normed, projected, with_residual
from ..nn.few_rows import gated as gated_rows
from ..nn.parts import Parts
from ..nn.projection import project
from .config import MLPConfig, NormType
from .filling import filled_mlp
from .xielu import XIELU


def norm_of(kind: NormType, features: int, eps: float, dtype: Any) -> Norm:
    """A norm of this type. Its weights are at least float32, since the norm computes in float32."""
    wide = jnp.float32 if dtype is not None and jnp.dtype(dtype).itemsize < 4 else dtype
    if kind == "rms":
        return eqx.nn.RMSNorm(features, eps, use_bias=False, dtype=wide)
    return eqx.nn.LayerNorm(features, eps, use_bias=kind == "layer", dtype=wide)


class MLP(Module):
    r"""An MLP on each token, $y = W_{down}(f(W_{gate} x) \odot W_{up} x)$, or without a gate $y = W_{down}\, f(W_{up} x)$. An
    [`MLPConfig`][ejkernel_eqx.models.MLPConfig] describes it. Parameters have their published names.

    Source: Shazeer, *GLU Variants Improve Transformer* (2020, arXiv:2002.05202).
    """

    gate_proj: eqx.nn.Linear | None  # [F, E]
    up_proj: eqx.nn.Linear  # [F, E]
    down_proj: eqx.nn.Linear  # [E, F]
    act_fn: XIELU | None
    gate_matmul: Matmul
    matmul: Matmul
    config: MLPConfig = eqx.field(static=True)

    def __init__(
        self,
        embed_dim: int,
        config: MLPConfig,
        *,
        platform: PlatformLike | None = None,
        dtype: Any = None,
        key: Array,
    ):
        parts, width, biased = Parts(key, 3, dtype, None), config.hidden_dim, config.use_bias
        self.gate_proj = None
        if config.gated:
            self.gate_proj = parts.linear(embed_dim, width, biased)
        else:
            parts.left_out()
        self.up_proj = parts.linear(embed_dim, width, biased)
        self.down_proj = parts.linear(width, embed_dim, biased)
        self.act_fn = XIELU(parts.dtype) if config.activation == "xielu" else None
        platform = None if platform == "cuda" else platform
        options = matmul_options(config.activation) if config.gated else {}
        self.gate_matmul = Matmul(**options, gated=config.gated, platform=platform)
        self.matmul = Matmul(platform=platform)
        self.config = config

    @compiled_call("ejx.models.MLP")
    def __call__(
        self,
        x: Array,
        again: Array | None = None,
        *,
        norm: Norm | None = None,
        residual: Array | None = None,
    ) -> Array:
        """**Arguments:**

        - `x`: `[..., E]`, with any number of leading axes.
        - `again`: a copy of `x` for the second projection, from [`ejkernel_eqx.ResidualRMSNorm`][]`.for_readers`. Not with `norm` or `residual`.
        - `norm`: a norm that is applied to `x` first.
        - `residual`: an array of the shape of `x`, which is added to the output. With few rows, norm, MLP and addition are two launches on GPUs
            ([`ejkernel_eqx.Matmul`][]).

        **Returns:** an array of the shape of `x`, in the dtype of `residual` if it is given, else of `x`.
        """
        block = Block(norm, residual)
        if not block.is_alone:
            if again is not None:
                raise ValueError(
                    "again: expected None with norm or residual, received an array; it is the norm for the second projection."
                )
            check_block(block, x, x.shape[-1])
            return self._in_block(x, block)
        if self.gate_proj is None:
            h = project("up_proj", self.up_proj, x, self.config.hidden_dim)
            h = ungated(self.config.activation, h) if self.act_fn is None else self.act_fn(h)
            return project("down_proj", self.down_proj, h, x.shape[-1])
        gate = project("gate_proj", self.gate_proj, x, self.config.hidden_dim)
        gate = gate if self.config.gate_scale == 1 else gate * self.config.gate_scale
        up = project("up_proj", self.up_proj, x if again is None else again, self.config.hidden_dim)
        return project("down_proj", self.down_proj, gated(self.config.activation, gate, up), x.shape[-1])

    def _in_block(self, x: Array, block: Block) -> Array:
        layers = {"gate_proj": self.gate_proj, "up_proj": self.up_proj}
        h = (
            None
            if self.gate_proj is None or self.config.gate_scale != 1
            else gated_rows(self.gate_matmul, x, block.norm, layers, self.config.hidden_dim)
        )
        if h is None:
            return with_residual(block.residual, self(normed(block.norm, x)))
        if block.residual is None:
            return projected(self.matmul, h, None, {"down_proj": self.down_proj}, (x.shape[-1],))[0]
        return added(self.matmul, "down_proj", self.down_proj, h, block.residual)

    _published = filled_mlp
