"""`DeltaProduct`: a delta rule with several writes per token, on the kernels for one."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._shapes import AnyArray, Float, Int, Numbers
from ..core.split_tokens import over_sequence_axis
from .arguments import Frame, Operands, step_frame_of
from .delta import GatedOptions, GateInputs, transformed, with_decays
from .gates import LOG
from .spec import SCALAR


class DeltaProduct(GatedOptions):
    r"""DeltaProduct: a delta rule that writes $M$ times per token. Its transition is a product of $M$ generalised Householder matrices.

    $$S_{t,0} = e^{g_t} S_{t-1}, \qquad
      S_{t,m} = S_{t,m-1} + \beta_{t,m} k_{t,m} (v_{t,m} - S_{t,m-1}^\top k_{t,m})^\top, \qquad
      S_t = S_{t,M}, \qquad o_t = \mathrm{scale}\; S_t^\top q_t$$

    Without `g` there is no decay: this is DeltaProduct. With it, it is Gated DeltaProduct, and decays act once per token, before its first write.
    With $M = 1$ it is [`ejkernel_eqx.DeltaRule`][] or [`ejkernel_eqx.GatedDeltaRule`][]. Symmetries of order two, such as a swap, need one
    write with $\beta = 2$; rotations in a plane need two.

    The kernels are those of the delta rule, on $M T$ tokens, of which every $M$-th is read. So time and memory are $M$ times those of
    [`ejkernel_eqx.GatedDeltaRule`][]. Options, heads and platforms are those of [`ejkernel_eqx.KernelDeltaAttention`][], with `g` and
    `dt_bias` as in [`ejkernel_eqx.GatedDeltaRule`][].

    Source: Siems et al., *DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products* (2025), section 3.
    """

    operation: ClassVar[str] = "delta_product"
    __init__ = GatedOptions.__init__

    @jax.named_scope("ejkernel_eqx.DeltaProduct")
    @over_sequence_axis()
    def __call__(
        self,
        q: Float[AnyArray, "*B T H D"],
        k: Float[AnyArray, "*B T M H D"],
        v: Float[AnyArray, "*B T M H V"],
        beta: Float[AnyArray, "*B T M H"],
        *,
        g: Float[AnyArray, "*B T H"] | None = None,
        A_log: Float[AnyArray, " H"] | None = None,
        dt_bias: Float[AnyArray, " H"] | None = None,
        initial_state: Float[AnyArray, "... H D V"] | None = None,
        cu_seqlens: Int[Numbers, " N+1"] | None = None,
        segment_ids: Int[Numbers, "*B T"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B T R V"], Float[Array, "... H D V"]]:
        """**Arguments:**

        - `q`: `[..., T, H, D]`; `k`: `[..., T, M, H, D]`; `v`: `[..., T, M, H, V]`, with the writes of a token in their order, also with `reverse`;
            bf16, f16, f32 (f64 on XLA), all in the dtype of `q`. Heads as in [`ejkernel_eqx.GatedLinearAttention`][].
        - `beta`: write strengths `[..., T, M, H]`, raw with `beta_sigmoid`; any float dtype.
        - `g`: `[..., T, H]`, log-decays of at most 0, or raw gates, depending on `gate`; any float dtype. `None` for no decay.
        - `A_log`, `dt_bias`: `[H]`, with the heads of `g`. Only for gates that use them.
        - `initial_state`, `cu_seqlens`, `segment_ids`, `state_indices`: as in [`ejkernel_eqx.GatedLinearAttention`][], in tokens, not in writes.

        **Returns:** `(out, final_state)`: `[..., T, R, V]` in the dtype of `v`, and `[..., H, D, V]` (`[N, H, D, V]` with `cu_seqlens`). Raises the
        errors of [`ejkernel_eqx.GatedLinearAttention`][].
        """
        frame = self._frame(q, cu_seqlens, segment_ids, state_indices)
        return self._decayed(frame, (q, k, v), beta, GateInputs(g, A_log, dt_bias), initial_state)

    @jax.named_scope("ejkernel_eqx.DeltaProduct.step")
    def step(
        self,
        q: Float[AnyArray, "*B H D"],
        k: Float[AnyArray, "*B M H D"],
        v: Float[AnyArray, "*B M H V"],
        beta: Float[AnyArray, "*B M H"],
        state: Float[AnyArray, "... H D V"],
        *,
        g: Float[AnyArray, "*B H"] | None = None,
        A_log: Float[AnyArray, " H"] | None = None,
        dt_bias: Float[AnyArray, " H"] | None = None,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B R V"], Float[Array, "... H D V"]]:
        """Processes one token per row, for decoding. Arguments are those of a call without the token axis; `state`, `state_indices` and results as in
        [`ejkernel_eqx.GatedLinearAttention.step`][]."""
        frame = step_frame_of(q, "q", "H D", state_indices)
        return self._decayed(frame, (q, k, v), beta, GateInputs(g, A_log, dt_bias), state)

    def _decayed(
        self, frame: Frame, qkv: tuple[Any, Any, Any], beta: Any, inputs: GateInputs, state: Any
    ) -> tuple[Array, Array]:
        """Runs the recurrence with the decays that a gate determines, if there are any."""
        q, k, v = qkv
        q = frame.main("q", q, (None, None), "H D")
        k = frame.main("k", k, (None, None, q.shape[-1]), "M H D")
        writes = k.shape[-3]
        if writes < 1:
            raise ValueError(
                f"k: expected at least one write per token, received shape {k.shape}; its axes are [..., T, M, H, D]."
            )
        v = frame.main("v", v, (writes, None, None), "M H V")
        beta = frame.operand("beta", beta, (writes, None), "M H")
        operands = transformed(frame, self.options, self.scale, (q, k, v), beta)
        if inputs.g is not None:
            run = lambda g: self._written(frame, dataclasses.replace(operands, g=g, decay=SCALAR), state)
            return with_decays(self, frame, inputs, (), run)
        if self.options.gate != LOG or any(x is not None for x in inputs):
            raise ValueError(
                "g: expected an array with A_log, dt_bias or a gate other than 'log', received None; without g there is no decay."
            )
        return self._written(frame, operands, state)

    def _written(self, frame: Frame, operands: Operands, state: Any) -> tuple[Array, Array]:
        """Runs the recurrence with each write as a token. Decays stand at the first of a token's writes, and queries at the last."""
        at, writes = len(frame.over_tokens), operands.k.shape[-3]

        def placed(x: Array, before: int, after: int) -> Array:
            x = jnp.expand_dims(x, at)
            return jnp.pad(x, [(before, after) if axis == at else (0, 0) for axis in range(x.ndim)])

        arrays: dict[str, Any] = {"k": operands.k, "v": operands.v, "beta": operands.beta}
        arrays["q"] = placed(operands.q, writes - 1, 0)
        if operands.g is not None:
            arrays["g"] = placed(operands.g, 0, writes - 1)
        if frame.length is None:
            # The rows of a step have no tokens: there is a step for each write.
            outs = []
            for n in range(writes):
                one = {name: lax.index_in_dim(x, n, at, keepdims=False) for name, x in arrays.items()}
                out, state = self._run(frame, dataclasses.replace(operands, **one), state)
                outs.append(out)
            return outs[-1], state
        every = frame.repeated(writes)
        arrays = {name: x.reshape(*every.over_tokens, *x.shape[at + 1 :]) for name, x in arrays.items()}
        out, state = self._run(every, dataclasses.replace(operands, **arrays), state)
        out = out.reshape(*frame.over_tokens, writes, *out.shape[at:])
        # Outputs are in the caller's order, operands in that of the kernels.
        return lax.index_in_dim(out, 0 if self.reverse else writes - 1, at, keepdims=False), state
