"""`GatedDeltaRule` and `DeltaRule`: writing a value replaces what its key held before."""

from typing import Any, ClassVar

import equinox as eqx
import jax
from jax import Array
from jax.typing import DTypeLike

from .._shapes import AnyArray, Float, Int, Numbers
from ..core.split_tokens import over_sequence_axis
from ..dispatch import PlatformLike
from .arguments import check_scale, step_frame_of
from .delta import delta_operands, DeltaOptions, GatedDelta
from .operation import Recurrence
from .spec import SCALAR


class GatedDeltaRule(GatedDelta):
    r"""The gated delta rule (Gated DeltaNet, Qwen3-Next): a delta rule with one decay per head.

    $$\bar S_t = e^{g_t} S_{t-1}, \qquad S_t = \bar S_t + \beta_t k_t (v_t - \bar S_t^\top k_t)^\top, \qquad
      o_t = \mathrm{scale}\; S_t^\top q_t$$

    with one log-decay $g_t \le 0$ per head and token. Options, heads and platforms are those of [`ejkernel_eqx.KernelDeltaAttention`][], but
    `g` and `dt_bias` have no channel axis. Qwen3-Next's layer is `GatedDeltaRule(use_qk_l2norm=True, gate="softplus", beta_sigmoid=True)`.

    Source: Yang et al., *Gated Delta Networks: Improving Mamba2 with Delta Rule* (2024), section 3.
    """

    operation: ClassVar[str] = "gated_delta_rule"
    __init__ = GatedDelta.__init__
    decay: ClassVar[str] = SCALAR


class DeltaRule(Recurrence):
    r"""The delta rule (DeltaNet): a state without decay, in which new values overwrite old ones.

    $$S_t = S_{t-1} + \beta_t k_t (v_t - S_{t-1}^\top k_t)^\top, \qquad o_t = \mathrm{scale}\; S_t^\top q_t$$

    Options, heads and platforms are those of [`ejkernel_eqx.KernelDeltaAttention`][], except for the gate.

    Sources: Schlag et al., *Linear Transformers Are Secretly Fast Weight Programmers* (2021); Yang et al., *Parallelizing Linear
    Transformers with the Delta Rule over Sequence Length* (2024).
    """

    operation: ClassVar[str] = "delta_rule"

    scale: float | None = eqx.field(static=True)
    options: DeltaOptions = eqx.field(static=True)

    def __init__(
        self,
        scale: float | None = None,
        *,
        use_qk_l2norm: bool = False,
        beta_sigmoid: bool = False,
        allow_neg_eigval: bool = False,
        reverse: bool = False,
        sequence_axis: str | None = None,
        state_dtype: DTypeLike | None = None,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:** as for [`ejkernel_eqx.KernelDeltaAttention`][], without the gate's options; inputs of `tune_for` are without `g`."""
        self.scale = check_scale(scale)
        self.options = DeltaOptions(use_qk_l2norm, beta_sigmoid, allow_neg_eigval)
        self._complete(reverse, sequence_axis, state_dtype, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.DeltaRule")
    @over_sequence_axis()
    def __call__(
        self,
        q: Float[AnyArray, "*B T H D"],
        k: Float[AnyArray, "*B T H D"],
        v: Float[AnyArray, "*B T H V"],
        beta: Float[AnyArray, "*B T H"],
        *,
        initial_state: Float[AnyArray, "... H D V"] | None = None,
        cu_seqlens: Int[Numbers, " N+1"] | None = None,
        segment_ids: Int[Numbers, "*B T"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B T R V"], Float[Array, "... H D V"]]:
        """**Arguments**, **returns**, **raises:** as for [`ejkernel_eqx.KernelDeltaAttention`][], without `g`, `A_log` and `dt_bias`."""
        frame = self._frame(q, cu_seqlens, segment_ids, state_indices)
        operands = delta_operands(frame, self.options, self.scale, (q, k, v), beta)
        return self._run(frame, operands, initial_state)

    @jax.named_scope("ejkernel_eqx.DeltaRule.step")
    def step(
        self,
        q: Float[AnyArray, "*B H D"],
        k: Float[AnyArray, "*B H D"],
        v: Float[AnyArray, "*B H V"],
        beta: Float[AnyArray, "*B H"],
        state: Float[AnyArray, "... H D V"],
        *,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B R V"], Float[Array, "... H D V"]]:
        """Processes one token per row, for decoding. Arguments are those of a call without the token axis; `state`, `state_indices` and results as in
        [`ejkernel_eqx.GatedLinearAttention.step`][]."""
        frame = step_frame_of(q, "q", "H D", state_indices)
        operands = delta_operands(frame, self.options, self.scale, (q, k, v), beta)
        return self._run(frame, operands, state)
