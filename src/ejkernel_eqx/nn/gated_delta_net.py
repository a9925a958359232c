"""The gated delta net layer of Qwen3-Next."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from ..recurrence import GatedDeltaRule
from ..core.arguments import accumulator
from .arguments import check_eps, check_flags, check_key, check_sizes, read_dtype
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
    uniform_log,
)
from .short_convolution import ShortConvolution


class GatedDeltaNet(RecurrentLayer):
    r"""A gated delta net with weights: one short convolution over $q$, $k$, $v$, a delta rule whose heads forget, an output
    normalised and gated head by head.

    $$q, k, v = \mathrm{silu}(\mathrm{conv}(x W_{qkv}^\top)), \quad
      g = -e^{A} \log(1 + e^{x W_a^\top + b_{dt}}), \quad \beta = \sigma(x W_b^\top)$$
    $$o = \mathrm{GatedDeltaRule}(q / \lVert q \rVert, k / \lVert k \rVert, v, g, \beta), \qquad
      y = \big(\mathrm{norm}(o) \odot \mathrm{silu}(x W_z^\top)\big) W_o^\top$$

    The operation inside is [`ejkernel_eqx.GatedDeltaRule`][]. The parameters have the names and shapes of the published model
    code, where the rows of the projections are grouped by key head; the guide "Recurrent layers" has the calls and the table
    of names.

    Sources: Yang et al., *Gated Delta Networks: Improving Mamba2 with Delta Rule* (2024); Qwen3-Next's published model.
    """

    in_proj_qkvz: eqx.nn.Linear  # [2 * K * D + 2 * H * V, E]: each key head's q, k, v, z
    in_proj_ba: eqx.nn.Linear  # [2 * H, E]: each key head's b, a
    conv1d: ShortConvolution  # [2 * K * D + H * V, 1, W]: q, k, v of all heads
    dt_bias: Array  # [H]
    A_log: Array  # [H]
    norm: GatedRMSNorm  # [V]
    out_proj: eqx.nn.Linear  # [E, H * V]
    recurrence: GatedDeltaRule
    embed_dim: int = eqx.field(static=True)
    num_k_heads: int = eqx.field(static=True)
    num_v_heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    v_head_dim: int = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    def __init__(
        self,
        embed_dim: int,
        *,
        num_k_heads: int,
        num_v_heads: int | None = None,
        head_dim: int = 128,
        v_head_dim: int | None = None,
        conv_width: int = 4,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-6,
        state_dtype: DTypeLike | None = None,
        platform: str | None = None,
        config: Any = None,
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        key: Array,
    ):
        r"""**Arguments:**

        - `embed_dim`: features of the input and the output, `E`.
        - `num_k_heads`, `head_dim`: query and key heads `K` of `D` features.
        - `num_v_heads`, `v_head_dim`: value heads `H`, a multiple of `K` (default `K`), of `V` features (default `D`).
        - `conv_width`: inputs that the convolution sees, `W`.
        - `allow_neg_eigval`: $\beta$ is doubled.
        - `norm_eps`: what is added to the mean square.
        - `state_dtype`, `platform`, `config`: as in [`ejkernel_eqx.GatedDeltaRule`][]; the platform is the convolution's
            and the norm's as well.
        - `dtype`: of the parameters, but that `A_log` and `dt_bias` are at least float32; default float32 (float64 in JAX's
            64-bit mode).
        - `compute_dtype`: what the layer computes in and gives: its input and the weights of its projections are cast to it. Default:
            what the two promote to.
        - `key`: a PRNG key for the initial weights.
        """
        check_sizes(num_k_heads=num_k_heads)
        v_heads = num_k_heads if num_v_heads is None else num_v_heads
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        check_sizes(embed_dim=embed_dim, head_dim=head_dim, v_head_dim=v_head_dim, conv_width=conv_width)
        check_divides("num_k_heads", num_k_heads, "num_v_heads", v_heads)
        check_flags(allow_neg_eigval=allow_neg_eigval)
        check_eps(norm_eps=norm_eps)
        check_key(key)
        dtype, compute_dtype = read_dtype("dtype", dtype), read_compute_dtype(compute_dtype)
        key_dim, value_dim = num_k_heads * head_dim, v_heads * v_head_dim
        qkvz_key, ba_key, conv_key, decay_key, out_key = jax.random.split(key, 5)
        self.in_proj_qkvz = eqx.nn.Linear(embed_dim, 2 * key_dim + 2 * value_dim, False, dtype, key=qkvz_key)
        self.in_proj_ba = eqx.nn.Linear(embed_dim, 2 * v_heads, False, dtype, key=ba_key)
        self.conv1d = ShortConvolution(
            2 * key_dim + value_dim, conv_width, platform=platform, dtype=dtype, key=conv_key
        )
        wide = accumulator(self.in_proj_qkvz.weight.dtype)
        self.dt_bias = jnp.ones(v_heads, wide)
        # Published from 0 on; there the logarithm would be minus infinity.
        self.A_log = uniform_log(decay_key, v_heads, 1e-4, 16.0, wide)
        self.norm = GatedRMSNorm(
            v_head_dim, norm_before_gate=True, eps=norm_eps, platform=platform, dtype=dtype
        )
        self.out_proj = eqx.nn.Linear(value_dim, embed_dim, False, dtype, key=out_key)
        self.recurrence = GatedDeltaRule(
            use_qk_l2norm=True,
            gate="softplus",
            beta_sigmoid=True,
            allow_neg_eigval=allow_neg_eigval,
            state_dtype=state_dtype,
            platform=platform,
            config=config,
        )
        self.embed_dim, self.num_k_heads, self.num_v_heads = embed_dim, num_k_heads, v_heads
        self.head_dim, self.v_head_dim = head_dim, v_head_dim
        self.compute_dtype = compute_dtype

    def _projections(self) -> tuple[Any, ...]:
        return self.in_proj_qkvz, self.in_proj_ba, self.out_proj

    def _state_form(self) -> StateForm:
        recurrent = (self.num_v_heads, self.head_dim, self.v_head_dim)
        return StateForm(conv_shapes(self.conv1d), recurrent)

    def _mix(self, x: Array, rows: Rows) -> tuple[Array, RecurrentState]:
        per_key = self.num_v_heads // self.num_k_heads
        ends = [self.head_dim, 2 * self.head_dim, 2 * self.head_dim + per_key * self.v_head_dim]
        width = ends[2] + per_key * self.v_head_dim  # of one key head's q, k, v, z
        grouped = split_heads(
            project("in_proj_qkvz", self.in_proj_qkvz, x, self.num_k_heads * width), self.num_k_heads
        )
        *qkv, z = (merge_heads(part) for part in jnp.split(grouped, ends, axis=-1))
        ba = project("in_proj_ba", self.in_proj_ba, x, 2 * self.num_v_heads)
        b, a = jnp.split(split_heads(ba, self.num_k_heads), 2, axis=-1)
        mixed, conv = rows.convolve(self.conv1d, jnp.concatenate(qkv, axis=-1))
        key_dim = self.num_k_heads * self.head_dim
        q, k, v = jnp.split(mixed, [key_dim, 2 * key_dim], axis=-1)
        tokens = {
            "q": split_heads(q, self.num_k_heads),
            "k": split_heads(k, self.num_k_heads),
            "v": split_heads(v, self.num_v_heads),
            "g": merge_heads(a),
            "beta": merge_heads(b),
        }
        out, recurrent = rows.recur(self.recurrence, tokens, {"A_log": self.A_log, "dt_bias": self.dt_bias})
        y = self.norm(out, split_heads(z, self.num_v_heads))
        out = project("out_proj", self.out_proj, merge_heads(y), self.embed_dim)
        return out, RecurrentState((conv,), recurrent)
