"""`Attention`: plain attention that also returns its weights, differentiable in every mode."""

from typing import ClassVar

import jax
from jax import Array
from jaxtyping import PRNGKeyArray

from .._jitted import compiled_once
from .._shapes import AnyArray, Bool, Float, Int, Numbers
from ..core import Named
from ..dispatch import PlatformLike
from ..dispatch.labels import kernel_scope
from ..parallel import mapped
from .arguments import MaskInputs, resolve, ScoreInputs, ScoreOptions, Windowed
from .core import arrays_of, ATTEND, axes_of, problem_of
from .masks.mask import Mask
from .reference import attend_with_weights
from .spec import AttentionArrays, AttentionSpec


class Attention(Windowed):
    r"""Attention that computes the full score matrix and returns the weights along with the output.

    Same equation and arguments as [`ejkernel_eqx.FlashAttention`][], in memory of order $T S$. Use it to inspect weights, for
    forward-mode and higher derivatives, and as the reference for the fast kernels. Accumulates in float32 (float64 for
    float64 inputs). XLA only. Source: Vaswani et al., *Attention is all you need* (2017), section 3.2.1.
    """

    operation: ClassVar[str] = "attention"

    def __init__(
        self,
        causal: bool = False,
        sliding_window: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        dropout_rate: float = 0.0,
        *,
        platform: PlatformLike | None = None,
    ):
        """**Arguments:** as for [`ejkernel_eqx.FlashAttention`][]; `platform` is `None` or `"xla"`."""
        self.options = ScoreOptions(logits_soft_cap, softmax_scale, dropout_rate)
        self._complete(causal, sliding_window, platform, None, None)

    @jax.named_scope("ejkernel_eqx.Attention")
    def __call__(
        self,
        q: Float[AnyArray, "*B T H D"],
        k: Float[AnyArray, "*B S K D"],
        v: Float[AnyArray, "*B S K V"],
        *,
        bias: Float[AnyArray, "#*B #H #T #S"] | None = None,
        mask: Bool[Numbers, "#*B #H #T #S"] | Mask | None = None,
        segment_ids: Int[Numbers, "*B T"] | None = None,
        kv_segment_ids: Int[Numbers, "*B S"] | None = None,
        cu_seqlens: Int[Numbers, " N+1"] | None = None,
        kv_cu_seqlens: Int[Numbers, " N+1"] | None = None,
        q_lengths: int | Int[Numbers, "*B"] | None = None,
        kv_lengths: int | Int[Numbers, "*B"] | None = None,
        sinks: Float[Numbers, " H *n"] | None = None,
        alibi_slopes: Float[Numbers, " H"] | None = None,
        log_forget: Float[AnyArray, "*B S H"] | None = None,
        q_offset: int | Int[Numbers, "*B"] | None = None,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
    ) -> tuple[Float[Array, "*B T H V"], Float[Array, "*B H T S"]]:
        """**Arguments:** as for [`ejkernel_eqx.FlashAttention`][].

        **Returns:**

        `(out [..., T, H, V], weights [..., H, T, S])` in the dtype of `q`. The weights are those that multiply the values: after
        dropout, and summing to less than one if there are sinks.
        """
        own = Mask(is_causal=self.causal, window=self.window)
        masking = MaskInputs(
            mask, segment_ids, kv_segment_ids, cu_seqlens, kv_cu_seqlens, q_lengths, kv_lengths, q_offset, own
        )
        inference = self.inference if inference is None else inference
        scoring = ScoreInputs(bias, sinks, alibi_slopes, key, inference, log_forget=log_forget)
        arrays, spec = resolve(q, k, v, self.options, masking, scoring)
        with kernel_scope(self.plan.select(problem_of(self.operation, arrays, spec))):
            out, weights = compiled_once(_dense, spec)(arrays)
        return out.astype(q.dtype), weights.astype(q.dtype)


def _dense(spec: AttentionSpec, arrays: AttentionArrays) -> tuple[Array, Array]:
    def attend(given: Named, over: tuple[str, ...]) -> Named:
        out, _, weights = attend_with_weights(arrays_of(**given), spec)
        return {"out": out, "weights": weights}

    results = mapped(attend, ATTEND.leading(axes_of(arrays)))(ATTEND.given_of(arrays))
    return results["out"], results["weights"]
