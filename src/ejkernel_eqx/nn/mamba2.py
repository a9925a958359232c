"""`Mamba2Mixer`: the mixer of Mamba-2."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from .._broadcast import like
from ..core.arguments import rate_of
from ..dispatch import PlatformLike
from ..recurrence import StateSpaceV2
from ..weights.recurrent_configs import mamba2_options
from .arguments import check_divides, check_numbers, checked, width_of
from .gated_rms_norm import GatedRMSNorm
from .parts import Parts
from .projection import project, project_parts
from .recurrent import RecurrentLayer, Rows
from .short_convolution import ShortConvolution
from .tokens import merge_heads, split_heads


class Mamba2Mixer(RecurrentLayer):
    r"""The mixer of Mamba-2. It has a single input projection and a short convolution of $x$, $B$ and $C$. A state
    space with one decay per head and a norm of the gated output follow.

    $$[z, xBC, \delta] = u W_{in}^\top, \quad [x, B, C] = \mathrm{silu}(\mathrm{conv}(xBC)), \quad
      \Delta = \mathrm{softplus}(\delta + b_{dt})$$
    $$y = \mathrm{SSD}(x, \Delta, -e^{A}, B, C, D), \qquad \mathrm{out} = \mathrm{norm}(y \odot \mathrm{silu}(z))\, W_{out}^\top$$

    The underlying operation is [`ejkernel_eqx.StateSpaceV2`][].

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
    multipliers: tuple[float, ...] | None = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    _options_of = staticmethod(mamba2_options)

    @checked
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
        multipliers: tuple[float, float, float, float, float] | None = None,
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
        - `head_dim`: channels of a head, `P`.
        - `expand`, `inner_dim`: number of channels `I`: `inner_dim` if given, otherwise `expand * embed_dim`. There are `H = I / P` heads.
        - `num_groups`: number of groups of heads that share $B$ and $C$, `G`.
        - `conv_width`: kernel size of the convolution, `W`.
        - `dt_limit`: `(low, high)`, bounds of the time step; `None` for no bounds.
        - `use_norm`: whether the output is normalised; otherwise it is only gated.
        - `norm_before_gate`: apply the gate after the norm; by default it is applied before.
        - `norm_group_size`: number of channels normalised together; default those of a group, `I // G`.
        - `use_conv_bias`, `use_bias`: whether the convolution, and `in_proj` and `out_proj`, have biases.
        - `multipliers`: what $z$, $x$, $B$, $C$ and $\delta$ are multiplied by behind `in_proj` (Falcon-H1); default none.
        """
        inner = width_of("expand", expand, embed_dim, 1, "channels") if inner_dim is None else inner_dim
        if multipliers is not None and (not isinstance(multipliers, tuple) or len(multipliers) != 5):
            raise ValueError(
                f"multipliers: expected five numbers, for z, x, B, C and dt, or None, received {multipliers!r}."
            )
        check_numbers(**{f"multipliers[{i}]": value for i, value in enumerate(multipliers or ())})
        check_divides("head_dim", head_dim, "inner_dim", inner)
        heads = inner // head_dim
        check_divides("num_groups", num_groups, "heads", heads)
        group_size = inner // num_groups if norm_group_size is None else norm_group_size
        check_divides("norm_group_size", group_size, "inner_dim", inner)
        mixed = inner + 2 * num_groups * state_size
        parts = Parts(key, 5, dtype, compute_dtype, platform, sequence_axis)
        self.in_proj = parts.linear(embed_dim, inner + mixed + heads, use_bias)
        self.conv1d = parts.convolution(mixed, conv_width, use_conv_bias)
        self.dt_bias = parts.time_step_bias(heads)
        self.A_log = parts.log_rates(heads)
        self.D = jnp.ones(heads, parts.wide)
        norm = {"group_size": group_size, "norm_before_gate": norm_before_gate, "eps": norm_eps}
        self.norm = parts.norm(inner, **norm) if use_norm else None
        self.out_proj = parts.linear(inner, embed_dim, use_bias)
        rule = {"dt_softplus": True, "dt_limit": dt_limit}
        self.recurrence = parts.operation(StateSpaceV2, state_dtype, config, **rule)
        self.embed_dim, self.inner_dim, self.compute_dtype = embed_dim, inner, parts.compute_dtype
        self.num_heads, self.num_groups, self.state_size = heads, num_groups, state_size
        self.multipliers = multipliers

    def _kept(self) -> tuple[tuple[ShortConvolution, ...], tuple[int, ...]]:
        return (self.conv1d,), (self.num_heads, self.inner_dim // self.num_heads, self.state_size)

    def _mix(self, x: Array, rows: Rows) -> Array:
        inner, shared = self.inner_dim, self.num_groups * self.state_size
        widths = (inner, inner, 2 * shared + self.num_heads)
        z, x, others = project_parts("in_proj", self.in_proj, x, widths)
        if self.multipliers is not None:
            of_z, of_x, *rest = self.multipliers
            each = np.repeat(rest, (shared, shared, self.num_heads))
            z, x, others = z * of_z, x * of_x, others * like(jnp.asarray(each, others.dtype), others)
        # Without the barrier, the product would be kept for the gradient as well as its parts.
        BC, dt = lax.optimization_barrier(tuple(jnp.split(others, [2 * shared], axis=-1)))
        x, BC = rows.convolve_parts(self.conv1d, (x, BC), (None, None))
        B, C = jnp.split(BC, 2, axis=-1)
        B, C = split_heads(B, self.num_groups), split_heads(C, self.num_groups)
        tokens = {"x": split_heads(x, self.num_heads), "dt": dt, "B": B, "C": C}
        if self.norm is None:
            tokens["z"] = split_heads(z, self.num_heads)
        parameters = {"A": -rate_of(self.A_log), "D": self.D, "dt_bias": self.dt_bias}
        y = merge_heads(rows.run(self.recurrence, tokens, parameters))
        return project("out_proj", self.out_proj, y if self.norm is None else self.norm(y, z), self.embed_dim)
