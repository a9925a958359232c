"""`KernelDeltaAttention`: the delta rule with a decay for every key channel."""

from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from .._kernel import Kernel, Plan
from ..core.arguments import check_state_dtype
from .arguments import check_scale, Frame, frame_of, Operands, step_frame_of
from .delta import delta_operands, DeltaOptions, GateInputs, with_gate
from .operation import plan_of, register, run, run_step
from .spec import KEY

register("kernel_delta_attention")


class KernelDeltaAttention(Kernel):
    r"""Kimi delta attention (KDA): a delta rule that forgets each key channel at its own rate.

    $$\bar S_t = \mathrm{diag}(e^{g_t})\, S_{t-1}, \qquad S_t = \bar S_t + \beta_t k_t (v_t - \bar S_t^\top k_t)^\top, \qquad
      o_t = \mathrm{scale}\; S_t^\top q_t$$

    The options are applied first, in float32. With raw gates $r$ and write strengths $b$ as they are given:

    - `gate="log"`: $g = r \le 0$; `"softplus"`: $g = -e^{A} \log(1 + e^{r + \mathrm{bias}})$; `"bounded"`:
      $g = \mathrm{lower\_bound} \cdot \sigma(e^{A} (r + \mathrm{bias}))$, with $A$ = `A_log` and bias = `dt_bias`;
    - `use_qk_l2norm`: $q$ and $k$ are divided by $\sqrt{\sum x^2 + 10^{-6}}$;
    - `beta_sigmoid`: $\beta = \sigma(b)$; `allow_neg_eigval` doubles $\beta$, so that the eigenvalues of
      $I - \beta k k^\top$ lie in $[-1, 1]$ for keys of norm 1.

    Output head $r$ reads head $\lfloor r / (R / n) \rfloor$ of an operand with $n$ heads, $R$ being the largest count; the state has as many
    heads as the largest of `k`, `v`, `g`, `beta`.

    Platforms: Triton (`"triton"`, `"triton-interpret"`), XLA (`"xla"`). Differentiable in reverse mode in every float argument and through both
    results; `platform="xla"` in forward mode and twice as well.

    Sources: Kimi Team, *Kimi Linear: An Expressive, Efficient Attention Architecture* (2025); Yang et al., *Gated Delta Networks* (2024);
    Grazzi et al., *Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues* (2024).
    """

    operation: ClassVar[str] = "kernel_delta_attention"

    scale: float | None = eqx.field(static=True)
    options: DeltaOptions = eqx.field(static=True)
    reverse: bool = eqx.field(static=True)
    state_dtype: str | None = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

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
        state_dtype: DTypeLike | None = None,
        platform: str | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `scale`: of the outputs; default `D**-0.5`.
        - `use_qk_l2norm`: normalise `q` and `k` here.
        - `gate`: what `g` is: log-decays, or raw numbers for one of two formulas.
        - `lower_bound`: the least log-decay, negative; with `gate="bounded"` only, and needed there.
        - `beta_sigmoid`: `beta` is raw, its sigmoid is taken.
        - `allow_neg_eigval`: `beta` is doubled, after the sigmoid.
        - `reverse`, `state_dtype`, `platform`, `config`: as in [`ejkernel_eqx.GatedLinearAttention`][].
        - `tune_for`: `(q, k, v, g, beta)` or [`ejkernel_eqx.inputs`][]`(q, k, v, g, beta, A_log=...)`: settle the choice for these now.
        """
        self.scale, self.reverse = check_scale(scale), reverse
        self.options = DeltaOptions(use_qk_l2norm, beta_sigmoid, allow_neg_eigval, gate, lower_bound).check()
        self.state_dtype = check_state_dtype(state_dtype)
        self.plan = plan_of(KernelDeltaAttention, self, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.KernelDeltaAttention")
    def __call__(
        self,
        q: Float[Array, "..."],
        k: Float[Array, "..."],
        v: Float[Array, "..."],
        g: Float[Array, "..."],
        beta: Float[Array, "..."],
        *,
        A_log: Float[Array, "..."] | None = None,
        dt_bias: Float[Array, "..."] | None = None,
        initial_state: Float[Array, "..."] | None = None,
        cu_seqlens: Int[Array, "..."] | None = None,
        segment_ids: Int[Array, "..."] | None = None,
        state_indices: Int[Array, "..."] | None = None,
    ) -> tuple[Array, Array]:
        """**Arguments:**

        - `q`, `k`: `[..., T, H, D]`, any number of leading axes, any head counts of which each divides the largest. bf16, f16, f32 (f64 on XLA).
        - `v`: `[..., T, H, V]`, the dtype of `q`.
        - `g`: `[..., T, H, D]`, log-decays of at most 0, or raw as `gate` says; any float dtype.
        - `beta`: write strengths `[..., T, H]`, or raw; any float dtype.
        - `A_log`: `[H]`; `dt_bias`: `[H, D]` or `None` for 0; the heads of `g`. For the gates that use them.
        - `initial_state`, `cu_seqlens`, `segment_ids`, `state_indices`: as in [`ejkernel_eqx.GatedLinearAttention`][].

        **Returns:**

        `(out, final_state)`: `[..., T, R, V]` in the dtype of `v`, and `[..., H, D, V]` (`[N, H, D, V]` with `cu_seqlens`). Raises `ValueError` for
        arguments that do not fit, `UnsupportedError` if no platform (or not the given one) supports the call.
        """
        frame = frame_of(q, "q", "H D", cu_seqlens, segment_ids, self.reverse, state_indices)
        operands = self._operands(frame, (q, k, v), beta, GateInputs(g, A_log, dt_bias))
        return run(self.plan, frame, operands, initial_state, self.state_dtype)

    @jax.named_scope("ejkernel_eqx.KernelDeltaAttention.step")
    def step(
        self,
        q: Float[Array, "..."],
        k: Float[Array, "..."],
        v: Float[Array, "..."],
        g: Float[Array, "..."],
        beta: Float[Array, "..."],
        state: Float[Array, "..."],
        *,
        A_log: Float[Array, "..."] | None = None,
        dt_bias: Float[Array, "..."] | None = None,
        state_indices: Int[Array, "..."] | None = None,
    ) -> tuple[Array, Array]:
        """One token of every row, for decoding.

        **Arguments:**

        - `q`, `k`, `g`: `[..., H, D]`; `v`: `[..., H, V]`; `beta`: `[..., H]`; `A_log`, `dt_bias` as in a call.
        - `state`, `state_indices`: as in [`ejkernel_eqx.GatedLinearAttention.step`][].

        **Returns:**

        `(out, state)`: `[..., R, V]` and the new states (the whole pool). Raises as a call does.
        """
        frame = step_frame_of(q, "q", "H D", state_indices)
        operands = self._operands(frame, (q, k, v), beta, GateInputs(g, A_log, dt_bias))
        return run_step(self.plan, frame, operands, state)

    def _operands(
        self, frame: Frame, qkv: tuple[Array, Array, Array], beta: Array, gate: GateInputs
    ) -> Operands:
        operands = delta_operands(frame, self.options, self.scale, qkv, beta)
        return with_gate(frame, self.options, operands, gate, KEY)
