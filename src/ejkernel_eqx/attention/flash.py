"""`FlashAttention`: exact softmax attention in memory linear in the sequence length."""

from typing import Any, ClassVar, Literal, overload, TYPE_CHECKING, Unpack

import jax
from jax import Array
from jaxtyping import PRNGKeyArray

from .._shapes import AnyArray, Bool, Float, Int, Numbers
from ..dispatch import PlatformLike
from .arguments import MaskInputs, resolve, ScoreInputs, ScoreOptions, Windowed
from .core import ATTEND
from .masks.mask import Mask
from .signature import FlashInputs as Inputs
from .signature import K, Output, Q, V, WithLse


class FlashAttention(Windowed):
    r"""Exact attention, forward and backward in memory linear in the sequence length.

    $$s_{ij} = \mathrm{cap}\!\left(\mathrm{scale}\; q_i \cdot k_j\right) + \mathrm{bias}_{ij} + m_h (j - p_i)
      + \sum_{l = j + 1}^{p_i} f_l, \qquad
    o_i = \sum_{j \in \mathcal{V}_i} \frac{e^{s_{ij}}}{\sum_{l \in \mathcal{V}_i} e^{s_{il}} + \sum_n e^{\mathrm{sink}_{hn}}}\, v_j$$

    with $\mathrm{cap}(s) = c \tanh(s / c)$ if `logits_soft_cap` $= c$ is given (else $s$), ALiBi slope $m_h$, forget gates $e^{f_l}$,
    and query position $p_i = \mathrm{offset} + i$. $\mathcal{V}_i$ are the keys visible to query $i$: the intersection of all
    masks. Query head $h$ reads key head $\lfloor h / (H / K) \rfloor$. The output of a query that sees no key is 0,
    with zero gradients.

    Platforms: cuDNN (`"cuda"`), Triton (`"triton"`, `"triton-interpret"`), Pallas on TPU (`"pallas"`, `"pallas-interpret"`), XLA (`"xla"`);
    `ejx.explain` shows which one is chosen for given shapes and why. Differentiable in reverse mode in `q, k, v, bias, alibi_slopes, sinks,
    log_forget` and through `lse`. On XLA gradients have derivatives too, in both modes (`jax.hessian`). For forward mode (`jax.jvp`), and for
    second derivatives on other platforms, use [`ejkernel_eqx.Attention`][].

    Sources: Dao, *FlashAttention-2* (2023); Milakov & Gimelshein, *Online normalizer calculation for softmax* (2018); Lin et al., *Forgetting
    Transformer* (2025, arXiv:2503.02130).
    """

    operation: ClassVar[str] = "flash_attention"

    def __init__(
        self,
        causal: bool = False,
        sliding_window: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        dropout_rate: float = 0.0,
        *,
        deterministic: bool = False,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `causal`: query $i$ sees keys up to its own position $p_i$ only.
        - `sliding_window`: an int $w$ (requires `causal=True`): the last $w$ keys, including the query's own. A pair `(left, right)`: the number
            of keys on either side, not counting the query's own; `None` is unbounded.
        - `logits_soft_cap`: the bound $c$ of the tanh soft cap, from 1e-30 to 1e30.
        - `softmax_scale`: default `D**-0.5`.
        - `dropout_rate`: probability of dropping an attention weight; the others are scaled by `1 / (1 - rate)`.
        - `deterministic`: use only platforms that are bitwise repeatable (all of ours are; cuDNN's backward is not).
        - `platform`: use this platform or raise; `None` chooses by device and call.
        - `config`: use this kernel configuration, which implies its platform.
        - `tune_for`: `(q, k, v)` or [`ejkernel_eqx.inputs`][]`(q, k, v, ...)`, arrays or `jax.ShapeDtypeStruct`s: fix the choice for these
            inputs now. Configurations that no table holds are tuned on this device, forward and backward, unless
            `ejkernel_eqx.policy_override` forbids it. Raises `UnsupportedError` if no platform supports the call, and `TuningError` if tuning is
            needed while the module is built inside `jit` or another staged function.
        """
        self.options = ScoreOptions(logits_soft_cap, softmax_scale, dropout_rate, deterministic)
        self._complete(causal, sliding_window, platform, config, tune_for)

    if TYPE_CHECKING:

        @overload
        def __call__(
            self, q: Q, k: K, v: V, *, return_lse: Literal[False] = False, **others: Unpack[Inputs]
        ) -> Output: ...

        @overload
        def __call__(
            self, q: Q, k: K, v: V, *, return_lse: Literal[True], **others: Unpack[Inputs]
        ) -> WithLse: ...

        @overload
        def __call__(
            self, q: Q, k: K, v: V, *, return_lse: bool, **others: Unpack[Inputs]
        ) -> Output | WithLse: ...

    @jax.named_scope("ejkernel_eqx.FlashAttention")
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
        return_lse: bool = False,
    ) -> Float[Array, "*B T H V"] | tuple[Float[Array, "*B T H V"], Float[Array, "*B T H"]]:
        """**Arguments:**

        - `q`: `[..., T, H, D]` with any number of leading axes; bf16, f16, f32 (f64 on XLA).
        - `k`, `v`: `[..., S, K, D]` and `[..., S, K, V]`, with the leading axes and dtype of `q`; `K` divides `H`.
        - `bias`: broadcastable to `[..., H, T, S]`, any float dtype; never materialised to full size (except under `vmap(grad)`). Differentiable.
            Only minus infinity hides. Kernels take finite numbers beyond 2.3e38 as 2.3e38.
        - `mask`: booleans broadcastable to `[..., H, T, S]` (true = visible) or an [`ejkernel_eqx.Mask`][]. Beside leading axes of `q`, a mask
            or bias of three axes is refused: pass `mask[:, None]` for `[B, T, S]` and `mask[None]` for `[H, T, S]`.
        - `segment_ids`, `kv_segment_ids`: `[..., T]`, `[..., S]`; tokens with equal, non-negative ids see each other. Positions count along the
            row.
        - `cu_seqlens`, `kv_cu_seqlens`: offsets `[N + 1]` of packed sequences (without leading axes); positions are per sequence.
        - `q_lengths`, `kv_lengths`: number of real queries and keys, one per row; the rest is padding and may hold NaN.
        - `sinks`: logits `[H]` or `[H, n]` that join the denominator but have no value. Differentiable.
        - `alibi_slopes`: `[H]`. Differentiable.
        - `log_forget`: `[..., S, H]`, logarithms of the forget gates of each key's token, one per query head: finite, at most 0. A query's weight of
            a key is multiplied by the gates of the tokens behind the key, up to the query's own. Needs `causal=True`; not with `alibi_slopes`.
            Gates of padding are taken to be 1, numbers below -104 as -104. With cached keys, pass their gates as well. Differentiable. Then the
            default is XLA; Triton runs with `platform="triton"`.
        - `q_offset`: position of the first query among the keys; an int or one per row. Default `S - T`: the last query is aligned with the last key.
        - `key`: PRNG key for dropout. `inference`: disable dropout; defaults to the module's `inference` field (`eqx.nn.inference_mode`).
        - `return_lse`: also return the log-sum-exp of the scores.

        **Returns:**

        `[..., T, H, V]` in the dtype of `q`. With `return_lse` also `[..., T, H]` in float32. It is the natural
        logarithm, including sinks, and `-inf` for a query that sees no key. Raises `ValueError` for invalid arguments,
        and `UnsupportedError` if no platform, or not the requested one, supports the call.
        """
        own = Mask(is_causal=self.causal, window=self.window)
        masking = MaskInputs(
            mask, segment_ids, kv_segment_ids, cu_seqlens, kv_cu_seqlens, q_lengths, kv_lengths, q_offset, own
        )
        inference = self.inference if inference is None else inference
        scoring = ScoreInputs(bias, sinks, alibi_slopes, key, inference, return_lse, log_forget)
        call = resolve(q, k, v, self.options, masking, scoring)
        return ATTEND.attend(self.plan, self.operation, *call)
