"""`Mamba3Mixer`: the mixer of Mamba-3."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from .._broadcast import like
from ..core.arguments import wide
from ..dispatch import PlatformLike
from ..recurrence import StateSpaceV3
from ..recurrence.gates import silu_gated, softplus
from .arguments import check_divides, check_eps, checked, width_of
from .gated_rms_norm import GatedRMSNorm
from .parts import Parts
from .projection import project, project_parts
from .recurrent import RecurrentLayer, Rows
from .tokens import merge_heads, split_heads


class Mamba3Mixer(RecurrentLayer):
    r"""The mixer of Mamba-3. One projection, without a short convolution, gives all inputs of a state space that is discretised by the
    trapezoidal rule and whose $B$ and $C$ are rotated:

    $$[z, x, B, C, \delta, a, \ell, \phi] = u W_{in}^\top, \quad \Delta = \mathrm{softplus}(\delta + b_{dt}), \quad
      A = -\max(\mathrm{softplus}(a), A_{min}), \quad \lambda = \sigma(\ell), \quad \omega = \pi \tanh(\phi)$$
    $$y = \mathrm{SSD}_3\big(x, \Delta, \Delta A, \mathrm{norm}(B), \mathrm{norm}(C), \lambda, \omega, D\big), \qquad
      \mathrm{out} = (y \odot \mathrm{silu}(z))\, W_{out}^\top$$

    with biases of $B$ and $C$ behind their norms. With `mimo_rank` a head has $M$ inputs $x \odot u_m$, with $B$ and $C$ of their own, and $M$
    outputs, and the layer's is $\sum_m y_m \odot \mathrm{silu}(z \odot w_m) \odot o_m$. With `use_norm`, $y$ is normalised per head before its gate.

    The recurrent state is a pair, as of the underlying operation, [`ejkernel_eqx.StateSpaceV3`][].

    Source: Lahoti et al., *Mamba-3: Improved Sequence Modeling using State Space Principles* (2026), section 3; the published code.
    """

    in_proj: eqx.nn.Linear  # [2 * I + 2 * M * G * N + 3 * H + J, E]: z, x, B, C, dt, A, trap, angles
    dt_bias: Array  # [H]
    B_bias: Array  # [H, M, N]
    C_bias: Array  # [H, M, N]
    B_norm: GatedRMSNorm  # [N]
    C_norm: GatedRMSNorm  # [N]
    mimo_x: Array | None  # [H, M, P]
    mimo_z: Array | None  # [H, M, P]
    mimo_o: Array | None  # [H, M, P]
    D: Array  # [H]
    norm: GatedRMSNorm | None  # [I]
    out_proj: eqx.nn.Linear  # [E, I]
    recurrence: StateSpaceV3
    embed_dim: int = eqx.field(static=True)
    inner_dim: int = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    num_groups: int = eqx.field(static=True)
    state_size: int = eqx.field(static=True)
    num_angles: int = eqx.field(static=True)
    mimo_rank: int | None = eqx.field(static=True)
    min_rate: float = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

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
        rope_fraction: float = 0.5,
        mimo_rank: int | None = None,
        min_rate: float = 1e-4,
        use_norm: bool = False,
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

        - `state_size`: state size per channel, `N`, even.
        - `head_dim`: channels of a head, `P`.
        - `expand`, `inner_dim`: number of channels `I`: `inner_dim` if given, otherwise `expand * embed_dim`. There are `H = I / P` heads.
        - `num_groups`: number of groups of heads that share $B$ and $C$, `G`.
        - `rope_fraction`: the fraction of the state's channels that is rotated, by `J` angles, one for two of them.
        - `mimo_rank`: inputs and outputs of a head, `M`; default 1, without parameters for it.
        - `min_rate`: $A_{min}$.
        - `use_norm`: whether the output is normalised.
        - `norm_eps`: of all norms.
        """
        inner = width_of("expand", expand, embed_dim, 1, "channels") if inner_dim is None else inner_dim
        ranks = mimo_rank or 1
        check_eps(min_rate=min_rate)
        angles = 0 if rope_fraction is None else int(state_size * rope_fraction) // 2
        if state_size % 2 or not 0 < angles <= state_size // 2:
            raise ValueError(
                "rope_fraction: expected a fraction of an even state_size that is at least one pair of its channels and at most all, received "
                f"{rope_fraction!r} of {state_size}."
            )
        check_divides("head_dim", head_dim, "inner_dim", inner)
        heads = inner // head_dim
        check_divides("num_groups", num_groups, "heads", heads)
        parts = Parts(key, 3, dtype, compute_dtype, platform, sequence_axis)
        features = 2 * inner + 2 * ranks * num_groups * state_size + 3 * heads + angles
        self.in_proj = parts.linear(embed_dim, features)
        self.dt_bias = parts.time_step_bias(heads)
        self.B_bias = self.C_bias = jnp.ones((heads, ranks, state_size), parts.dtype)
        self.B_norm, self.C_norm = (parts.norm(state_size, eps=norm_eps) for _ in "BC")
        factors = None if mimo_rank is None else jnp.ones((heads, ranks, head_dim), parts.dtype)
        self.mimo_z = factors
        self.mimo_x = self.mimo_o = None if factors is None else factors / ranks
        self.D = jnp.ones(heads, parts.wide)
        norm = {"group_size": head_dim, "norm_before_gate": True, "eps": norm_eps}
        self.norm = parts.norm(inner, **norm) if use_norm else None
        self.out_proj = parts.linear(inner, embed_dim)
        # As published: neighbours are pairs with one rank, channels of both halves with more.
        self.recurrence = parts.operation(StateSpaceV3, state_dtype, config, interleaved=mimo_rank is None)
        self.embed_dim, self.inner_dim, self.compute_dtype = embed_dim, inner, parts.compute_dtype
        self.num_heads, self.num_groups, self.state_size = heads, num_groups, state_size
        self.num_angles, self.min_rate = angles, float(min_rate)
        self.mimo_rank = mimo_rank

    def _kept(self) -> tuple[tuple[Any, ...], tuple[tuple[int, ...], ...]]:
        channels, ranks = self.inner_dim // self.num_heads, self.mimo_rank or 1
        left = ranks * self.state_size + channels + 1 + self.num_angles
        return (), ((self.num_heads, channels, self.state_size), (self.num_heads, left))

    def _mix(self, x: Array, rows: Rows) -> Array:
        inner, heads, ranks = self.inner_dim, self.num_heads, self.mimo_rank or 1
        shared = ranks * self.num_groups * self.state_size
        widths = (inner, inner, 2 * shared, 3 * heads + self.num_angles)
        z, x, BC, rates = project_parts("in_proj", self.in_proj, x, widths)
        dt, A, trap, angles = jnp.split(wide(rates), [heads, 2 * heads, 3 * heads], axis=-1)
        dt = softplus(dt + like(self.dt_bias.astype(dt.dtype), dt))
        A = jnp.minimum(-softplus(A), jnp.asarray(-self.min_rate, dt.dtype))
        groups = ranks, self.num_groups, self.state_size
        B, C = (part.reshape(*part.shape[:-1], *groups) for part in jnp.split(BC, 2, axis=-1))
        tokens = {"x": split_heads(x, heads), "dt": dt, "g": dt * A, "B": self.B_norm(B), "C": self.C_norm(C)}
        tokens |= {"trap": jax.nn.sigmoid(trap), "angles": math.pi * jnp.tanh(angles)[..., None, :]}
        parameters = {"B_bias": self.B_bias, "C_bias": self.C_bias, "D": self.D, "mimo_x": self.mimo_x}
        y = rows.run(self.recurrence, tokens, parameters)
        z = _each(split_heads(z, heads)[..., None, :, :], self.mimo_z)
        if self.norm is None:
            y = silu_gated(y, z)
        else:
            y = split_heads(self.norm(merge_heads(y), merge_heads(z)), heads)
        y = jnp.sum(_each(wide(y), self.mimo_o), axis=-3).astype(x.dtype)
        return project("out_proj", self.out_proj, merge_heads(y), self.embed_dim)


def _each(x: Array, factors: Array | None) -> Array:
    """`x [..., M or 1, H, P]` times `factors [H, M, P]`."""
    if factors is None:
        return x
    return (wide(x) * like(jnp.swapaxes(factors, 0, 1).astype(wide(x).dtype), x)).astype(x.dtype)
