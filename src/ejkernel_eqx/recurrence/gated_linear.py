"""`GatedLinearAttention`: linear attention with a decay for every key channel."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from .._broadcast import like
from .._shapes import AnyArray, Float, Int, Numbers
from ..core.arguments import fitting, wide
from ..core.split_tokens import over_sequence_axis
from .arguments import check_heads, Frame, log_decays, Operands, step_frame_of
from .heads import repeat_heads
from .operation import ScaledRecurrence
from .spec import KEY


class GatedLinearAttention(ScaledRecurrence):
    r"""Gated linear attention (GLA), in time and memory linear in the sequence length.

    $$S_t = \mathrm{diag}(e^{g_t})\, S_{t-1} + k_t v_t^\top, \qquad o_t = \mathrm{scale}\; S_t^\top q_t$$

    with a log-decay $g_t \le 0$ for every key channel. With a bonus $u$, as in RWKV-6, outputs read the state before their token and its
    decay, and the token itself with other weights:

    $$o_t = \mathrm{scale}\; (S_{t-1} + \mathrm{diag}(u)\, k_t v_t^\top)^\top q_t$$

    Let $R$ be the largest head count. Output head $r$ reads head
    $\lfloor r / (R / n) \rfloor$ of an operand with $n$ heads. The state has the largest head count of `k`, `v`, `g`.

    Platforms: Triton (`"triton"`, `"triton-interpret"`), XLA (`"xla"`, the default on TPU), Pallas on TPU (`"pallas"`,
    `"pallas-interpret"`; steps are XLA's). Pallas runs if it is requested by name, or where it has been measured to be
    faster. Differentiable in reverse mode in every float argument and through both results; `platform="xla"` also
    supports forward mode and second derivatives.

    With a bonus Pallas does not run.

    Sources: Yang et al., *Gated Linear Attention Transformers with Hardware-Efficient Training* (2023), section 4; with a bonus: Peng et
    al., *Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence* (2024).
    """

    operation: ClassVar[str] = "gated_linear_attention"
    __init__ = ScaledRecurrence.__init__

    @jax.named_scope("ejkernel_eqx.GatedLinearAttention")
    @over_sequence_axis()
    def __call__(
        self,
        q: Float[AnyArray, "*B T H D"],
        k: Float[AnyArray, "*B T H D"],
        v: Float[AnyArray, "*B T H V"],
        g: Float[AnyArray, "*B T H D"],
        *,
        bonus: Float[AnyArray, "H D"] | None = None,
        initial_state: Float[AnyArray, "... H D V"] | None = None,
        cu_seqlens: Int[Numbers, " N+1"] | None = None,
        segment_ids: Int[Numbers, "*B T"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B T R V"], Float[Array, "... H D V"]]:
        """**Arguments:**

        - `q`, `k`: `[..., T, H, D]` with any number of leading axes; bf16, f16, f32 (f64 on XLA). Head counts may differ, but each must divide
            the largest.
        - `v`: `[..., T, H, V]` in the dtype of `q`.
        - `g`: log-decays `[..., T, H, D]` of at most 0; any float dtype.
        - `bonus`: $u$, `[H, D]` with a head count that divides the largest; any float dtype.
        - `initial_state`: `[..., H, D, V]`, or `[N, H, D, V]` with `cu_seqlens`; default zero.
        - `cu_seqlens`: offsets `[N + 1]` of packed sequences (without leading axes); the output of tokens past the last offset is 0.
        - `segment_ids`: `[..., T]`; a new segment starts where the id changes. Negative ids are padding: the state is unchanged and the output
            is 0. The initial state enters the row's first segment; the final state is that of the last segment.
        - `state_indices`: ints, one per packed sequence or per row `[B]`. `initial_state` is then a pool `[slots, H, D,
            V]`. Each sequence reads its initial state from its slot and writes its final state there. The whole pool is
            returned. -1 starts from zero and stores nothing. Slots must be distinct.

        **Returns:**

        `(out, final_state)`: `[..., T, R, V]` in the dtype of `v`, and the state after the last token, in the shape of `initial_state`. Raises
        `ValueError` for invalid arguments, and `UnsupportedError` if no platform, or not the requested one, supports the call.
        """
        frame = self._frame(q, cu_seqlens, segment_ids, state_indices)
        return self._with_bonus(frame, self._operands(frame, q, k, v, g), bonus, initial_state)

    @jax.named_scope("ejkernel_eqx.GatedLinearAttention.step")
    def step(
        self,
        q: Float[AnyArray, "*B H D"],
        k: Float[AnyArray, "*B H D"],
        v: Float[AnyArray, "*B H V"],
        g: Float[AnyArray, "*B H D"],
        state: Float[AnyArray, "... H D V"],
        *,
        bonus: Float[AnyArray, "H D"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B R V"], Float[Array, "... H D V"]]:
        """Processes one token per row, for decoding.

        **Arguments:**

        - `q`, `k`, `g`: `[..., H, D]`; `v`: `[..., H, V]`: as in a call, without the token axis. `bonus`: as in a call.
        - `state`: `[..., H, D, V]`; with `state_indices` a pool `[slots, H, D, V]`. Updated in place if donated.
        - `state_indices`: int `[B]`, the slot of each row; for -1 the output is 0 and nothing is written. Slots must be distinct.

        **Returns:**

        `(out, state)`: `[..., R, V]` and the new states (with `state_indices`, the whole pool). Raises the errors of a call.
        """
        frame = step_frame_of(q, "q", "H D", state_indices)
        return self._with_bonus(frame, self._operands(frame, q, k, v, g), bonus, state)

    def _with_bonus(self, frame: Frame, operands: Operands, bonus: Any, state: Any) -> tuple[Array, Any]:
        if bonus is None:
            return self._run(frame, operands, state)
        q, k, v = (wide(x) for x in (operands.q, operands.k, operands.v))
        heads = max(check_heads(operands), q.shape[-2])
        bonus = fitting("bonus", bonus, (None, q.shape[-1]), "H D").astype(q.dtype)
        if bonus.shape[0] == 0 or heads % bonus.shape[0]:
            raise ValueError(
                f"bonus: expected a head count that divides the largest, {heads}, received shape {bonus.shape}."
            )
        q, k, v, bonus = (repeat_heads(x, -2, heads) for x in (q, k, v, bonus))
        # Padding has no values, so it adds nothing; nor does a row without a slot.
        own = operands.resolved_scale * jnp.sum(q * like(bonus, q) * k, -1, keepdims=True) * v
        if frame.length is None and frame.state_indices is not None:
            own = jnp.where((jnp.asarray(frame.state_indices) >= 0)[:, None, None], own, 0)
        add = lambda out: (wide(out) + own).astype(out.dtype)
        return self._run(frame, dataclasses.replace(operands, before=True), state, add)

    def _operands(self, frame: Frame, q: AnyArray, k: AnyArray, v: AnyArray, g: AnyArray) -> Operands:
        g = log_decays("g", frame.operand("g", g, (None, q.shape[-1]), "H D"))
        return Operands(*frame.qkv(q, k, v), self.scale, g, decay=KEY)
