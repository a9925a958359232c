"""`GatedRMSNorm`: the gated RMS norm that follows the mixers of published linear-time models."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from .._jitted import compiled_call
from .._shapes import AnyArray, Float
from .._signatures import Module
from ..dispatch import PlatformLike
from ..normalization import GatedRMSNorm as _GatedRMSNorm
from .arguments import checked, read_array, read_dtype


class GatedRMSNorm(Module):
    r"""An RMS norm with a learned weight and a gate:

    $$y = \mathrm{norm}(x \odot \sigma(z)) \odot w \quad\text{or, with norm\_before\_gate,}\quad y = \mathrm{norm}(x) \odot w \odot \sigma(z)$$

    | model | options | `x` |
    |---|---|---|
    | Mamba-2 | `group_size`: features per group | `[..., T, E]` |
    | Qwen3-Next, GLA | `norm_before_gate=True` | each head: `[..., T, H, V]` |
    | Kimi Linear | `norm_before_gate=True, activation="sigmoid"` | each head: `[..., T, H, V]` |
    | MiniMax-01 | `norm_before_gate=True, activation="sigmoid"` | all heads: `[..., T, H * V]` |

    Accumulates in float32 (float64 for float64). The weight has the name and shape of the published model code.
    """

    weight: Array | None  # [C]
    norm: _GatedRMSNorm
    features: int = eqx.field(static=True)

    @checked
    def __init__(
        self,
        features: int,
        *,
        activation: str = "silu",
        norm_before_gate: bool = False,
        group_size: int | None = None,
        eps: float = 1e-6,
        use_weight: bool = True,
        platform: PlatformLike | None = None,
        config: Any = None,
        dtype: DTypeLike | None = None,
    ):
        """**Arguments:**

        - `features`: size of the last axis.
        - `activation`, `norm_before_gate`, `group_size`, `eps`, `platform`, `config`: as in [`ejkernel_eqx.GatedRMSNorm`][].
        - `use_weight`: whether the norm has a weight, initialised to ones.
        - `dtype`: of the weight; default float32 (float64 in JAX's 64-bit mode).
        """
        if features % (group_size or features):
            raise ValueError(
                f"features: expected a positive multiple of group_size={group_size}, received {features}; groups have equal sizes."
            )
        self.weight = jnp.ones(features, read_dtype("dtype", dtype)) if use_weight else None
        self.norm = _GatedRMSNorm(
            activation, norm_before_gate, group_size, eps, platform=platform, config=config
        )
        self.features = features

    @compiled_call("ejx.nn.GatedRMSNorm")
    def __call__(
        self, x: Float[AnyArray, "*B C"], z: Float[AnyArray, "*B C"] | None = None
    ) -> Float[Array, "*B C"]:
        """**Arguments:**

        - `x`: `[..., features]` with any number of leading axes.
        - `z`: the gate, in the shape of `x`; `None` for no gate.

        **Returns:** an array of the shape and dtype of `x`, independent of the dtype of the weight. Raises `ValueError` for invalid
        arguments.
        """
        x = read_array("x", x, "floats", "[..., features]")
        if x.ndim < 1 or x.shape[-1] != self.features:
            raise ValueError(
                f"x: expected [..., features] with {self.features} features, received shape {x.shape}; the norm is over the last axis."
            )
        if z is not None and read_array("z", z, "floats", "[..., features]").shape != x.shape:
            raise ValueError(
                f"z: expected the shape of x, {x.shape}, received {z.shape}; broadcast it first."
            )
        return self.norm(x, z, self.weight)
