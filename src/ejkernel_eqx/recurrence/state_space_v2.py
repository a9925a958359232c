"""`StateSpaceV2`: the state space model of Mamba-2."""

import dataclasses
from collections import namedtuple
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from .._broadcast import like
from .._shapes import AnyArray, Float, Int, Numbers
from ..core.arguments import decaying_rates, finite_rate, fitting, wide
from ..core.plans import again_for_gradients
from ..core.split_tokens import over_sequence_axis
from ..dispatch import PlatformLike
from .arguments import Frame, Operands, step_frame_of
from .core import KEPT
from .gates import check_limit, rms_norm, silu_gated, time_step
from .operation import Recurrence
from .spec import SCALAR

_Inputs = namedtuple("_Inputs", "x dt A B C D z dt_bias norm_weight")
"""The operands of a call on sequences or of a step."""


class StateSpaceV2(Recurrence):
    r"""The state space duality (SSD) of Mamba-2: a state of $P \times N$ per head, with one decay per head and token.

    $$h_t = e^{\Delta_t A} h_{t-1} + \Delta_t\, x_t B_t^\top, \qquad y_t = h_t C_t + D \odot x_t$$

    with the time step $\Delta_t$ = `dt` `+ dt_bias`, passed through a softplus if `dt_softplus`, then clamped to `dt_limit` (with zero
    gradient outside). With a gate the output is $y_t \odot \mathrm{silu}(z_t)$, and `norm` applies an RMS norm to it. Head $h$ reads
    group $\lfloor h / (H / G) \rfloor$ of $B$ and $C$.

    Platforms and derivatives: as for [`ejkernel_eqx.GatedLinearAttention`][].

    Source: Dao & Gu, *Transformers are SSMs* (2024), sections 5 to 7.
    """

    operation: ClassVar[str] = "state_space_v2"

    dt_softplus: bool = eqx.field(static=True)
    dt_limit: tuple[float, float] | None = eqx.field(static=True)
    norm: str | None = eqx.field(static=True)
    norm_eps: float = eqx.field(static=True)

    def __init__(
        self,
        *,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] | None = None,
        norm: Literal["group", "whole"] | None = None,
        norm_eps: float = 1e-5,
        reverse: bool = False,
        sequence_axis: str | None = None,
        state_dtype: DTypeLike | None = None,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `dt_softplus`: apply a softplus to `dt + dt_bias`.
        - `dt_limit`: `(low, high)`, the bounds of the time step, or `None`.
        - `norm`: RMS-normalise the gated output over the heads of each group (`"group"`) or over all heads (`"whole"`); `None` does not.
        - `norm_eps`: added to the mean square.
        - `reverse`, `sequence_axis`, `state_dtype`, `platform`, `config`: as in [`ejkernel_eqx.GatedLinearAttention`][].
        - `tune_for`: `(x, dt, A, B, C)` or [`ejkernel_eqx.inputs`][]`(x, dt, A, B, C, D=D, ...)`: fix the choice for these inputs now.
        """
        if norm not in (None, "group", "whole"):
            raise ValueError(f"norm: expected 'group', 'whole' or None, received {norm!r}.")
        if not norm_eps >= 0.0:
            raise ValueError(f"norm_eps: expected a number >= 0, received {norm_eps}.")
        self.dt_softplus, self.dt_limit = dt_softplus, check_limit(dt_limit)
        self.norm, self.norm_eps = norm, float(norm_eps)
        self._complete(reverse, sequence_axis, state_dtype, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.StateSpaceV2")
    @over_sequence_axis(lambda operation: operation.norm is not None)
    def __call__(
        self,
        x: Float[AnyArray, "*B T H P"],
        dt: Float[AnyArray, "*B T H"],
        A: Float[AnyArray, " H"],
        B: Float[AnyArray, "*B T G N"],
        C: Float[AnyArray, "*B T G N"],
        *,
        D: Float[AnyArray, " H *P"] | None = None,
        z: Float[AnyArray, "*B T H P"] | None = None,
        dt_bias: Float[AnyArray, " H"] | None = None,
        norm_weight: Float[AnyArray, "H P"] | None = None,
        initial_state: Float[AnyArray, "... H P N"] | None = None,
        cu_seqlens: Int[Numbers, " S+1"] | None = None,
        segment_ids: Int[Numbers, "*B T"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B T H P"], Float[Array, "... H P N"]]:
        """**Arguments:**

        - `x`: `[..., T, H, P]` with any number of leading axes; bf16, f16, f32 (f64 on XLA).
        - `dt`: `[..., T, H]`, any float dtype.
        - `A`: `[H]`, negative, any float dtype.
        - `B`, `C`: `[..., T, G, N]` in the dtype of `x`; `G` divides `H`.
        - `D`: `[H]` or `[H, P]`; `dt_bias`: `[H]`; any float dtype.
        - `z`: the gate `[..., T, H, P]`, any float dtype. `norm_weight`: `[H, P]`, only with `norm`; default 1.
        - `initial_state`: `[..., H, P, N]`, or one per sequence with `cu_seqlens`; default zero.
        - `cu_seqlens`, `segment_ids`, `state_indices`: packed sequences, padding, and a pool of states `[slots, H, P, N]`, as in
            [`ejkernel_eqx.GatedLinearAttention`][].

        **Returns:** `(y, final_state)`: `[..., T, H, P]` in the dtype of `x`, and the state after the last token, in the shape of `initial_state`.
        Raises the errors of [`ejkernel_eqx.GatedLinearAttention`][].
        """
        frame = self._frame(x, cu_seqlens, segment_ids, state_indices, "x", "H P")
        return self._call(frame, _Inputs(x, dt, A, B, C, D, z, dt_bias, norm_weight), initial_state)

    @jax.named_scope("ejkernel_eqx.StateSpaceV2.step")
    def step(
        self,
        x: Float[AnyArray, "*B H P"],
        dt: Float[AnyArray, "*B H"],
        A: Float[AnyArray, " H"],
        B: Float[AnyArray, "*B G N"],
        C: Float[AnyArray, "*B G N"],
        state: Float[AnyArray, "... H P N"],
        *,
        D: Float[AnyArray, " H *P"] | None = None,
        z: Float[AnyArray, "*B H P"] | None = None,
        dt_bias: Float[AnyArray, " H"] | None = None,
        norm_weight: Float[AnyArray, "H P"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B H P"], Float[Array, "... H P N"]]:
        """Processes one token per row, for decoding. Arguments are those of a call without the token axis; `state` is `[..., H, P, N]`,
        `state_indices` and results as in [`ejkernel_eqx.GatedLinearAttention.step`][]."""
        frame = step_frame_of(x, "x", "H P", state_indices)
        return self._call(frame, _Inputs(x, dt, A, B, C, D, z, dt_bias, norm_weight), state)

    def _call(self, frame: Frame, inputs: _Inputs, state: Any) -> tuple[Array, Array]:
        """Runs the recurrence with `B` as key and `x` as value."""
        x = frame.main("x", inputs.x, (None, None), "H P")
        heads, channels = x.shape[-2:]
        B = frame.main("B", inputs.B, (None, None), "G N")
        C = frame.main("C", inputs.C, B.shape[-2:], "G N")
        groups = B.shape[-2]
        if groups == 0 or heads % groups:
            raise ValueError(
                f"B: expected a number of groups that divides the {heads} heads of x, received {groups}; the layout is [..., T, G, N]."
            )
        bias = None if inputs.dt_bias is None else fitting("dt_bias", inputs.dt_bias, (heads,), "H")
        raw = frame.operand("dt", inputs.dt, (heads,), "H")
        rates = raw, decaying_rates(fitting("A", inputs.A, (heads,), "H")), bias
        D = inputs.D
        # One number per head is repeated for its channels, as the recurrence takes `[H, P]`.
        if getattr(D, "ndim", 2) == 1:
            D = jnp.broadcast_to(fitting("D", D, (heads,), "H")[:, None], (heads, channels))
        skip = None if D is None else frame.shared(fitting("D", D, (heads, channels), "H P"))
        # `C` stands for queries, `B` for keys, `x` for values; their state `[N, P]` is kept transposed.
        operands = Operands(C, B, x, 1.0, skip=skip, decay=SCALAR, transposed=True)
        epilogue = self._epilogue(frame, inputs, x, groups)

        def decayed(dt: Array, A: Array, dt_bias: Array | None) -> tuple[Array, Array]:
            dt = frame.mask(time_step(dt, dt_bias, self.dt_softplus, self.dt_limit))
            # Masked separately, because the gradient that a kernel leaves at padding must not reach `A`.
            g = frame.mask(dt * like(finite_rate(A.astype(dt.dtype)), dt))
            return self._run(frame, dataclasses.replace(operands, g=g, beta=dt), state, epilogue)

        if frame.length is not None:
            decayed = again_for_gradients(decayed, self, KEPT)
        return decayed(*rates)

    def _epilogue(self, frame: Frame, inputs: _Inputs, x: Array, groups: int) -> Any:
        weight = inputs.norm_weight
        if weight is not None:
            if self.norm is None:
                raise ValueError(
                    "norm_weight: expected None with norm=None, received an array; only norm='group' and 'whole' use it."
                )
            weight = fitting("norm_weight", weight, x.shape[-2:], "H P")
        z = None if inputs.z is None else frame.operand("z", inputs.z, x.shape[-2:], "H P")
        # Without a gate or a norm, outputs are final as the kernel writes them.
        if z is None and self.norm is None:
            return None

        def epilogue(y: Array) -> Array:
            # The norm is that of the gated output, so the gate comes first.
            gated = wide(y) if z is None else silu_gated(y, z)
            if self.norm is not None:
                gated = rms_norm(gated, weight, groups if self.norm == "group" else 1, self.norm_eps)
            return gated.astype(y.dtype)

        return epilogue
