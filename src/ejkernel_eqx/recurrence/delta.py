"""Shared by the delta rules: options, operands, and everything of the gated ones."""

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

import equinox as eqx
import jax
from jax import Array
from jax.typing import DTypeLike

from .._kernel import replaced
from .._shapes import AnyArray, Float, Int, Numbers
from ..core.arguments import fitting
from ..core.plans import again_for_gradients
from ..core.split_tokens import over_sequence_axis
from ..dispatch import PlatformLike
from .arguments import check_scale, Frame, log_decays, Operands, step_frame_of
from .core import KEPT
from .gates import check_gate, l2norm, LOG, log_decay, write_strength
from .operation import Recurrence
from .spec import KEY

G = TypeVar("G", bound="GatedOptions")


@dataclasses.dataclass(frozen=True)
class DeltaOptions:
    """Transformations of a delta rule's operands before it runs. Call `check` first."""

    use_qk_l2norm: bool = False
    beta_sigmoid: bool = False
    allow_neg_eigval: bool = False
    gate: str = LOG
    lower_bound: float | None = None

    def check(self) -> "DeltaOptions":
        return dataclasses.replace(self, lower_bound=check_gate(self.gate, self.lower_bound))


GateInputs = namedtuple("GateInputs", "g A_log dt_bias")
"""The arguments of a call that determine the decay."""


def delta_operands(
    frame: Frame, options: DeltaOptions, scale: float | None, qkv: tuple[Any, Any, Any], beta: Any
) -> Operands:
    """The operands of a delta rule without decay."""
    return transformed(frame, options, scale, frame.qkv(*qkv), frame.operand("beta", beta, (None,), "H"))


def transformed(
    frame: Frame, options: DeltaOptions, scale: float | None, qkv: tuple[Array, Array, Array], beta: Array
) -> Operands:
    """The operands of a delta rule without decay, from arrays that have been checked."""
    q, k, v = qkv
    if options.use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    # Masked after the sigmoid, which makes the zeros of padding one half.
    beta = frame.mask(write_strength(beta, options.beta_sigmoid, options.allow_neg_eigval))
    return Operands(q, k, v, scale, beta=beta, delta=True)


def gate_operands(
    frame: Frame, options: DeltaOptions, inputs: GateInputs, channels: tuple[int, ...]
) -> tuple[Array, Array | None, Array | None]:
    """Arrays that determine the log-decays of every token and head, and of every key channel if there are `channels`."""
    letters = "H D" if channels else "H"
    raw = frame.operand("g", inputs.g, (None, *channels), letters)
    heads = raw.shape[-1 - len(channels)]
    A_log, dt_bias = inputs.A_log, inputs.dt_bias
    if options.gate == LOG:
        for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
            if x is not None:
                raise ValueError(
                    f"{name}: expected None with gate='log', received an array; only gate='softplus' and 'bounded' use it."
                )
        raw = log_decays("g", raw)
    elif A_log is None:
        raise ValueError(f"A_log: expected an array [H] with gate={options.gate!r}, received None.")
    else:
        A_log = fitting("A_log", A_log, (heads,), "H").reshape(heads, *(1 for _ in channels))
        dt_bias = None if dt_bias is None else fitting("dt_bias", dt_bias, (heads, *channels), letters)
    return raw, A_log, dt_bias


def with_decays(
    operation: Any,
    frame: Frame,
    inputs: GateInputs,
    channels: tuple[int, ...],
    run: Callable[[Array], tuple[Array, Array]],
) -> tuple[Array, Array]:
    """`run` on the log-decays that the gate of an operation with `DeltaOptions` determines."""
    options = operation.options

    def decayed(raw: Array, A_log: Array | None, dt_bias: Array | None) -> tuple[Array, Array]:
        return run(frame.mask(log_decay(options.gate, options.lower_bound, raw, A_log, dt_bias)))

    if options.gate != LOG and frame.length is not None:
        # Log-decays take twice the memory of what they come from, or more: the gradient computes them again.
        decayed = again_for_gradients(decayed, operation, KEPT)
    return decayed(*gate_operands(frame, options, inputs, channels))


