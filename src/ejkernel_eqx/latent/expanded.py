"""`MultiHeadLatentAttention`: latent attention on the keys and values of every head, as in training."""

from typing import Any, ClassVar, Literal, overload, TYPE_CHECKING, Unpack

import jax
from jax import Array
from jaxtyping import PRNGKeyArray

from .._shapes import AnyArray, Bool, Float, Int, Numbers
from ..attention import Mask
from ..attention.arguments import arranged, MaskInputs, ScoreInputs, ScoreOptions, visible, Windowed
from ..attention.signature import AttentionInputs, Output, WithLse
from ..dispatch import PlatformLike
from .arguments import read_expanded
from .core import ATTEND
from .spec import LatentArrays


class MultiHeadLatentAttention(Windowed):
    r"""Multi-head latent attention in its expanded form. Every head has keys and values of its own, and all heads share
    one rotary key. It is exact, forward and backward, in memory linear in the sequence length.

    $$s_{hij} = \mathrm{cap}\!\left(\mathrm{scale}\,\big(q^{c}_{hi} \cdot k_{hj} + q^{r}_{hi} \cdot k^{r}_{j}\big)\right), \qquad
    o_{hi} = \sum_{j \in \mathcal{V}_i} \frac{e^{s_{hij}}}{\sum_{l \in \mathcal{V}_i} e^{s_{hil}} + \sum_n e^{\mathrm{sink}_{hn}}}\, v_{hj}$$

    with queries $q = [q^c, q^r]$, $\mathrm{cap}(s) = c \tanh(s / c)$ if `logits_soft_cap` $= c$ is given (else $s$), and $\mathcal{V}_i$ the keys
    visible to query $i$, as in [`ejkernel_eqx.FlashAttention`][]. The output of a query that sees no key is 0, with zero gradients.

    Keys are 192 wide and values 128 in DeepSeek-V2 and V3. The kernels read the two parts of the keys from separate
    arrays, so the rotary keys are never repeated for each head. Their gradient is summed over heads in float32.
    Triton's multiply one part after the other, so that neither is padded to 256. The same numbers come from the latents
    themselves, without keys and values, by [`ejkernel_eqx.AbsorbedLatentAttention`][].

    Platforms: Triton (`"triton"`, `"triton-interpret"`), Pallas on TPU (`"pallas"`, `"pallas-interpret"`), XLA (`"xla"`). Differentiable in reverse
    mode in `q, k, k_rope, v, bias, alibi_slopes, sinks` and through `lse`.

    Source: DeepSeek-AI, *DeepSeek-V2* (2024), arXiv:2405.04434, section 2.1.
    """

    operation: ClassVar[str] = "multi_head_latent_attention"

    def __init__(
        self,
        causal: bool = False,
        sliding_window: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        dropout_rate: float = 0.0,
        *,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `causal`: as in [`ejkernel_eqx.FlashAttention`][], and false by default as there. The absorbed form,
            [`ejkernel_eqx.AbsorbedLatentAttention`][], is causal by default: pass `causal=` where both are used.
        - `sliding_window`, `logits_soft_cap`, `dropout_rate`, `platform`, `config`: as in [`ejkernel_eqx.FlashAttention`][].
        - `softmax_scale`: default `D**-0.5`, with `D` the channels of both parts.
        - `tune_for`: [`ejkernel_eqx.inputs`][]`(q, k, k_rope, v, ...)`, arrays or `jax.ShapeDtypeStruct`s: fix the choice for these inputs now.
        """
        self.options = ScoreOptions(logits_soft_cap, softmax_scale, dropout_rate)
        self._complete(causal, sliding_window, platform, config, tune_for)
        if dropout_rate == 0:
            self.inference = None  # which is no leaf

    if TYPE_CHECKING:

        @overload
        def __call__(
            self,
            q: Float[AnyArray, "*B T H D"],
            k: Float[AnyArray, "*B S H Dn"],
            k_rope: Float[AnyArray, "*B S Dr"],
            v: Float[AnyArray, "*B S H V"],
            *,
            return_lse: Literal[False] = False,
            **others: Unpack[AttentionInputs],
        ) -> Output: ...

        @overload
        def __call__(
            self,
            q: Float[AnyArray, "*B T H D"],
            k: Float[AnyArray, "*B S H Dn"],
            k_rope: Float[AnyArray, "*B S Dr"],
            v: Float[AnyArray, "*B S H V"],
            *,
            return_lse: Literal[True],
            **others: Unpack[AttentionInputs],
        ) -> WithLse: ...

        @overload
        def __call__(
            self,
            q: Float[AnyArray, "*B T H D"],
            k: Float[AnyArray, "*B S H Dn"],
            k_rope: Float[AnyArray, "*B S Dr"],
            v: Float[AnyArray, "*B S H V"],
            *,
            return_lse: bool,
            **others: Unpack[AttentionInputs],
        ) -> Output | WithLse: ...

    @jax.named_scope("ejkernel_eqx.MultiHeadLatentAttention")
    def __call__(
        self,
        q: Float[AnyArray, "*B T H D"],
        k: Float[AnyArray, "*B S H Dn"],
        k_rope: Float[AnyArray, "*B S Dr"],
        v: Float[AnyArray, "*B S H V"],
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
        q_offset: int | Int[Numbers, "*B"] | None = None,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        return_lse: bool = False,
    ) -> Float[Array, "*B T H V"] | tuple[Float[Array, "*B T H V"], Float[Array, "*B T H"]]:
        """**Arguments:**

        - `q`: `[..., T, H, D]` with any number of leading axes, `D = Dn + Dr`, the rotary part last; bf16, f16, f32 (f64 on XLA).
        - `k`, `v`: `[..., S, H, Dn]` and `[..., S, H, V]`, of every head, with the leading axes and dtype of `q`.
        - `k_rope`: `[..., S, Dr]`, the rotary keys that all heads share.
        - `bias`, `mask`, `segment_ids`, `kv_segment_ids`, `cu_seqlens`, `kv_cu_seqlens`, `q_lengths`, `kv_lengths`, `sinks`, `alibi_slopes`,
            `q_offset`, `key`, `inference`, `return_lse`: as in [`ejkernel_eqx.FlashAttention`][].

        **Returns:**

        `[..., T, H, V]` in the dtype of `q`. With `return_lse` also `[..., T, H]` in float32. It is the natural
        logarithm, including sinks, and `-inf` for a query that sees no key. Raises `ValueError` for invalid arguments,
        and `UnsupportedError` if no platform, or not the requested one, supports the call.
        """
        inputs = read_expanded(q, k, k_rope, v)
        # The module's own options are one more condition beside what the call hides.
        own = Mask(is_causal=self.causal, window=self.window)
        masking = MaskInputs(
            mask, segment_ids, kv_segment_ids, cu_seqlens, kv_cu_seqlens, q_lengths, kv_lengths, q_offset, own
        )
        inference = self.inference if inference is None else inference
        scoring = ScoreInputs(bias, sinks, alibi_slopes, key, inference, return_lse)
        dense, keys = (inputs["q"], inputs["k"], inputs["v"]), inputs["k"].shape[-3]
        lowered = visible(masking, inputs["q"].shape, keys)
        whole, spec = arranged(dense, self.options, scoring, lowered, keys)
        return ATTEND.attend(self.plan, self.operation, LatentArrays(**{**whole._asdict(), **inputs}), spec)
