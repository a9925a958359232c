"""The layer of Kimi delta attention (KDA)."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from ..recurrence import KernelDeltaAttention
from ..core.arguments import accumulator
from .arguments import check_eps, check_flags, check_key, check_numbers, check_sizes, read_dtype
from .compute import read_compute_dtype
from .gated_rms_norm import GatedRMSNorm
from .projection import project
from .recurrent import (
    check_divides,
    conv_shapes,
    merge_heads,
    RecurrentLayer,
    RecurrentState,
    Rows,
    split_heads,
    StateForm,
    time_step_bias,
    uniform_log,
)
from .short_convolution import ShortConvolution


class KimiDeltaAttention(RecurrentLayer):
    r"""Kimi delta attention with weights: short convolutions over $q$, $k$, $v$, a delta rule whose key channels forget at
    rates that a low-rank projection makes from the token, an output normalised and gated head by head.

    $$q, k, v = \mathrm{silu}(\mathrm{conv}(x W_{q,k,v}^\top)), \quad
      g = -e^{A} \log(1 + e^{x W_{fa}^\top W_{fb}^\top + b_{dt}}), \quad \beta = \sigma(x W_b^\top)$$
    $$o = \mathrm{KDA}(q / \lVert q \rVert, k / \lVert k \rVert, v, g, \beta), \qquad
      y = \big(\mathrm{norm}(o) \odot \sigma(x W_{ga}^\top W_{gb}^\top)\big) W_o^\top$$

    The operation inside is [`ejkernel_eqx.KernelDeltaAttention`][]. The parameters have the names and shapes of the published
    model code; the guide "Recurrent layers" has the calls and the table of names.

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
        platform: str | None = None,
        config: Any = None,
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        key: Array,
    ):
        r"""**Arguments:**

        - `embed_dim`: features of the input and the output, `E`.
        - `num_heads`, `head_dim`: query and key heads `K` of `D` features.
        - `num_v_heads`, `v_head_dim`: value heads `H`, a multiple of `K` (default `K`), of `V` features (default `D`).
        - `conv_width`, `use_conv_bias`: inputs that the convolutions see, `W`, and whether they have biases.
        - `use_gate_bias`: whether `g_b_proj` has a bias.
        - `allow_neg_eigval`: $\beta$ is doubled.
        - `lower_bound`: negative; the log-decays are $\mathrm{lower\_bound} \cdot \sigma(e^{A} (f + b_{dt}))$ instead.
        - `norm_eps`: what is added to the mean square.
        - `state_dtype`, `platform`, `config`: as in [`ejkernel_eqx.KernelDeltaAttention`][]; the platform is that of the
            convolutions and the norm as well.
        - `dtype`: of the parameters, but that `A_log` and `dt_bias` are at least float32; default float32 (float64 in JAX's
            64-bit mode).
        - `compute_dtype`: what the layer computes in and gives: its input and the weights of its projections are cast to it. Default:
            what the two promote to.
        - `key`: a PRNG key for the initial weights.
        """
        check_sizes(num_heads=num_heads)
        v_heads = num_heads if num_v_heads is None else num_v_heads
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        check_sizes(embed_dim=embed_dim, head_dim=head_dim, v_head_dim=v_head_dim, conv_width=conv_width)
        check_divides("num_heads", num_heads, "num_v_heads", v_heads)
        check_flags(
            use_conv_bias=use_conv_bias, use_gate_bias=use_gate_bias, allow_neg_eigval=allow_neg_eigval
        )
        check_eps(norm_eps=norm_eps)
        check_numbers(lower_bound=lower_bound)
        check_key(key)
        dtype, compute_dtype = read_dtype("dtype", dtype), read_compute_dtype(compute_dtype)
        keys = jax.random.split(key, 14)
        widths = (num_heads * head_dim, num_heads * head_dim, v_heads * v_head_dim)
        self.q_proj, self.k_proj, self.v_proj = (
            eqx.nn.Linear(embed_dim, width, False, dtype, key=k) for width, k in zip(widths, keys[:3])
        )
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            ShortConvolution(width, conv_width, use_bias=use_conv_bias, platform=platform, dtype=dtype, key=k)
            for width, k in zip(widths, keys[3:6])
        )
        wide = accumulator(self.q_proj.weight.dtype)
        bounded = lower_bound is not None
        self.A_log = jnp.zeros(v_heads, wide) if bounded else uniform_log(keys[6], v_heads, 1.0, 16.0, wide)
        self.dt_bias = time_step_bias(keys[7], v_heads * head_dim, wide)
        self.f_a_proj = eqx.nn.Linear(embed_dim, v_head_dim, False, dtype, key=keys[8])
        self.f_b_proj = eqx.nn.Linear(v_head_dim, v_heads * head_dim, False, dtype, key=keys[9])
        self.b_proj = eqx.nn.Linear(embed_dim, v_heads, False, dtype, key=keys[10])
        self.g_a_proj = eqx.nn.Linear(embed_dim, v_head_dim, False, dtype, key=keys[11])
        self.g_b_proj = eqx.nn.Linear(v_head_dim, v_heads * v_head_dim, use_gate_bias, dtype, key=keys[12])
        self.o_norm = GatedRMSNorm(
            v_head_dim,
            activation="sigmoid",
            norm_before_gate=True,
            eps=norm_eps,
            platform=platform,
            dtype=dtype,
        )
        self.o_proj = eqx.nn.Linear(v_heads * v_head_dim, embed_dim, False, dtype, key=keys[13])
        self.recurrence = KernelDeltaAttention(
            use_qk_l2norm=True,
            gate="bounded" if bounded else "softplus",
            lower_bound=lower_bound,
            beta_sigmoid=True,
            allow_neg_eigval=allow_neg_eigval,
            state_dtype=state_dtype,
            platform=platform,
            config=config,
        )
        self.embed_dim, self.num_heads, self.num_v_heads = embed_dim, num_heads, v_heads
        self.head_dim, self.v_head_dim = head_dim, v_head_dim
        self.compute_dtype = compute_dtype

    def _projections(self) -> tuple[Any, ...]:
        decay, gate = (self.f_a_proj, self.f_b_proj), (self.g_a_proj, self.g_b_proj)
        return self.q_proj, self.k_proj, self.v_proj, *decay, self.b_proj, *gate, self.o_proj

    def _convolutions(self) -> tuple[ShortConvolution, ...]:
        return self.q_conv1d, self.k_conv1d, self.v_conv1d

    def _state_form(self) -> StateForm:
        recurrent = (self.num_v_heads, self.head_dim, self.v_head_dim)
        return StateForm(conv_shapes(*self._convolutions()), recurrent)

    def _mix(self, x: Array, rows: Rows) -> tuple[Array, RecurrentState]:
        key_dim, value_dim = self.num_heads * self.head_dim, self.num_v_heads * self.v_head_dim
        projected = (
            project("q_proj", self.q_proj, x, key_dim),
            project("k_proj", self.k_proj, x, key_dim),
            project("v_proj", self.v_proj, x, value_dim),
        )
        mixed = [rows.convolve(c, y, i) for i, (c, y) in enumerate(zip(self._convolutions(), projected))]
        (q, k, v), conv = zip(*mixed)
        low = project("f_a_proj", self.f_a_proj, x, self.v_head_dim)
        decay = project("f_b_proj", self.f_b_proj, low, self.num_v_heads * self.head_dim)
        tokens = {
            "q": split_heads(q, self.num_heads),
            "k": split_heads(k, self.num_heads),
            "v": split_heads(v, self.num_v_heads),
            "g": split_heads(decay, self.num_v_heads),
            "beta": project("b_proj", self.b_proj, x, self.num_v_heads),
        }
        dt_bias = self.dt_bias.reshape(self.num_v_heads, self.head_dim)
        out, recurrent = rows.recur(self.recurrence, tokens, {"A_log": self.A_log, "dt_bias": dt_bias})
        low = project("g_a_proj", self.g_a_proj, x, self.v_head_dim)
        gate = split_heads(project("g_b_proj", self.g_b_proj, low, value_dim), self.num_v_heads)
        y = project("o_proj", self.o_proj, merge_heads(self.o_norm(out, gate)), self.embed_dim)
        return y, RecurrentState(conv, recurrent)
