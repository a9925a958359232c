"""`GatedLinearAttention`: the layer of GLA."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from ..core.arguments import accumulator
from ..dispatch import PlatformLike
from ..recurrence import GatedLinearAttention as Operation
from ..weights.recurrent import gated_linear_attention
from ..weights.recurrent_configs import gated_linear_attention_options
from .arguments import check_divides, checked, width_of
from .gated_rms_norm import GatedRMSNorm
from .parts import Parts
from .projection import project
from .recurrent import RecurrentLayer, Rows
from .short_convolution import ShortConvolution
from .tokens import merge_heads, split_heads


class GatedLinearAttention(RecurrentLayer):
    r"""Gated linear attention (GLA). Each key channel decays at a rate that a low-rank projection computes from the
    token. The output is normalised and gated per head.

    $$q = x W_q^\top, \quad k = x W_k^\top, \quad v = x W_v^\top, \quad
      g = \tfrac{1}{16} \log \sigma(x W_{g1}^\top W_{g2}^\top + b_g)$$
    $$o = \mathrm{GLA}(q, k, v, g), \qquad y = \big(\mathrm{norm}(o) \odot \mathrm{silu}(x W_g^\top)\big) W_o^\top$$

    with optional short convolutions of $q$, $k$, $v$. The underlying operation is
    [`ejkernel_eqx.GatedLinearAttention`][].

    Source: Yang et al., *Gated Linear Attention Transformers with Hardware-Efficient Training* (2023), section 4.4.
    """

    q_proj: eqx.nn.Linear  # [H * D, E]
    k_proj: eqx.nn.Linear  # [K * D, E]
    v_proj: eqx.nn.Linear  # [K * V, E]
    g_proj: eqx.nn.Linear | None  # [H * V, E]
    gk_proj: tuple[eqx.nn.Linear, eqx.nn.Linear]  # [R, E]; [K * D, R] with a bias
    q_conv1d: ShortConvolution | None  # [H * D, 1, W]
    k_conv1d: ShortConvolution | None  # [K * D, 1, W]
    v_conv1d: ShortConvolution | None  # [K * V, 1, W]
    g_norm: GatedRMSNorm  # [V]
    o_proj: eqx.nn.Linear  # [E, H * V]
    recurrence: Operation
    embed_dim: int = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    v_head_dim: int = eqx.field(static=True)
    gate_low_rank_dim: int = eqx.field(static=True)
    gate_logit_normalizer: float = eqx.field(static=True)
    gate_min: float | None = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    _options_of = staticmethod(gated_linear_attention_options)
    _published = gated_linear_attention

    @checked
    def __init__(
        self,
        embed_dim: int,
        *,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        expand_k: int | float = 0.5,
        expand_v: int | float = 1,
        use_short_conv: bool = False,
        conv_width: int = 4,
        use_conv_bias: bool = False,
        output_gate: bool = True,
        gate_low_rank_dim: int = 16,
        gate_logit_normalizer: int | float = 16,
        gate_min: float | None = None,
        norm_eps: float = 1e-5,
        state_dtype: DTypeLike | None = None,
        sequence_axis: str | None = None,
        platform: PlatformLike | None = None,
        config: Any = None,
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        key: PRNGKeyArray,
    ):
        r"""**Arguments:** those of [`RecurrentLayer`][ejkernel_eqx.nn.RecurrentLayer], and

        - `num_heads`, `num_kv_heads`: number of query heads, `H`, and of key and value heads, `K`, a divisor of `H`; default `H`.
        - `expand_k`, `expand_v`: the query heads have `expand_k * embed_dim` features together, `D` each; the outputs
            `expand_v * embed_dim`, `V` each.
        - `use_short_conv`, `conv_width`, `use_conv_bias`: whether $q$, $k$, $v$ pass short convolutions with SiLU, their kernel size `W`,
            and whether they have biases.
        - `output_gate`: whether the normalised output is multiplied by the SiLU of a projection of the input.
        - `gate_low_rank_dim`: rank `R` of the projection of the decay.
        - `gate_logit_normalizer`: divisor of the log-sigmoid.
        - `gate_min`: lower bound of the log-decay; `None` for no bound.
        """
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_divides("num_kv_heads", kv_heads, "num_heads", num_heads)
        head_dim = width_of("expand_k", expand_k, embed_dim, num_heads, "features per head")
        v_head_dim = width_of("expand_v", expand_v, embed_dim, num_heads, "features per head")
        if not gate_logit_normalizer or gate_logit_normalizer < 0:
            raise ValueError(
                f"gate_logit_normalizer: expected a positive number, received {gate_logit_normalizer!r}; log-decays are at most 0."
            )
        widths = (num_heads * head_dim, kv_heads * head_dim, kv_heads * v_head_dim)
        value_dim = num_heads * v_head_dim
        parts = Parts(key, 10, dtype, compute_dtype, platform, sequence_axis)
        self.q_proj, self.k_proj, self.v_proj = (parts.linear(embed_dim, width) for width in widths)
        self.g_proj = parts.linear(embed_dim, value_dim) if output_gate else parts.left_out()
        down = parts.linear(embed_dim, gate_low_rank_dim)
        self.gk_proj = down, parts.linear(gate_low_rank_dim, kv_heads * head_dim, True)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            parts.convolution(width, conv_width, use_conv_bias) if use_short_conv else parts.left_out()
            for width in widths
        )
        self.g_norm = parts.norm(v_head_dim, norm_before_gate=True, eps=norm_eps)
        self.o_proj = parts.linear(value_dim, embed_dim)
        self.recurrence = parts.operation(Operation, state_dtype, config)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim, self.v_head_dim = head_dim, v_head_dim
        self.gate_low_rank_dim, self.compute_dtype = gate_low_rank_dim, parts.compute_dtype
        self.gate_logit_normalizer, self.gate_min = float(gate_logit_normalizer), gate_min

    def _convolutions(self) -> tuple[ShortConvolution, ...]:
        return tuple(conv for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d) if conv is not None)

    def _kept(self) -> tuple[tuple[ShortConvolution, ...], tuple[int, ...]]:
        return self._convolutions(), (self.num_kv_heads, self.head_dim, self.v_head_dim)

    def _mix(self, x: Array, rows: Rows) -> Array:
        key_dim, value_dim = self.num_kv_heads * self.head_dim, self.num_kv_heads * self.v_head_dim
        q = project("q_proj", self.q_proj, x, self.num_heads * self.head_dim)
        k = project("k_proj", self.k_proj, x, key_dim)
        v = project("v_proj", self.v_proj, x, value_dim)
        if convolutions := self._convolutions():
            q, k, v = map(rows.convolve, convolutions, (q, k, v))
        down, up = self.gk_proj
        logits = project("gk_proj[1]", up, project("gk_proj[0]", down, x, self.gate_low_rank_dim), key_dim)
        k, v, g = (split_heads(y, self.num_kv_heads) for y in (k, v, self._log_decay(logits)))
        out = rows.run(self.recurrence, {"q": split_heads(q, self.num_heads), "k": k, "v": v, "g": g})
        gate = None
        if self.g_proj is not None:
            gate = project("g_proj", self.g_proj, x, self.num_heads * self.v_head_dim)
            gate = split_heads(gate, self.num_heads)
        return project("o_proj", self.o_proj, merge_heads(self.g_norm(out, gate)), self.embed_dim)

    def _log_decay(self, logits: Array) -> Array:
        g = jax.nn.log_sigmoid(logits.astype(accumulator(logits.dtype))) / self.gate_logit_normalizer
        return g if self.gate_min is None else jnp.maximum(g, self.gate_min)
