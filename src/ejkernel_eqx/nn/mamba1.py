"""`Mamba1Mixer`: the mixer of Mamba and Falcon-Mamba."""

import math
from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from ..core.arguments import rate_of
from ..dispatch import PlatformLike
from ..selective_scan import StateSpaceV1
from ..weights.recurrent_configs import mamba1_options
from .arguments import check_flags, checked, width_of
from .parts import Parts
from .projection import project, project_apart, project_parts
from .recurrent import RecurrentLayer, Rows
from .short_convolution import ShortConvolution


class Mamba1Mixer(RecurrentLayer):
    r"""The mixer of Mamba: a short convolution and a selective scan, gated by a second branch. $\Delta$, $B$ and $C$ of
    the scan are computed from the tokens.

    $$[x, z] = u W_{in}^\top, \quad x = \mathrm{silu}(\mathrm{conv}(x)), \quad [\delta, B, C] = x W_x^\top, \quad
      \Delta = \mathrm{softplus}(\delta W_{dt}^\top + b_{dt})$$
    $$y = \mathrm{SSM}(x, \Delta, -e^{A}, B, C, D) \odot \mathrm{silu}(z), \qquad \mathrm{out} = y W_{out}^\top$$

    With `inner_norms`, $\delta$, $B$ and $C$ pass RMS norms, without weights (Falcon-Mamba) or with them (Jamba). The underlying operation is
    [`ejkernel_eqx.StateSpaceV1`][].

    Sources: Gu & Dao, *Mamba: Linear-Time Sequence Modeling with Selective State Spaces* (2023), figure 3 and
    section 3.6; Zuo et al., *Falcon Mamba* (2024); Lieber et al., *Jamba* (2024), section 3.
    """

    in_proj: eqx.nn.Linear  # [2 * I, E]: x, then z
    conv1d: ShortConvolution  # [I, 1, W]
    x_proj: eqx.nn.Linear  # [R + 2 * N, I]: dt, B, C
    dt_proj: eqx.nn.Linear  # [I, R], with a bias
    A_log: Array  # [I, N]
    D: Array  # [I]
    out_proj: eqx.nn.Linear  # [E, I]
    dt_layernorm: eqx.nn.RMSNorm | None  # [R]
    b_layernorm: eqx.nn.RMSNorm | None  # [N]
    c_layernorm: eqx.nn.RMSNorm | None  # [N]
    recurrence: StateSpaceV1
    embed_dim: int = eqx.field(static=True)
    inner_dim: int = eqx.field(static=True)
    state_size: int = eqx.field(static=True)
    dt_rank: int = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    _options_of = staticmethod(mamba1_options)

    @checked
    def __init__(
        self,
        embed_dim: int,
        *,
        state_size: int = 16,
        conv_width: int = 4,
        expand: int | float = 2,
        inner_dim: int | None = None,
        dt_rank: int | None = None,
        use_conv_bias: bool = True,
        use_bias: bool = False,
        inner_norms: bool | Literal["weighted"] = False,
        inner_norm_eps: float = 1e-6,
        state_dtype: DTypeLike | None = None,
        sequence_axis: str | None = None,
        platform: PlatformLike | None = None,
        config: Any = None,
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        key: PRNGKeyArray,
    ):
        r"""**Arguments:** those of [`RecurrentLayer`][ejkernel_eqx.nn.RecurrentLayer], and

        - `state_size`: state size per channel, `N`.
        - `conv_width`: kernel size of the convolution, `W`.
        - `expand`, `inner_dim`: number of channels `I`: `inner_dim` if given, otherwise `expand * embed_dim`.
        - `dt_rank`: rank `R` of the projection of $\Delta$; default $\lceil E / 16 \rceil$.
        - `use_conv_bias`, `use_bias`: whether the convolution, and `in_proj` and `out_proj`, have biases.
        - `inner_norms`, `inner_norm_eps`: whether $\delta$, $B$, $C$ are normalised, `"weighted"` for norms with weights, and the number added to
            the mean square.
        """
        inner = width_of("expand", expand, embed_dim, 1, "channels") if inner_dim is None else inner_dim
        rank = math.ceil(embed_dim / 16) if dt_rank is None else dt_rank
        weighted = isinstance(inner_norms, str) and inner_norms == "weighted"
        check_flags(inner_norms=weighted or inner_norms)
        parts = Parts(key, 6, dtype, compute_dtype, platform, sequence_axis)
        self.in_proj = parts.linear(embed_dim, 2 * inner, use_bias)
        self.conv1d = parts.convolution(inner, conv_width, use_conv_bias)
        self.x_proj = parts.linear(inner, rank + 2 * state_size)
        # Initial weights are uniform in +-R^-1/2, as `Linear` draws them.
        dt_proj = parts.linear(rank, inner, True)
        bias = parts.time_step_bias(inner).astype(parts.dtype)
        self.dt_proj = eqx.tree_at(lambda linear: linear.bias, dt_proj, bias)
        rates = jnp.log(jnp.arange(1, state_size + 1, dtype=parts.wide))
        self.A_log = jnp.broadcast_to(rates, (inner, state_size))
        self.D = jnp.ones(inner, parts.wide)
        self.out_proj = parts.linear(inner, embed_dim, use_bias)
        norm = lambda size: eqx.nn.RMSNorm(
            size, inner_norm_eps, use_weight=weighted, use_bias=False, dtype=parts.dtype
        )
        sizes = (rank, state_size, state_size)
        self.dt_layernorm, self.b_layernorm, self.c_layernorm = (
            norm(n) if inner_norms else None for n in sizes
        )
        self.recurrence = parts.operation(StateSpaceV1, state_dtype, config, dt_softplus=True)
        self.embed_dim, self.inner_dim = embed_dim, inner
        self.state_size, self.dt_rank = state_size, rank
        self.compute_dtype = parts.compute_dtype

    def _kept(self) -> tuple[tuple[ShortConvolution, ...], tuple[int, ...]]:
        return (self.conv1d,), (self.inner_dim, self.state_size)

    def _mix(self, x: Array, rows: Rows) -> Array:
        x, z = project_parts("in_proj", self.in_proj, x, (self.inner_dim, self.inner_dim))
        x = rows.convolve(self.conv1d, x)
        mixed = project("x_proj", self.x_proj, x, self.dt_rank + 2 * self.state_size)
        parts = jnp.split(mixed, [self.dt_rank, self.dt_rank + self.state_size], axis=-1)
        norms = {
            "dt_layernorm": self.dt_layernorm,
            "b_layernorm": self.b_layernorm,
            "c_layernorm": self.c_layernorm,
        }
        dt, B, C = (
            part if norm is None else project(name, norm, part, part.shape[-1])
            for (name, norm), part in zip(norms.items(), parts, strict=True)
        )
        dt, dt_bias = project_apart("dt_proj", self.dt_proj, dt, self.inner_dim)
        tokens = {"x": x, "dt": dt, "B": B, "C": C, "z": z}
        y = rows.run(self.recurrence, tokens, {"A": -rate_of(self.A_log), "D": self.D, "dt_bias": dt_bias})
        return project("out_proj", self.out_proj, y, self.embed_dim)
