"""`StateSpaceV1`: the selective scan of Mamba-1."""

from collections import namedtuple
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from .._kernel import Kernel, Plan
from .._shapes import AnyArray, Float, Int, Numbers
from ..core.along import check_sequence_axis
from ..core.arguments import accumulator, check_state_dtype, decaying_rates, finite_rate, fitting
from ..core.frame import Frame, frame_of, step_frame_of
from ..core.plans import plan_of
from ..core.split_tokens import over_sequence_axis
from ..dispatch import PlatformLike
from .along import scan_along
from .core import SCAN, STEP
from .spec import NO_TIME, ScanArrays, ScanSpec, SHARED, StepArrays

_Inputs = namedtuple("_Inputs", "x dt A B C D z dt_bias")
"""The operands of a call on sequences or of a step."""


class StateSpaceV1(Kernel):
    r"""The selective scan of Mamba-1: a state of $N$ numbers per channel, each with its own decay.

    $$h_t = e^{\Delta_t A} \odot h_{t-1} + \Delta_t x_t B_t^\top, \qquad y_t = (h_t C_t + D \odot x_t) \odot \mathrm{silu}(z_t)$$

    with the time step $\Delta_t$ = `dt` `+ dt_bias`, passed through a softplus if `dt_softplus`. `D` and `z` are optional; without them
    their terms are omitted. The $I$ channels form `num_groups` groups, each with its own $B$ and $C$. Memory is linear in `T I`, including the
    gradient's: states are recomputed, not stored.

    Platforms and derivatives: as for [`ejkernel_eqx.GatedLinearAttention`][].

    Source: Gu & Dao, *Mamba: Linear-Time Sequence Modeling with Selective State Spaces* (2023), section 3.
    """

    operation: ClassVar[str] = "state_space_v1"

    dt_softplus: bool = eqx.field(static=True)
    num_groups: int = eqx.field(static=True)
    reverse: bool = eqx.field(static=True)
    sequence_axis: str | None = eqx.field(static=True)
    state_dtype: str | None = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(
        self,
        *,
        dt_softplus: bool = False,
        num_groups: int = 1,
        reverse: bool = False,
        sequence_axis: str | None = None,
        state_dtype: DTypeLike | None = None,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `dt_softplus`: apply a softplus to `dt + dt_bias`.
        - `num_groups`: number of channel groups; with more than one, `B` and `C` have a group axis.
        - `reverse`, `sequence_axis`, `state_dtype`, `platform`, `config`: as in [`ejkernel_eqx.GatedLinearAttention`][].
        - `tune_for`: `(x, dt, A, B, C)` or [`ejkernel_eqx.inputs`][]`(x, dt, A, B, C, D=D, ...)`: fix the choice for these inputs now.
        """
        if num_groups < 1:
            raise ValueError(f"num_groups: expected a positive number, received {num_groups}.")
        self.dt_softplus, self.num_groups, self.reverse = dt_softplus, num_groups, reverse
        self.state_dtype = check_state_dtype(state_dtype)
        self.sequence_axis = check_sequence_axis(sequence_axis)
        self.plan = plan_of(StateSpaceV1, self, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.StateSpaceV1")
    @over_sequence_axis()
    def __call__(
        self,
        x: Float[AnyArray, "*B T I"],
        dt: Float[AnyArray, "*B T I"],
        A: Float[AnyArray, "I N"],
        B: Float[AnyArray, "*B T *G N"],
        C: Float[AnyArray, "*B T *G N"],
        *,
        D: Float[AnyArray, " I"] | None = None,
        z: Float[AnyArray, "*B T I"] | None = None,
        dt_bias: Float[AnyArray, " I"] | None = None,
        initial_state: Float[AnyArray, "... I N"] | None = None,
        cu_seqlens: Int[Numbers, " S+1"] | None = None,
        segment_ids: Int[Numbers, "*B T"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B T I"], Float[Array, "... I N"]]:
        """**Arguments:**

        - `x`: `[..., T, I]` with any number of leading axes; bf16, f16, f32 (f64 on XLA).
        - `dt`, `z`: `[..., T, I]`, any float dtype.
        - `A`: `[I, N]`, negative; `D`, `dt_bias`: `[I]`; any float dtype.
        - `B`, `C`: `[..., T, N]`, or `[..., T, G, N]` with `num_groups` above one; any float dtype.
        - `initial_state`: `[..., I, N]`, or `[S, I, N]` with `cu_seqlens`; default zero.
        - `cu_seqlens` `[S + 1]`, `segment_ids`, `state_indices`: packed sequences, padding, and a pool of states `[slots, I, N]`, as in
            [`ejkernel_eqx.GatedLinearAttention`][].

        **Returns:** `(y, final_state)`: `[..., T, I]` in the dtype of `x`, and the state after the last token, in the shape of `initial_state`.
        Raises the errors of [`ejkernel_eqx.GatedLinearAttention`][].
        """
        frame = frame_of(
            x, "x", "I", cu_seqlens, segment_ids, self.reverse, state_indices, self.sequence_axis
        )
        operands, packing = self._operands(frame, _Inputs(x, dt, A, B, C, D, z, dt_bias)), frame.packing
        if packing.real is not None:
            # A `dt` of 0 would still be a time step after the bias and the softplus.
            padding = jnp.asarray(NO_TIME, operands["dt"].dtype)
            operands["dt"] = jnp.where(packing.real[..., None], operands["dt"], padding)
        spec = ScanSpec(self.dt_softplus, frame.state_dtype(self.state_dtype))
        states = frame.states(initial_state, operands["A"].shape, "I N", spec.state_dtype)
        if frame.is_empty:
            out, final = operands["x"], states.unchanged(spec.state_dtype)
        else:
            operands |= {"starts": packing.starts, "offsets": packing.offsets}
            arrays = ScanArrays(**operands, initial_state=states.entering)
            if frame.along is None:
                out, final = SCAN.in_order(self.plan, self.operation, arrays, spec)
            else:
                out, final = scan_along(frame.along, self.plan, self.operation, arrays, spec)
        return packing.give(out), states.leaving(final)

    @jax.named_scope("ejkernel_eqx.StateSpaceV1.step")
    def step(
        self,
        x: Float[AnyArray, "*B I"],
        dt: Float[AnyArray, "*B I"],
        A: Float[AnyArray, "I N"],
        B: Float[AnyArray, "*B *G N"],
        C: Float[AnyArray, "*B *G N"],
        state: Float[AnyArray, "... I N"],
        *,
        D: Float[AnyArray, " I"] | None = None,
        z: Float[AnyArray, "*B I"] | None = None,
        dt_bias: Float[AnyArray, " I"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B I"], Float[Array, "... I N"]]:
        """Processes one token per row, for decoding. Arguments are those of a call without the token axis; `state` is `[..., I, N]`,
        `state_indices` and results as in [`ejkernel_eqx.GatedLinearAttention.step`][]."""
        frame = step_frame_of(x, "x", "I", state_indices)
        operands = self._operands(frame, _Inputs(x, dt, A, B, C, D, z, dt_bias))
        state, indices = frame.row_states(state, operands["A"].shape, "I N")
        if frame.is_empty:
            return operands["x"], state
        by_row = {name: x for name, x in operands.items() if name not in SHARED}
        rows = operands | frame.as_rows(by_row | {"state": state})
        arrays = StepArrays(**rows, indices=indices)
        return frame.from_rows(STEP.in_order(self.plan, self.operation, arrays, ScanSpec(self.dt_softplus)))

    def _operands(self, frame: Frame, inputs: _Inputs) -> dict[str, Any]:
        """All operands, checked, with zero padding and a group axis in `B` and `C`."""
        x = frame.main("x", inputs.x, (None,), "I")
        channels = x.shape[-1]
        A = decaying_rates(fitting("A", inputs.A, (channels, None), "I N"))
        A = finite_rate(A.astype(accumulator(A.dtype)))
        groups, states = self.num_groups, A.shape[-1]
        if channels % groups:
            raise ValueError(
                f"num_groups: expected a divisor of the {channels} channels of x, received {groups}."
            )

        def over_tokens(name: str, x: Any) -> Any:
            return None if x is None else frame.operand(name, x, (channels,), "I")

        def projection(name: str, x: Any) -> Array:
            if groups == 1 and getattr(x, "ndim", 0) == len(frame.over_tokens) + 1:
                # A single group needs no axis in the call, but kernels see [*, T, 1, N].
                return jnp.expand_dims(frame.operand(name, x, (states,), "N"), -2)
            return frame.operand(name, x, (groups, states), "G N")

        def parameter(name: str, x: Any) -> Any:
            return None if x is None else fitting(name, x, (channels,), "I")

        return {
            "x": x,
            "dt": over_tokens("dt", inputs.dt),
            "A": A,
            "B": projection("B", inputs.B),
            "C": projection("C", inputs.C),
            "D": parameter("D", inputs.D),
            "z": over_tokens("z", inputs.z),
            "dt_bias": parameter("dt_bias", inputs.dt_bias),
        }
