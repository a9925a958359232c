"""`GatedDeltaNet`: the recurrent layer of Qwen3-Next, and with several writes per token that of Gated DeltaProduct."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from ..core.plans import again_for_gradients
from ..dispatch import PlatformLike
from ..recurrence import DeltaProduct, GatedDeltaRule
from ..weights.recurrent import gated_delta_net
from ..weights.recurrent_configs import gated_delta_net_options
from .arguments import check_divides, checked
from .gated_rms_norm import GatedRMSNorm
from .parts import Parts
from .projection import project, project_parts
from .recurrent import RecurrentLayer, Rows
from .short_convolution import ShortConvolution
from .tokens import merge_heads, split_heads


class GatedDeltaNet(RecurrentLayer):
    r"""Gated delta net. It has a short convolution of $q$, $k$, $v$, then a delta rule with one decay per head. Its
    output is normalised and gated per head.

    $$q, k, v = \mathrm{silu}(\mathrm{conv}(x W_{qkv}^\top)), \quad
      g = -e^{A} \log(1 + e^{x W_a^\top + b_{dt}}), \quad \beta = \sigma(x W_b^\top)$$
    $$o = \mathrm{GatedDeltaRule}(q / \lVert q \rVert, k / \lVert k \rVert, v, g, \beta), \qquad
      y = \big(\mathrm{norm}(o) \odot \mathrm{silu}(x W_z^\top)\big) W_o^\top$$

    The underlying operation is [`ejkernel_eqx.GatedDeltaRule`][]. With `num_householder` above 1 it is [`ejkernel_eqx.DeltaProduct`][], and $k$,
    $v$ and $\beta$ have that many parts. As in the published model code, the rows of the projections are grouped by key head.

    Sources: Yang et al., *Gated Delta Networks: Improving Mamba2 with Delta Rule* (2024); Qwen3-Next's published model; Siems et al.,
    *DeltaProduct* (2025).
    """

    # Each key head's q, k, v, z, and its b, a; with M parts of k, v and b.
    in_proj_qkvz: eqx.nn.Linear  # [(1 + M) * (K * D + H * V), E]
    in_proj_ba: eqx.nn.Linear  # [(1 + M) * H, E]
    conv1d: ShortConvolution  # [(1 + M) * K * D + M * H * V, 1, W]: q, k, v of all heads
    dt_bias: Array  # [H]
    A_log: Array  # [H]
    norm: GatedRMSNorm  # [V]
    out_proj: eqx.nn.Linear  # [E, H * V]
    recurrence: GatedDeltaRule | DeltaProduct
    embed_dim: int = eqx.field(static=True)
    num_k_heads: int = eqx.field(static=True)
    num_v_heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    v_head_dim: int = eqx.field(static=True)
    num_householder: int = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    _options_of = staticmethod(gated_delta_net_options)
    _published = gated_delta_net

    @checked
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
        num_householder: int = 1,
        norm_eps: float = 1e-6,
        state_dtype: DTypeLike | None = None,
        sequence_axis: str | None = None,
        platform: PlatformLike | None = None,
        config: Any = None,
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        key: PRNGKeyArray,
    ):
        r"""**Arguments:** those of [`RecurrentLayer`][ejkernel_eqx.nn.RecurrentLayer], and

        - `num_k_heads`, `head_dim`: number of query and key heads, `K`, and their features, `D`.
        - `num_v_heads`, `v_head_dim`: number of value heads, `H`, a multiple of `K` (default `K`), and their features, `V` (default `D`).
        - `conv_width`: kernel size of the convolution, `W`.
        - `allow_neg_eigval`: double $\beta$, which allows negative eigenvalues.
        - `num_householder`: writes per token, `M`.
        """
        v_heads = num_k_heads if num_v_heads is None else num_v_heads
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        writes = num_householder
        check_divides("num_k_heads", num_k_heads, "num_v_heads", v_heads)
        key_dim, value_dim = num_k_heads * head_dim, v_heads * v_head_dim
        parts = Parts(key, 5, dtype, compute_dtype, platform, sequence_axis)
        self.in_proj_qkvz = parts.linear(embed_dim, (1 + writes) * (key_dim + value_dim))
        self.in_proj_ba = parts.linear(embed_dim, (1 + writes) * v_heads)
        self.conv1d = parts.convolution((1 + writes) * key_dim + writes * value_dim, conv_width)
        self.dt_bias = jnp.ones(v_heads, parts.wide)
        # The published code draws from 0 on, where the logarithm would be minus infinity.
        self.A_log = parts.log_rates(v_heads, 1e-4)
        self.norm = parts.norm(v_head_dim, norm_before_gate=True, eps=norm_eps)
        self.out_proj = parts.linear(value_dim, embed_dim)
        rule = {"gate": "softplus", "beta_sigmoid": True, "allow_neg_eigval": allow_neg_eigval}
        kind = GatedDeltaRule if writes == 1 else DeltaProduct
        self.recurrence = parts.operation(kind, state_dtype, config, use_qk_l2norm=True, **rule)
        self.num_householder = writes
        self.embed_dim, self.num_k_heads, self.num_v_heads = embed_dim, num_k_heads, v_heads
        self.head_dim, self.v_head_dim, self.compute_dtype = head_dim, v_head_dim, parts.compute_dtype

    def _kept(self) -> tuple[tuple[ShortConvolution, ...], tuple[int, ...]]:
        return (self.conv1d,), (self.num_v_heads, self.head_dim, self.v_head_dim)

    def _mix(self, x: Array, rows: Rows) -> Array:
        per_key = self.num_v_heads // self.num_k_heads
        writes = self.num_householder
        widths = (self.head_dim,) * (1 + writes) + (per_key * self.v_head_dim,) * (1 + writes)
        *qkv, z = project_parts("in_proj_qkvz", self.in_proj_qkvz, x, widths, self.num_k_heads)
        ba = project("in_proj_ba", self.in_proj_ba, x, (1 + writes) * self.num_v_heads)
        *b, a = jnp.split(split_heads(ba, self.num_k_heads), 1 + writes, axis=-1)
        size = self.head_dim if rows.normalises(self.recurrence, self.conv1d) else None
        sizes = (size,) * (1 + writes) + (None,) * writes
        q, *kv = rows.convolve_parts(self.conv1d, qkv, sizes)
        # Of several writes, each token has an axis.
        join = lambda parts, axis: parts[0] if writes == 1 else jnp.stack(parts, axis)
        k = join([split_heads(part, self.num_k_heads) for part in kv[:writes]], -3)
        v = join([split_heads(part, self.num_v_heads) for part in kv[writes:]], -3)
        beta = join([merge_heads(part) for part in b], -2)
        tokens = {"q": split_heads(q, self.num_k_heads), "k": k, "v": v, "g": merge_heads(a), "beta": beta}
        recurrence = self.recurrence if size is None else self.recurrence.of_normalised()
        out = rows.run(recurrence, tokens, {"A_log": self.A_log, "dt_bias": self.dt_bias})
        # The gradient of the projection computes its input again.
        project_out = again_for_gradients(lambda *given: self._out(*given), (self.norm, self.out_proj))
        return project_out(out, split_heads(z, self.num_v_heads))

    def _out(self, out: Array, z: Array) -> Array:
        return project("out_proj", self.out_proj, merge_heads(self.norm(out, z)), self.embed_dim)
