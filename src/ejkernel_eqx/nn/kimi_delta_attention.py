"""`KimiDeltaAttention`: the recurrent layer of Kimi Linear."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from ..dispatch import PlatformLike
from ..recurrence import KernelDeltaAttention
from ..weights.recurrent import kimi_delta_attention
from ..weights.recurrent_configs import kimi_delta_attention_options
from .arguments import check_divides, checked
from .gated_rms_norm import GatedRMSNorm
from .parts import Parts
from .projection import project, project_together
from .recurrent import RecurrentLayer, Rows
from .short_convolution import ShortConvolution
from .tokens import merge_heads, split_heads


class KimiDeltaAttention(RecurrentLayer):
    r"""Kimi delta attention (KDA). It has short convolutions of $q$, $k$, $v$, then a delta rule. Key channels decay at
    rates that a low-rank projection computes from the token. The output is normalised and gated per head.

    $$q, k, v = \mathrm{silu}(\mathrm{conv}(x W_{q,k,v}^\top)), \quad
      g = -e^{A} \log(1 + e^{x W_{fa}^\top W_{fb}^\top + b_{dt}}), \quad \beta = \sigma(x W_b^\top)$$
    $$o = \mathrm{KDA}(q / \lVert q \rVert, k / \lVert k \rVert, v, g, \beta), \qquad
      y = \big(\mathrm{norm}(o) \odot \sigma(x W_{ga}^\top W_{gb}^\top)\big) W_o^\top$$

    The underlying operation is [`ejkernel_eqx.KernelDeltaAttention`][].

    Source: Kimi Team, *Kimi Linear: An Expressive, Efficient Attention Architecture* (2025), section 4.
    """

    q_proj: eqx.nn.Linear  # [K * D, E]
    k_proj: eqx.nn.Linear  # [K * D, E]
    v_proj: eqx.nn.Linear  # [H * V, E]
    q_conv1d: ShortConvolution  # [K * D, 1, W]
    k_conv1d: ShortConvolution  # [K * D, 1, W]
    v_conv1d: ShortConvolution  # [H * V, 1, W]
    A_log: Array  # [H]
    f_a_proj: eqx.nn.Linear  # [V, E]
    f_b_proj: eqx.nn.Linear  # [H * D, V]
    dt_bias: Array  # [H * D]
    b_proj: eqx.nn.Linear  # [H, E]
    g_a_proj: eqx.nn.Linear  # [V, E]
    g_b_proj: eqx.nn.Linear  # [H * V, V]
    o_norm: GatedRMSNorm  # [V]
    o_proj: eqx.nn.Linear  # [E, H * V]
    recurrence: KernelDeltaAttention
    embed_dim: int = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    num_v_heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    v_head_dim: int = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    _options_of = staticmethod(kimi_delta_attention_options)
    _published = kimi_delta_attention

    @checked
    def __init__(
        self,
        embed_dim: int,
        *,
        num_heads: int,
        head_dim: int = 128,
        num_v_heads: int | None = None,
        v_head_dim: int | None = None,
        conv_width: int = 4,
        use_conv_bias: bool = False,
        use_gate_bias: bool = False,
        allow_neg_eigval: bool = False,
        lower_bound: float | None = None,
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

        - `num_heads`, `head_dim`: number of query and key heads, `K`, and their features, `D`.
        - `num_v_heads`, `v_head_dim`: number of value heads, `H`, a multiple of `K` (default `K`), and their features, `V` (default `D`).
        - `conv_width`, `use_conv_bias`: kernel size of the convolutions, `W`, and whether they have biases.
        - `use_gate_bias`: whether `g_b_proj` has a bias.
        - `allow_neg_eigval`: double $\beta$, which allows negative eigenvalues.
        - `lower_bound`: negative; the log-decays are then $\mathrm{lower\_bound} \cdot \sigma(e^{A} (f + b_{dt}))$, with
            $f = x W_{fa}^\top W_{fb}^\top$.
        """
        v_heads = num_heads if num_v_heads is None else num_v_heads
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        check_divides("num_heads", num_heads, "num_v_heads", v_heads)
        key_dim, value_dim, bounded = num_heads * head_dim, v_heads * v_head_dim, lower_bound is not None
        widths = (key_dim, key_dim, value_dim)
        parts = Parts(key, 14, dtype, compute_dtype, platform, sequence_axis)
        self.q_proj, self.k_proj, self.v_proj = (parts.linear(embed_dim, width) for width in widths)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            parts.convolution(width, conv_width, use_conv_bias) for width in widths
        )
        rates = parts.log_rates(v_heads)
        self.A_log = jnp.zeros_like(rates) if bounded else rates
        self.dt_bias = parts.time_step_bias(v_heads * head_dim)
        self.f_a_proj = parts.linear(embed_dim, v_head_dim)
        self.f_b_proj = parts.linear(v_head_dim, v_heads * head_dim)
        self.b_proj = parts.linear(embed_dim, v_heads)
        self.g_a_proj = parts.linear(embed_dim, v_head_dim)
        self.g_b_proj = parts.linear(v_head_dim, value_dim, use_gate_bias)
        self.o_norm = parts.norm(v_head_dim, activation="sigmoid", norm_before_gate=True, eps=norm_eps)
        self.o_proj = parts.linear(value_dim, embed_dim)
        rule: Any = {"gate": "bounded" if bounded else "softplus", "lower_bound": lower_bound}
        rule |= {"use_qk_l2norm": True, "beta_sigmoid": True, "allow_neg_eigval": allow_neg_eigval}
        self.recurrence = parts.operation(KernelDeltaAttention, state_dtype, config, **rule)
        self.embed_dim, self.num_heads, self.num_v_heads = embed_dim, num_heads, v_heads
        self.head_dim, self.v_head_dim, self.compute_dtype = head_dim, v_head_dim, parts.compute_dtype

    def _kept(self) -> tuple[tuple[ShortConvolution, ...], tuple[int, ...]]:
        state = (self.num_v_heads, self.head_dim, self.v_head_dim)
        return (self.q_conv1d, self.k_conv1d, self.v_conv1d), state

    def _mix(self, x: Array, rows: Rows) -> Array:
        heads, v_heads = self.num_heads, self.num_v_heads
        key_dim, value_dim = heads * self.head_dim, v_heads * self.v_head_dim
        size = self.head_dim if rows.normalises(self.recurrence, self.q_conv1d, self.k_conv1d) else None
        q = rows.convolve(self.q_conv1d, project("q_proj", self.q_proj, x, key_dim), size)
        k = rows.convolve(self.k_conv1d, project("k_proj", self.k_proj, x, key_dim), size)
        v = rows.convolve(self.v_conv1d, project("v_proj", self.v_proj, x, value_dim))
        narrow = {"f_a_proj": self.f_a_proj, "g_a_proj": self.g_a_proj, "b_proj": self.b_proj}
        low, gate, beta = project_together(narrow, x, (self.v_head_dim, self.v_head_dim, v_heads))
        decay = project("f_b_proj", self.f_b_proj, low, v_heads * self.head_dim)
        tokens = {"q": split_heads(q, heads), "k": split_heads(k, heads), "v": split_heads(v, v_heads)}
        tokens |= {"g": split_heads(decay, v_heads), "beta": beta}
        parameters = {"A_log": self.A_log, "dt_bias": self.dt_bias.reshape(v_heads, self.head_dim)}
        recurrence = self.recurrence if size is None else self.recurrence.of_normalised()
        out = rows.run(recurrence, tokens, parameters)
        gate = split_heads(project("g_b_proj", self.g_b_proj, gate, value_dim), v_heads)
        return project("o_proj", self.o_proj, merge_heads(self.o_norm(out, gate)), self.embed_dim)
