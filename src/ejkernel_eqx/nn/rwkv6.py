"""`RWKV6TimeMix`: the recurrent layer of RWKV-6."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from .._broadcast import like
from ..core.arguments import rate_of
from ..dispatch import PlatformLike
from ..recurrence import GatedLinearAttention
from ..weights.rwkv import rwkv6_time_mix, rwkv6_time_mix_options
from .arguments import checked, width_of
from .parts import Parts
from .projection import project
from .recurrent import RecurrentLayer, Rows
from .rwkv_parts import LowRank, mixed, TokenShift
from .tokens import merge_heads, split_heads


class RWKV6TimeMix(RecurrentLayer):
    r"""The time mix of RWKV-6 ("Finch"). Every input is a mix of the token $x_t$ and the one before, in parts that depend on the token:

    $$\Delta_t = x_{t-1} - x_t, \quad x^\square = x_t + \Delta_t \odot \big(\lambda_\square +
      \tanh((x_t + \Delta_t \odot \mu) A_\square^\top) B_\square\big)$$
    $$r, k, v, z = x^r W_r^\top, x^k W_k^\top, x^v W_v^\top, x^g W_g^\top, \quad g = -e^{b_w + \tanh(x^w A_w^\top) B_w^\top}$$
    $$o_t = (S_{t-1} + \mathrm{diag}(u)\, k_t v_t^\top)^\top r_t, \quad S_t = \mathrm{diag}(e^{g_t})\, S_{t-1} + k_t v_t^\top, \quad
      y = \big(\mathrm{norm}(o) \odot \mathrm{silu}(z)\big) W_o^\top$$

    The norm is over the features of each head. The underlying operation is [`ejkernel_eqx.GatedLinearAttention`][] with a bonus.

    Source: Peng et al., *Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence* (2024); the published model code.
    """

    x_mu: Array  # [E]
    x_bias: Array  # [5, E]: r, w, k, v, g, as in all x_*
    x_down: eqx.nn.Linear  # [5 * R, E]
    x_up: Array  # [5, R, E]
    r_proj: eqx.nn.Linear  # [H * D, E]
    k_proj: eqx.nn.Linear  # [H * D, E]
    v_proj: eqx.nn.Linear  # [H * V, E]
    g_proj: eqx.nn.Linear  # [H * V, E]
    o_proj: eqx.nn.Linear  # [E, H * V]
    w_lora: LowRank  # [H * D, E] with a bias
    bonus: Array  # [H, D]
    g_norm: eqx.nn.GroupNorm  # [H * V]
    shift: TokenShift
    recurrence: GatedLinearAttention
    embed_dim: int = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    v_head_dim: int = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    _options_of = staticmethod(rwkv6_time_mix_options)
    _published = rwkv6_time_mix

    @checked
    def __init__(
        self,
        embed_dim: int,
        *,
        num_heads: int,
        expand_k: int | float = 1,
        expand_v: int | float = 1,
        proj_low_rank_dim: int = 32,
        gate_low_rank_dim: int = 64,
        norm_eps: float = 64e-5,
        state_dtype: DTypeLike | None = None,
        sequence_axis: str | None = None,
        platform: PlatformLike | None = None,
        config: Any = None,
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:** those of [`RecurrentLayer`][ejkernel_eqx.nn.RecurrentLayer], and

        - `num_heads`, `expand_k`, `expand_v`: number of heads, `H`, which have `expand_k * embed_dim` features of keys together, `D` each, and
            `expand_v * embed_dim` of values, `V` each.
        - `proj_low_rank_dim`, `gate_low_rank_dim`: ranks of the mixes, `R`, and of the decay.
        - `norm_eps`: added to the variances of heads.
        """
        rank, gate_rank = proj_low_rank_dim, gate_low_rank_dim
        head_dim = width_of("expand_k", expand_k, embed_dim, num_heads, "features per head")
        v_head_dim = width_of("expand_v", expand_v, embed_dim, num_heads, "features per head")
        key_dim, value_dim = num_heads * head_dim, num_heads * v_head_dim
        parts = Parts(key, 9, dtype, compute_dtype, platform, sequence_axis)
        # As published for a first layer: channels forget at different rates, and mix differently.
        place = jnp.arange(embed_dim, dtype=parts.wide) / embed_dim
        self.x_mu = (1 - place).astype(parts.dtype)
        powers = jnp.asarray([0.5, 1.0, 1.0, 1.0, 0.5], parts.wide)
        self.x_bias = (1 - place[None] ** powers[:, None]).astype(parts.dtype)
        self.x_down = parts.linear(embed_dim, 5 * rank)
        self.x_up = parts.uniform((5, rank, embed_dim), 0.01)
        self.r_proj, self.k_proj = parts.linear(embed_dim, key_dim), parts.linear(embed_dim, key_dim)
        self.v_proj, self.g_proj = parts.linear(embed_dim, value_dim), parts.linear(embed_dim, value_dim)
        self.o_proj = parts.linear(value_dim, embed_dim)
        channels = jnp.arange(key_dim, dtype=parts.wide) / key_dim
        self.w_lora = LowRank(parts, embed_dim, gate_rank, key_dim, (5 * channels - 6).astype(parts.dtype))
        self.bonus = jnp.full((num_heads, head_dim), 0.5, parts.dtype)
        self.g_norm = eqx.nn.GroupNorm(num_heads, value_dim, norm_eps, dtype=parts.dtype)
        self.shift = TokenShift(embed_dim, parts)
        self.recurrence = parts.operation(GatedLinearAttention, state_dtype, config, scale=1.0)
        self.embed_dim, self.num_heads, self.compute_dtype = embed_dim, num_heads, parts.compute_dtype
        self.head_dim, self.v_head_dim = head_dim, v_head_dim

    def _projections(self) -> tuple[Any, ...]:
        return *super()._projections(), self.w_lora.parts()

    def _kept(self) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        return (self.shift,), (self.num_heads, self.head_dim, self.v_head_dim)

    def _mix(self, x: Array, rows: Rows) -> Array:
        heads, delta, rank = self.num_heads, self.shift(x, rows), self.x_up.shape[-2]
        inner = jnp.tanh(project("x_down", self.x_down, mixed(x, delta, self.x_mu), 5 * rank))
        parts = jnp.einsum("...nr,nre->...ne", split_heads(inner, 5), self.x_up.astype(x.dtype))
        r, w, k, v, g = (
            mixed(x, delta, parts[..., n, :] + like(bias.astype(x.dtype), x))
            for n, bias in enumerate(self.x_bias)
        )
        key_dim, value_dim = heads * self.head_dim, heads * self.v_head_dim
        tokens = {
            "q": project("r_proj", self.r_proj, r, key_dim),
            "k": project("k_proj", self.k_proj, k, key_dim),
            "v": project("v_proj", self.v_proj, v, value_dim),
            "g": -rate_of(self.w_lora("w_lora", w, jnp.tanh)),
        }
        tokens = {name: split_heads(each, heads) for name, each in tokens.items()}
        out = merge_heads(rows.run(self.recurrence, tokens, {"bonus": self.bonus}))
        gate = jax.nn.silu(project("g_proj", self.g_proj, g, value_dim))
        normed = project("g_norm", self.g_norm, out, value_dim)
        return project("o_proj", self.o_proj, normed * gate, self.embed_dim)
