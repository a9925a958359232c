"""`LightningAttention`: the linear attention layer of MiniMax-01."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from .._shapes import AnyArray, Float, Int
from ..core.arguments import accumulator
from ..dispatch import PlatformLike
from ..recurrence import lightning_slopes
from ..recurrence import LightningAttention as Operation
from ..weights.recurrent import lightning_attention
from ..weights.recurrent_configs import lightning_attention_options
from .arguments import checked, is_known, read_array
from .attention_inputs import head_dim_of
from .gated_rms_norm import GatedRMSNorm
from .parts import Parts
from .projection import project
from .recurrent import RecurrentLayer, Rows
from .tokens import merge_heads, split_heads


class LightningAttention(RecurrentLayer):
    r"""Lightning attention: linear attention with a constant decay per head. The output is normalised over all heads, then gated.

    $$[q, k, v]_h = \mathrm{silu}(x W_{qkv}^\top)_h, \qquad o = \mathrm{Lightning}(q, k, v), \qquad
      y = \big(\sigma(x W_g^\top) \odot \mathrm{norm}(o)\big) W_o^\top$$

    with the slopes `"minimax"` of [`ejkernel_eqx.lightning_slopes`][], which depend on the index of the layer in the model. The
    index is an untrained array, so each of several stacked layers has its own. The underlying operation is
    [`ejkernel_eqx.LightningAttention`][].

    Source: MiniMax, *MiniMax-01: Scaling Foundation Models with Lightning Attention* (2025), section 2.2.
    """

    qkv_proj: eqx.nn.Linear  # [3 * H * D, E]: each head's query, key, value
    norm: GatedRMSNorm  # [H * D]
    output_gate: eqx.nn.Linear  # [H * D, E]
    out_proj: eqx.nn.Linear  # [E, H * D]
    layer_index: Array  # int32 []
    recurrence: Operation
    embed_dim: int = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    num_layers: int = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    _options_of = staticmethod(lightning_attention_options)
    _published = lightning_attention

    @checked
    def __init__(
        self,
        embed_dim: int,
        *,
        num_heads: int,
        head_dim: int | None = None,
        layer_index: int | np.integer | Int[AnyArray, ""] = 0,
        num_layers: int = 1,
        norm_eps: float = 1e-6,
        state_dtype: DTypeLike | None = None,
        sequence_axis: str | None = None,
        platform: PlatformLike | None = None,
        config: Any = None,
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:** those of [`RecurrentLayer`][ejkernel_eqx.nn.RecurrentLayer], and

        - `num_heads`, `head_dim`: number of heads, `H`, and their features, `D`; default `embed_dim // num_heads`.
        - `layer_index`, `num_layers`: index of the layer in the model, from 0, and the number of all layers of the model.
            The index may be a traced integer, under `equinox.filter_vmap`.
        """
        head_dim = head_dim_of(embed_dim, num_heads, head_dim)
        _check_place(layer_index, num_heads, num_layers)
        width = num_heads * head_dim
        parts = Parts(key, 3, dtype, compute_dtype, platform, sequence_axis)
        self.qkv_proj = parts.linear(embed_dim, 3 * width)
        self.norm = parts.norm(width, activation="sigmoid", norm_before_gate=True, eps=norm_eps)
        self.output_gate = parts.linear(embed_dim, width)
        self.out_proj = parts.linear(width, embed_dim)
        self.layer_index = jnp.asarray(layer_index, jnp.int32)
        self.recurrence = parts.operation(Operation, state_dtype, config, slopes=None, scale=1.0)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, head_dim
        self.num_layers, self.compute_dtype = num_layers, parts.compute_dtype

    def slopes(self) -> Float[Array, " H"]:
        """Returns the slopes of the heads, `[H]`, in float32 (float64 for float64)."""
        # Computed for all layers in double precision: the slopes of late layers are nearly zero, and would be inexact in single precision.
        layers = range(self.num_layers)
        table = [lightning_slopes("minimax", self.num_heads, i, self.num_layers) for i in layers]
        return jnp.asarray(np.stack(table), accumulator(self._stored_dtype()))[self.layer_index]

    def _kept(self) -> tuple[tuple[()], tuple[int, ...]]:
        return (), (self.num_heads, self.head_dim, self.head_dim)

    def _mix(self, x: Array, rows: Rows) -> Array:
        width = self.num_heads * self.head_dim
        qkv = split_heads(jax.nn.silu(project("qkv_proj", self.qkv_proj, x, 3 * width)), self.num_heads)
        q, k, v = jnp.split(qkv, 3, axis=-1)
        out = merge_heads(rows.run(self.recurrence, {"q": q, "k": k, "v": v}, {"slopes": self.slopes()}))
        y = self.norm(out, project("output_gate", self.output_gate, x, width))
        return project("out_proj", self.out_proj, y, self.embed_dim)


def _check_place(layer_index: Any, num_heads: int, num_layers: int) -> None:
    """The index of a layer, an integer or an integer array; checked when its value is known."""
    if isinstance(layer_index, bool) or not isinstance(layer_index, int | np.integer):
        layer_index = read_array("layer_index", layer_index, "integers", "[]")
        if layer_index.ndim:
            raise ValueError(
                f"layer_index: expected one integer, received shape {layer_index.shape}; build stacked layers with equinox.filter_vmap."
            )
    if is_known(layer_index):
        lightning_slopes("minimax", num_heads, int(layer_index), num_layers)
