"""The mixer of Mamba-2."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from ..recurrence import StateSpaceV2
from ..core.arguments import accumulator
from .arguments import check_eps, check_flags, check_key, check_sizes, read_dtype
from .compute import read_compute_dtype
from .gated_rms_norm import GatedRMSNorm
from .projection import project
from .recurrent import (
    check_divides,
    conv_shapes,
    merge_heads,
    negative_exp,
    RecurrentLayer,
    RecurrentState,
    Rows,
    split_heads,
    StateForm,
    time_step_bias,
    uniform_log,
    width_of,
)
from .short_convolution import ShortConvolution


class Mamba2Mixer(RecurrentLayer):
    r"""The mixer of Mamba-2: one projection gives everything, a short convolution goes over $x$, $B$ and $C$, a state
    space with one decay a head mixes, and the gated output is normalised.

    $$[z, xBC, \delta] = u W_{in}^\top, \quad [x, B, C] = \mathrm{silu}(\mathrm{conv}(xBC)), \quad
      \Delta = \mathrm{softplus}(\delta + b_{dt})$$
    $$y = \mathrm{SSD}(x, \Delta, -e^{A}, B, C, D), \qquad \mathrm{out} = \mathrm{norm}(y \odot \mathrm{silu}(z))\, W_{out}^\top$$

    The parameters have the names and shapes of the published model code; the guide "Recurrent layers" has the calls and
    the table of names.

    Source: Dao & Gu, *Transformers are SSMs* (2024), section 7.
    """

    in_proj: eqx.nn.Linear  # [2 * I + 2 * G * N + H, E]: z, x, B, C, dt
    conv1d: ShortConvolution  # [I + 2 * G * N, 1, W]
    dt_bias: Array  # [H]
    A_log: Array  # [H]
    D: Array  # [H]
    norm: GatedRMSNorm | None  # [I]
    out_proj: eqx.nn.Linear  # [E, I]
    recurrence: StateSpaceV2
    embed_dim: int = eqx.field(static=True)
    inner_dim: int = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    num_groups: int = eqx.field(static=True)
    state_size: int = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    def __init__(
        self,
        embed_dim: int,
        *,
        state_size: int = 128,
        head_dim: int = 64,
        expand: int | float = 2,
        inner_dim: int | None = None,
        num_groups: int = 1,
        conv_width: int = 4,
        dt_limit: tuple[float, float] | None = None,
        use_norm: bool = True,
        norm_before_gate: bool = False,
        norm_group_size: int | None = None,
        norm_eps: float = 1e-5,
        use_conv_bias: bool = True,
        use_bias: bool = False,
        state_dtype: DTypeLike | None = None,
        platform: str | None = None,
        config: Any = None,
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        key: Array,
    ):
        r"""**Arguments:**

        - `embed_dim`: features of the input and the output, `E`.
        - `state_size`: numbers kept for each channel, `N`.
        - `head_dim`: channels of a head, `P`.
        - `expand`, `inner_dim`: channels $I$, `inner_dim` or else `expand * embed_dim`; $H = I / P$ heads.
        - `num_groups`: groups of heads that share $B$ and $C$, `G`.
        - `conv_width`: inputs that the convolution sees, `W`.
        - `dt_limit`: `(low, high)`, the bounds of the time step; `None` for none.
        - `use_norm`: whether there is a norm; without it the output is only gated.
        - `norm_before_gate`: norm first, then gate, instead of the other way round.
        - `norm_group_size`: channels that are normalised together; default those of a group, `I // G`.
        - `norm_eps`: what is added to the mean square.
        - `use_conv_bias`, `use_bias`: whether the convolution, and `in_proj` and `out_proj`, have biases.
        - `state_dtype`, `platform`, `config`: as in [`ejkernel_eqx.StateSpaceV2`][]; the platform is the convolution's
            and the norm's as well.
        - `dtype`: of the parameters, but that `A_log`, `D` and `dt_bias` are at least float32; default float32 (float64 in
            JAX's 64-bit mode).
        - `compute_dtype`: what the layer computes in and gives: its input and the weights of its projections are cast to it. Default:
            what the two promote to.
        - `key`: a PRNG key for the initial weights.
        """
        check_sizes(embed_dim=embed_dim, state_size=state_size, conv_width=conv_width)
        inner = width_of("expand", expand, embed_dim, 1, "channels") if inner_dim is None else inner_dim
        check_flags(use_norm=use_norm, norm_before_gate=norm_before_gate)
        check_flags(use_conv_bias=use_conv_bias, use_bias=use_bias)
        check_eps(norm_eps=norm_eps)
        check_key(key)
        dtype, compute_dtype = read_dtype("dtype", dtype), read_compute_dtype(compute_dtype)
        check_divides("head_dim", head_dim, "inner_dim", inner)
        heads = inner // head_dim
        check_divides("num_groups", num_groups, "heads", heads)
        mixed = inner + 2 * num_groups * state_size
        in_key, conv_key, bias_key, decay_key, out_key = jax.random.split(key, 5)
        self.in_proj = eqx.nn.Linear(embed_dim, inner + mixed + heads, use_bias, dtype, key=in_key)
        self.conv1d = ShortConvolution(
            mixed, conv_width, use_bias=use_conv_bias, platform=platform, dtype=dtype, key=conv_key
        )
        wide = accumulator(self.in_proj.weight.dtype)
        self.dt_bias = time_step_bias(bias_key, heads, wide)
        self.A_log = uniform_log(decay_key, heads, 1.0, 16.0, wide)
        self.D = jnp.ones(heads, wide)
        group_size = inner // num_groups if norm_group_size is None else norm_group_size
        check_divides("norm_group_size", group_size, "inner_dim", inner)
        self.norm = (
            GatedRMSNorm(
                inner,
                group_size=group_size,
                norm_before_gate=norm_before_gate,
                eps=norm_eps,
                platform=platform,
                dtype=dtype,
            )
            if use_norm
            else None
        )
        self.out_proj = eqx.nn.Linear(inner, embed_dim, use_bias, dtype, key=out_key)
        self.recurrence = StateSpaceV2(
            dt_softplus=True, dt_limit=dt_limit, state_dtype=state_dtype, platform=platform, config=config
        )
        self.embed_dim, self.inner_dim = embed_dim, inner
        self.num_heads, self.num_groups, self.state_size = heads, num_groups, state_size
        self.compute_dtype = compute_dtype

    def _projections(self) -> tuple[Any, ...]:
        return self.in_proj, self.out_proj

    def _state_form(self) -> StateForm:
        recurrent = (self.num_heads, self.inner_dim // self.num_heads, self.state_size)
        return StateForm(conv_shapes(self.conv1d), recurrent)

    def _mix(self, x: Array, rows: Rows) -> tuple[Array, RecurrentState]:
        inner, shared = self.inner_dim, self.num_groups * self.state_size
        all_parts = project("in_proj", self.in_proj, x, 2 * inner + 2 * shared + self.num_heads)
        z, mixed, dt = jnp.split(all_parts, [inner, 2 * inner + 2 * shared], axis=-1)
        mixed, conv = rows.convolve(self.conv1d, mixed)
        x, B, C = jnp.split(mixed, [inner, inner + shared], axis=-1)
        tokens = {
            "x": split_heads(x, self.num_heads),
            "dt": dt,
            "B": split_heads(B, self.num_groups),
            "C": split_heads(C, self.num_groups),
        }
        if self.norm is None:
            tokens["z"] = split_heads(z, self.num_heads)
        parameters = {"A": negative_exp(self.A_log), "D": self.D, "dt_bias": self.dt_bias}
        y, recurrent = rows.recur(self.recurrence, tokens, parameters)
        y = merge_heads(y)
        if self.norm is not None:
            y = self.norm(y, z)
        return project("out_proj", self.out_proj, y, self.embed_dim), RecurrentState((conv,), recurrent)
