"""`RWKV7TimeMix` and `RWKV7ChannelMix`: the two layers of a block of RWKV-7."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from .._broadcast import like
from .._jitted import compiled_call
from .._shapes import AnyArray, Bool, Float, Int
from ..convolution import CausalConv1d
from ..core.arguments import wide
from ..dispatch import PlatformLike
from ..paged import RaggedBatch
from ..recurrence import RWKV7
from ..weights.rwkv import (
    rwkv7_channel_mix,
    rwkv7_channel_mix_options,
    rwkv7_time_mix,
    rwkv7_time_mix_options,
)
from .arguments import check_divides, checked, read_array
from .parts import Parts
from .projection import project
from .recurrent import RecurrentLayer, RecurrentState, Rows
from .rwkv_parts import LowRank, mixed, TokenShift
from .tokens import merge_heads, split_heads

_Result = Float[Array, "*B T E"] | tuple[Float[Array, "*B T E"], Float[Array, "*B T C"]]


class RWKV7TimeMix(RecurrentLayer):
    r"""The time mix of RWKV-7 ("Goose"). Every input is a mix of the token $x_t$ and the one before, $x^\square = x_t + (x_{t-1} - x_t) \odot
    \mu_\square$.

    $$r = x^r W_r^\top, \quad k' = x^k W_k^\top, \quad v' = x^v W_v^\top, \quad w = b_w + \tanh(x^w A_w^\top) B_w^\top$$
    $$\eta = \sigma(b_a + x^a A_a^\top B_a^\top), \quad \kappa = \frac{k' \odot k_k}{\lVert k' \odot k_k \rVert}, \quad
      k = k' \odot (1 + (\eta - 1) \odot k_a), \quad v = v' + (v^{first} - v') \odot \sigma(b_v + x^v A_v^\top B_v^\top)$$
    $$o = \mathrm{RWKV7}(r, w, k, v, \kappa, \eta), \qquad
      y = \Big(\big(\mathrm{norm}(o) + (r \odot k \odot r_k) \mathbf 1\, v\big) \odot \sigma(x^g A_g^\top) B_g^\top\Big) W_o^\top$$

    The norm and the products with $\mathbf 1$ are over the features of each head. $v^{first}$ are the values $v'$ of the first layer of the
    model, which has no residual of values itself. The underlying operation is [`ejkernel_eqx.RWKV7`][].

    Source: Peng et al., *RWKV-7 "Goose" with Expressive Dynamic State Evolution* (2025); the published model code.
    """

    x_mix: Array  # [6, E]: the weights of r, w, k, v, a, g
    k_k: Array  # [H * D]
    k_a: Array  # [H * D]
    r_k: Array  # [H, D]
    r_proj: eqx.nn.Linear  # [H * D, E]
    k_proj: eqx.nn.Linear  # [H * D, E]
    v_proj: eqx.nn.Linear  # [H * V, E]
    o_proj: eqx.nn.Linear  # [E, H * V]
    w_lora: LowRank  # [H * D, E] with a bias
    a_lora: LowRank  # [H * D, E] with a bias
    v_lora: LowRank | None  # [H * V, E] with a bias
    g_lora: LowRank  # [H * V, E]
    g_norm: eqx.nn.GroupNorm  # [H * V]
    shift: TokenShift
    recurrence: RWKV7
    embed_dim: int = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    v_head_dim: int = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    _options_of = staticmethod(rwkv7_time_mix_options)
    _published = rwkv7_time_mix

    @checked
    def __init__(
        self,
        embed_dim: int,
        *,
        head_dim: int = 64,
        v_head_dim: int | None = None,
        value_residual: bool = True,
        decay_low_rank_dim: int | None = None,
        a_low_rank_dim: int | None = None,
        v_low_rank_dim: int | None = None,
        gate_low_rank_dim: int | None = None,
        norm_eps: float | None = None,
        state_dtype: DTypeLike | None = None,
        sequence_axis: str | None = None,
        platform: PlatformLike | None = None,
        config: Any = None,
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        key: PRNGKeyArray,
    ):
        r"""**Arguments:** those of [`RecurrentLayer`][ejkernel_eqx.nn.RecurrentLayer], and

        - `head_dim`, `v_head_dim`: features of keys, `D`, a divisor of `embed_dim`, and of values, `V` (default `D`), of each of the
            `H = embed_dim / D` heads.
        - `value_residual`: whether values are mixed with those of the first layer; `False` for that layer.
        - `decay_low_rank_dim`, `a_low_rank_dim`, `v_low_rank_dim`, `gate_low_rank_dim`: ranks of the projections of $w$, $\eta$, the residual
            and the gate; by default multiples of 32 near $2.5 \sqrt E$, $2.5 \sqrt E$, $1.7 \sqrt E$, each times `D / 64`, and $5 \sqrt E$.
        - `norm_eps`: added to the variances of heads; default $10^{-5}$ `D`.
        """
        values = head_dim if v_head_dim is None else v_head_dim
        check_divides("head_dim", head_dim, "embed_dim", embed_dim)
        norm_eps = 1e-5 * head_dim if norm_eps is None else norm_eps
        near = lambda factor: max(32, 32 * round(factor * embed_dim**0.5 / 32))
        wider = head_dim / 64
        decay_rank = near(2.5 * wider) if decay_low_rank_dim is None else decay_low_rank_dim
        a_rank = near(2.5 * wider) if a_low_rank_dim is None else a_low_rank_dim
        v_rank = near(1.7 * wider) if v_low_rank_dim is None else v_low_rank_dim
        gate_rank = near(5) if gate_low_rank_dim is None else gate_low_rank_dim
        heads = embed_dim // head_dim
        key_dim, value_dim = embed_dim, heads * values
        parts = Parts(key, 12, dtype, compute_dtype, platform, sequence_axis)
        full = lambda value, *shape: jnp.full(shape, value, parts.dtype)
        # Of the published initial values, those of a first layer: channels forget at different rates, and mix differently.
        place = jnp.arange(embed_dim, dtype=parts.wide) / embed_dim
        powers = jnp.asarray([0.2, 0.9, 0.7, 0.7, 0.9, 0.2], parts.wide)
        self.x_mix = (1 - place[None] ** powers[:, None]).astype(parts.dtype)
        self.k_k, self.k_a = full(0.71, key_dim), full(1.02, key_dim)
        self.r_k = full(-0.04, heads, head_dim)
        self.r_proj, self.k_proj = parts.linear(embed_dim, key_dim), parts.linear(embed_dim, key_dim)
        self.v_proj, self.o_proj = parts.linear(embed_dim, value_dim), parts.linear(value_dim, embed_dim)
        decays = (6 * place - 5.5).astype(parts.dtype)
        self.w_lora = LowRank(parts, embed_dim, decay_rank, key_dim, decays)
        self.a_lora = LowRank(parts, embed_dim, a_rank, key_dim, full(-0.19, key_dim))
        self.g_lora = LowRank(parts, embed_dim, gate_rank, value_dim)
        self.v_lora = None
        if value_residual:
            self.v_lora = LowRank(parts, embed_dim, v_rank, value_dim, full(0.73, value_dim))
        self.g_norm = eqx.nn.GroupNorm(heads, value_dim, norm_eps, dtype=parts.dtype)
        self.shift = TokenShift(embed_dim, parts)
        self.recurrence = parts.operation(RWKV7, state_dtype, config)
        self.embed_dim, self.num_heads, self.compute_dtype = embed_dim, heads, parts.compute_dtype
        self.head_dim, self.v_head_dim = head_dim, values

    @compiled_call()
    def __call__(
        self,
        x: Float[AnyArray, "*B T E"],
        state: RecurrentState | None = None,
        *,
        v_first: Float[AnyArray, "*B T C"] | None = None,
        return_values: bool = False,
        padding_mask: Bool[AnyArray, "*B T"] | None = None,
        segment_ids: Int[AnyArray, "*B T"] | None = None,
        cu_seqlens: Int[AnyArray, " N+1"] | None = None,
        batch: RaggedBatch | None = None,
    ) -> _Result | tuple[_Result, RecurrentState]:
        """**Arguments:** those of [`RecurrentLayer`][ejkernel_eqx.nn.RecurrentLayer], and

        - `v_first`: the values of the first layer for the same tokens, `[..., T, H * V]`; required with `value_residual`, and only then.
        - `return_values`: return `(y, values)` in the place of `y`, with the values before the residual, `[..., T, H * V]`: `v_first` for the
            layers after a first one.

        **Returns:** as [`RecurrentLayer`][ejkernel_eqx.nn.RecurrentLayer].
        """
        expected = None if self.v_lora is None else (*jnp.shape(x)[:-1], self.num_heads * self.v_head_dim)
        beside = {}
        if v_first is not None:
            beside["v_first"] = read_array("v_first", v_first, "floats", "[..., T, H * V]")
        received = beside["v_first"].shape if beside else None
        if received != expected:
            raise ValueError(
                f"v_first: expected {expected} for this layer and x, received {received}; the first layer of a model, with value_residual=False, "
                "returns it with return_values=True, and the others take it."
            )
        tokens = {"padding_mask": padding_mask, "segment_ids": segment_ids, "cu_seqlens": cu_seqlens}
        results = self._called(x, state, batch, tokens, beside)
        (y, values), *left = results if state is not None else (results,)
        y = (y, values) if return_values else y
        return (y, *left) if left else y

    def _projections(self) -> tuple[Any, ...]:
        low = [low.parts() for low in (self.w_lora, self.a_lora, self.v_lora, self.g_lora) if low is not None]
        return *super()._projections(), *low

    def _kept(self) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        return (self.shift,), (self.num_heads, self.head_dim, self.v_head_dim)

    def _mix(self, x: Array, rows: Rows) -> tuple[Array, Array]:
        heads, delta = self.num_heads, self.shift(x, rows)
        of_r, of_w, of_k, of_v, of_a, of_g = (mixed(x, delta, weight) for weight in self.x_mix)
        r = project("r_proj", self.r_proj, of_r, self.embed_dim)
        k = project("k_proj", self.k_proj, of_k, self.embed_dim)
        v = own = project("v_proj", self.v_proj, of_v, heads * self.v_head_dim)
        w = self.w_lora("w_lora", of_w, jnp.tanh)
        eta = jax.nn.sigmoid(wide(self.a_lora("a_lora", of_a)))
        gate = self.g_lora("g_lora", of_g, jax.nn.sigmoid)
        if self.v_lora is not None and "v_first" in rows.beside:
            part = jax.nn.sigmoid(wide(self.v_lora("v_lora", of_v)))
            v = (wide(v) + (wide(rows.beside["v_first"]) - wide(v)) * part).astype(v.dtype)
        kappa = wide(split_heads(k * like(self.k_k.astype(k.dtype), k), heads))
        # The published bound of a length is 1e-12.
        kappa = kappa * lax.rsqrt(jnp.maximum(jnp.sum(kappa**2, -1, keepdims=True), 1e-24))
        k = (wide(k) * (1 + (eta - 1) * like(self.k_a.astype(eta.dtype), eta))).astype(k.dtype)
        r, w, k, v, eta = (split_heads(each, heads) for each in (r, w, k, v, eta))
        out = rows.run(
            self.recurrence, {"r": r, "w": w, "k": k, "v": v, "kappa": kappa.astype(k.dtype), "eta": eta}
        )
        weights = like(self.r_k.astype(eta.dtype), r)
        again = jnp.sum(wide(r) * wide(k) * weights, -1, keepdims=True) * wide(v)
        normed = project("g_norm", self.g_norm, merge_heads(out), heads * self.v_head_dim)
        normed += merge_heads(again).astype(x.dtype)
        return project("o_proj", self.o_proj, normed * gate, self.embed_dim), own


class RWKV7ChannelMix(RecurrentLayer):
    r"""The channel mix of RWKV-7, its feed-forward layer, on a mix of the token and the one before:

    $$y = \mathrm{relu}\big((x_t + (x_{t-1} - x_t) \odot \mu_k) W_k^\top\big)^2\, W_v^\top$$

    The state is the last token, in the `recurrent` of a [`RecurrentState`][ejkernel_eqx.nn.RecurrentState]. The underlying operation is
    [`ejkernel_eqx.CausalConv1d`][].

    Source: Peng et al., *RWKV-7 "Goose" with Expressive Dynamic State Evolution* (2025); the published model code.
    """

    x_k: Array  # [E]
    key: eqx.nn.Linear  # [F, E]
    value: eqx.nn.Linear  # [E, F]
    shift: TokenShift
    embed_dim: int = eqx.field(static=True)
    inner_dim: int = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    _options_of = staticmethod(rwkv7_channel_mix_options)
    _published = rwkv7_channel_mix

    @checked
    def __init__(
        self,
        embed_dim: int,
        *,
        inner_dim: int | None = None,
        sequence_axis: str | None = None,
        platform: PlatformLike | None = None,
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:** those of [`RecurrentLayer`][ejkernel_eqx.nn.RecurrentLayer] but for `norm_eps`, `state_dtype` and `config`, and

        - `inner_dim`: features `F` between the projections; default `4 * embed_dim`.
        """
        inner_dim = 4 * embed_dim if inner_dim is None else inner_dim
        parts = Parts(key, 2, dtype, compute_dtype, platform, sequence_axis)
        place = jnp.arange(embed_dim, dtype=parts.wide) / embed_dim
        self.x_k = (1 - place).astype(parts.dtype)
        self.key, self.value = parts.linear(embed_dim, inner_dim), parts.linear(inner_dim, embed_dim)
        self.shift = TokenShift(embed_dim, parts)
        self.embed_dim, self.inner_dim, self.compute_dtype = embed_dim, inner_dim, parts.compute_dtype

    @property
    def recurrence(self) -> CausalConv1d:
        return self.shift.convolution

    def _kept(self) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        return (), (1, self.embed_dim)

    def _mix(self, x: Array, rows: Rows) -> Array:
        inner = project("key", self.key, mixed(x, self.shift(x, rows), self.x_k), self.inner_dim)
        return project("value", self.value, jnp.square(jax.nn.relu(inner)), self.embed_dim)