class GatedOptions(Recurrence):
    """The options of delta rules that may have a gate."""

    scale: float | None = eqx.field(static=True)
    options: DeltaOptions = eqx.field(static=True)

    def __init__(
        self,
        scale: float | None = None,
        *,
        use_qk_l2norm: bool = False,
        gate: Literal["log", "softplus", "bounded"] = "log",
        lower_bound: float | None = None,
        beta_sigmoid: bool = False,
        allow_neg_eigval: bool = False,
        reverse: bool = False,
        sequence_axis: str | None = None,
        state_dtype: DTypeLike | None = None,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `scale`: scale of the outputs; default `D**-0.5`.
        - `use_qk_l2norm`: normalise `q` and `k` inside the operation.
        - `gate`: the form of `g`: log-decays, or raw gates for one of two formulas.
        - `lower_bound`: the smallest log-decay, negative; required with `gate="bounded"`, else `None`.
        - `beta_sigmoid`: `beta` is raw, and its sigmoid is used.
        - `allow_neg_eigval`: double `beta`, after the sigmoid.
        - `reverse`, `sequence_axis`, `state_dtype`, `platform`, `config`: as in [`ejkernel_eqx.GatedLinearAttention`][].
        - `tune_for`: `(q, k, v, g, beta)` or [`ejkernel_eqx.inputs`][]`(q, k, v, g, beta, A_log=...)`, for `DeltaProduct` `(q, k, v, beta)` or
            `inputs(q, k, v, beta, g=...)`: fix the choice for these inputs now.
        """
        self.scale = check_scale(scale)
        self.options = DeltaOptions(use_qk_l2norm, beta_sigmoid, allow_neg_eigval, gate, lower_bound).check()
        self._complete(reverse, sequence_axis, state_dtype, platform, config, tune_for)

    def of_normalised(self: G) -> G:
        """This operation for queries and keys that are normalised already."""
        return replaced(self, options=dataclasses.replace(self.options, use_qk_l2norm=False))


class GatedDelta(GatedOptions):
    """A gated delta rule: everything that [`ejkernel_eqx.KernelDeltaAttention`][] and [`ejkernel_eqx.GatedDeltaRule`][] share."""

    decay: ClassVar[str]
    """`KEY`: one decay per key channel; `SCALAR`: one per head."""
    __init__ = GatedOptions.__init__

    @over_sequence_axis()
    def __call__(
        self,
        q: Float[AnyArray, "*B T H D"],
        k: Float[AnyArray, "*B T H D"],
        v: Float[AnyArray, "*B T H V"],
        g: Float[AnyArray, "*B T H *D"],
        beta: Float[AnyArray, "*B T H"],
        *,
        A_log: Float[AnyArray, " H"] | None = None,
        dt_bias: Float[AnyArray, " H *D"] | None = None,
        initial_state: Float[AnyArray, "... H D V"] | None = None,
        cu_seqlens: Int[Numbers, " N+1"] | None = None,
        segment_ids: Int[Numbers, "*B T"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B T R V"], Float[Array, "... H D V"]]:
        """**Arguments:**

        - `q`, `k`: `[..., T, H, D]`; `v`: `[..., T, H, V]`; bf16, f16, f32 (f64 on XLA). Heads as in [`ejkernel_eqx.GatedLinearAttention`][].
        - `g`: `[..., T, H, D]`, for `GatedDeltaRule` `[..., T, H]`: log-decays of at most 0, or raw gates, depending on `gate`; any float dtype.
        - `beta`: write strengths `[..., T, H]`, raw with `beta_sigmoid`; any float dtype.
        - `A_log`: `[H]`; `dt_bias`: `[H, D]`, for `GatedDeltaRule` `[H]`, or `None` for 0; with the heads of `g`. Only for gates that use them.
        - `initial_state`, `cu_seqlens`, `segment_ids`, `state_indices`: as in [`ejkernel_eqx.GatedLinearAttention`][].

        **Returns:** `(out, final_state)`: `[..., T, R, V]` in the dtype of `v`, and `[..., H, D, V]` (`[N, H, D, V]` with `cu_seqlens`). Raises the
        errors of [`ejkernel_eqx.GatedLinearAttention`][].
        """
        with jax.named_scope(f"ejkernel_eqx.{type(self).__name__}"):
            frame = self._frame(q, cu_seqlens, segment_ids, state_indices)
            operands = delta_operands(frame, self.options, self.scale, (q, k, v), beta)
            return self._decayed(frame, operands, GateInputs(g, A_log, dt_bias), initial_state)

    def step(
        self,
        q: Float[AnyArray, "*B H D"],
        k: Float[AnyArray, "*B H D"],
        v: Float[AnyArray, "*B H V"],
        g: Float[AnyArray, "*B H *D"],
        beta: Float[AnyArray, "*B H"],
        state: Float[AnyArray, "... H D V"],
        *,
        A_log: Float[AnyArray, " H"] | None = None,
        dt_bias: Float[AnyArray, " H *D"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B R V"], Float[Array, "... H D V"]]:
        """Processes one token per row, for decoding. Arguments are those of a call without the token axis; `state`, `state_indices` and results as in
        [`ejkernel_eqx.GatedLinearAttention.step`][]."""
        with jax.named_scope(f"ejkernel_eqx.{type(self).__name__}.step"):
            frame = step_frame_of(q, "q", "H D", state_indices)
            operands = delta_operands(frame, self.options, self.scale, (q, k, v), beta)
            return self._decayed(frame, operands, GateInputs(g, A_log, dt_bias), state)

    def _decayed(
        self, frame: Frame, operands: Operands, inputs: GateInputs, state: Any
    ) -> tuple[Array, Array]:
        """Runs the recurrence with the decays that a gate determines."""
        channels = operands.q.shape[-1:] if self.decay == KEY else ()
        run = lambda g: self._run(frame, dataclasses.replace(operands, g=g, decay=self.decay), state)
        return with_decays(self, frame, inputs, channels, run)
