"""`RingAttention`: exact attention over sequences that are split over the devices of a mesh axis."""

from typing import Any, ClassVar, Literal, overload, TYPE_CHECKING, Unpack

import equinox as eqx
import jax
from jax import Array
from jaxtyping import PRNGKeyArray

from ..._kernel import replaced
from ..._shapes import AnyArray, Bool, Float, Int, Numbers
from ...dispatch import PlatformLike
from ..arguments import MaskInputs, ScoreInputs, ScoreOptions, Windowed
from ..masks.mask import Mask
from ..signature import AttentionInputs as Inputs
from ..signature import K, Output, Q, V, WithLse
from .arguments import resolve, Split
from .core import ATTEND_RING


class RingAttention(Windowed):
    r"""Exact attention over a sequence whose tokens are split over the devices of a mesh axis, in memory of one device's tokens.

    The mathematics, masks and gradients are those of [`ejkernel_eqx.FlashAttention`][], by positions in the whole
    sequence, and so are the kernels that each device runs. In its **ring** form, keys and values go round the devices.
    The next ones arrive while a device computes with those it has. With $(o_n, \mathrm{lse}_n)$ of the keys of device
    $n$

    $$\mathrm{lse} = \log\Big(\sum_n e^{\mathrm{lse}_n} + e^{\mathrm{sink}}\Big), \qquad o = \sum_n e^{\mathrm{lse}_n - \mathrm{lse}}\, o_n$$

    in float32. The backward sends keys and values round again, with their gradients one step behind. Steps in which no device sees a key are not
    made: a window needs as many hops as devices that it reaches. In its **all-to-all** form devices exchange tokens of all heads for all
    tokens of some heads, and back. `ejx.explain` shows which form runs, and why.

    Called outside `shard_map`, it takes whole arrays, which `jit` splits over the axis: batch and heads stay split as they are. Inside
    `shard_map` it takes one device's parts. Without a mesh, or on an axis of one device, it is `FlashAttention`.

    Under a causal mask later tokens see more keys, so in contiguous order the last device of a ring computes twice the average. With
    `order="zigzag"`, tokens in the order of [`ejkernel_eqx.sequences.reorder_sequence`][] give every device the same work.

    Platforms: Triton (`"triton"`, `"triton-interpret"`), XLA (`"xla"`). Differentiable in reverse mode in `q, k, v, bias, alibi_slopes, sinks` and
    through `lse`.

    Sources: Liu, Zaharia and Abbeel, *Ring Attention with Blockwise Transformers* (2023); Jacobs et al., *DeepSpeed Ulysses* (2023); Llama Team, *The
    Llama 3 Herd of Models* (2024), section 3.3.2.
    """

    operation: ClassVar[str] = "ring_attention"

    split: Split = eqx.field(static=True)

    def __init__(
        self,
        axis_name: str,
        causal: bool = False,
        sliding_window: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        dropout_rate: float = 0.0,
        *,
        order: Literal["contiguous", "zigzag"] = "contiguous",
        method: Literal["ring", "all_to_all"] | None = None,
        deterministic: bool = False,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `axis_name`: the mesh axis that the tokens are split over.
        - `causal`, `sliding_window`, `logits_soft_cap`, `softmax_scale`, `dropout_rate`: as in `FlashAttention`.
        - `order`: with `"contiguous"`, device $i$ of $n$ has the $i$-th part of the tokens. With `"zigzag"` it has
            parts $i$ and $2n - 1 - i$ of $2n$.
        - `method`: `"ring"`, `"all_to_all"`, or `None` to choose by shapes. All-to-all needs query heads that the devices divide, and key heads
            that divide or are divided by their number.
        - `deterministic`, `platform`, `config`: as in `FlashAttention`.
        - `tune_for`: `(q, k, v)` with the tokens of one device, or [`ejkernel_eqx.inputs`][] of such a call: fix the choice of kernels now.

        Raises `ValueError` for invalid options.
        """
        self.split = Split(axis_name, order, method)
        self.options = ScoreOptions(logits_soft_cap, softmax_scale, dropout_rate, deterministic)
        self._complete(causal, sliding_window, platform, config, tune_for)

    def on_whole_rows(self) -> "RingAttention":
        """The same attention for calls whose tokens no axis splits, such as those of decoding."""
        return replaced(self, split=Split("", "contiguous", None))

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

    @jax.named_scope("ejkernel_eqx.RingAttention")
    def __call__(
        self,
        q: Float[AnyArray, "*B T H D"],
        k: Float[AnyArray, "*B S K D"],
        v: Float[AnyArray, "*B S K V"],
        *,
        bias: Float[AnyArray, "#*B #H #T ..."] | None = None,
        mask: Bool[Numbers, "#*B #H #T ..."] | Mask | None = None,
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
        """The arguments of [`ejkernel_eqx.FlashAttention`][]. Arrays by token are in the order of the tokens. Inside
        `shard_map` they are one device's part. Numbers of tokens and positions are those of the whole sequence in
        temporal order.

        **Arguments:**

        - `q`, `k`, `v`: `[..., T, H, D]`, `[..., S, K, D]`, `[..., S, K, V]`; bf16, f16, f32 (f64 on XLA). The number of devices divides `T` and `S`,
            twice their number in zigzag order.
        - `bias`, `mask`: a device has the rows of its own queries, and all keys. Inside `shard_map` that is `[..., H,
            T, n S]` for `n` devices, each axis broadcastable. `mask` may also be an [`ejkernel_eqx.Mask`][] of windows,
            chunks, prefixes, lengths, segments or packed sequences.
        - `segment_ids`, `kv_segment_ids`: `[..., T]`, `[..., S]`; tokens with equal, non-negative ids see each other.
        - `cu_seqlens`, `kv_cu_seqlens`: offsets `[N + 1]` of packed sequences in the whole sequence, the same on every device.
        - `q_lengths`, `kv_lengths`: number of real queries and keys in the whole sequence; the rest is padding and may hold NaN.
        - `sinks`, `alibi_slopes`: as in `FlashAttention`, the same on every device.
        - `q_offset`: position of the first query of the whole sequence. Default: its last query is aligned with its last key.
        - `key`: PRNG key for dropout, the same on every device: they drop what one device with all tokens would. `inference`: disable dropout.
        - `return_lse`: also return the log-sum-exp of the scores.

        **Returns:**

        `[..., T, H, V]` in the dtype of `q`, split as `q` is; with `return_lse` also `[..., T, H]` in float32. Raises
        `ValueError` for invalid arguments, such as an axis that the mesh lacks, or tokens that do not divide. Raises
        `UnsupportedError` if no platform supports the call.
        """
        own = Mask(is_causal=self.causal, window=self.window)
        masking = MaskInputs(
            mask, segment_ids, kv_segment_ids, cu_seqlens, kv_cu_seqlens, q_lengths, kv_lengths, q_offset, own
        )
        inference = self.inference if inference is None else inference
        scoring = ScoreInputs(bias, sinks, alibi_slopes, key, inference, return_lse)
        call = resolve(q, k, v, self.split, self.options, masking, scoring)
        return ATTEND_RING.attend(self.plan, self.operation, *call)
