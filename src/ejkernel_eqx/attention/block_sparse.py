"""`BlockSparseAttention`: attention over the tiles of scores that a mask leaves visible."""

from typing import Any, ClassVar, Literal, overload, TYPE_CHECKING, Unpack

import equinox as eqx
import jax
from jax import Array
from jaxtyping import PRNGKeyArray

from .._kernel import Kernel, Plan
from .._shapes import AnyArray, Bool, Float, Int, Numbers
from ..core.plans import plan_of
from ..dispatch import PlatformLike
from .arguments import MaskInputs, resolve, ScoreInputs, ScoreOptions
from .core import ATTEND
from .masks.mask import Mask
from .masks.sizes import block_pair
from .score_mod import ScoreMod
from .signature import BlockSparseInputs as Inputs
from .signature import K, Output, Q, V, WithLse


class BlockSparseAttention(Kernel):
    r"""Exact attention in time proportional to the visible tiles of scores, forward and backward.

    $$s_{ij} = \mathrm{cap}\!\left(\mathrm{scale}\; q_i \cdot k_j\right) + \mathrm{bias}_{ij} + m_h (j - p_i), \qquad
    o_i = \sum_{j \in \mathcal{V}_{hi}} \frac{e^{s_{ij}}}{\sum_{l \in \mathcal{V}_{hi}} e^{s_{il}} + \sum_n e^{\mathrm{sink}_{hn}}}\, v_j$$

    as [`ejkernel_eqx.FlashAttention`][], whose kernels it shares. $\mathcal{V}_{hi}$ are the keys that a mask leaves
    visible to query $i$ of head $h$. The mask is an [`ejkernel_eqx.Mask`][] of any form, a map of blocks, or both.
    Kernels read lists of tiles. Hidden tiles are not listed. Tiles that are visible as a whole apply no mask. The
    others apply the exact mask. The host builds the lists of functions and of maps in numpy, once for each mask and
    shape. The device builds those of maps in JAX arrays, segments and lengths, in every call. Windows, lengths,
    segments and packed sequences alone are ranges of tiles and need no lists. Three things make an array of size $T S$:
    a dense mask, a union or complement of masks that hold arrays, and the gradient of a bias.

    Platforms: as for `FlashAttention`. Differentiable in reverse mode in `q, k, v, bias, alibi_slopes, sinks` and through `lse`.

    Sources: Dao et al., *FlashAttention* (2022), section 3.3; He et al., *FlexAttention* (2024).

    ```python
    pattern = ejx.Mask.causal() & (ejx.Mask.sliding_window(1023) | ejx.Mask.global_tokens(64))
    attn = ejx.BlockSparseAttention(pattern)
    out = attn(q, k, v)
    ```
    """

    operation: ClassVar[str] = "block_sparse_attention"

    mask: Mask
    options: ScoreOptions = eqx.field(static=True)
    block_size: tuple[int, int] = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)
    inference: bool

    def __init__(
        self,
        mask: Bool[AnyArray, "#*B #H #T #S"] | Mask | None = None,
        block_map: Bool[AnyArray, "... M N"] | None = None,
        block_size: int | tuple[int, int] = 128,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        dropout_rate: float = 0.0,
        *,
        score_mod: ScoreMod | None = None,
        deterministic: bool = False,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `mask`: what is visible in every call, an [`ejkernel_eqx.Mask`][] or booleans broadcastable to `[..., H, T, S]`; everything if not
            given.
        - `block_map`: booleans `[H or 1, ceil(T / queries), ceil(S / keys)]`, without heads if all are alike. They say
            which blocks of scores are visible in every call. The map is intersected with `mask`, as in
            [`ejkernel_eqx.Mask.from_blocks`][].
        - `block_size`: queries and keys of a block of such maps, here and in calls: an int for both, or a pair.
        - `logits_soft_cap`, `softmax_scale`, `dropout_rate`, `deterministic`, `platform`, `config`, `tune_for`: as for
            [`ejkernel_eqx.FlashAttention`][].
        - `score_mod`: a function `(score, head, query, key)`, as flex attention's, that returns the score to use. It
            receives the score with soft cap, bias and ALiBi. JAX traces it with a float and three int32 scalars, and
            differentiates it by the score. `query` is a position among the keys. What it closes over is constant and has
            no gradient. `cap * tanh(score / cap)`, `score + slopes[head] * (key - query)` and the former plus the latter
            run on every platform, all others on XLA.
        """
        self.options = ScoreOptions(logits_soft_cap, softmax_scale, dropout_rate, deterministic, score_mod)
        self.block_size = block_pair(block_size)
        own = mask if isinstance(mask, Mask) else Mask() if mask is None else Mask.from_dense(mask)
        self.mask = own if block_map is None else own & Mask.from_blocks(block_map, self.block_size)
        self.inference = False
        self.plan = plan_of(BlockSparseAttention, self, platform, config, tune_for)

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

    @jax.named_scope("ejkernel_eqx.BlockSparseAttention")
    def __call__(
        self,
        q: Float[AnyArray, "*B T H D"],
        k: Float[AnyArray, "*B S K D"],
        v: Float[AnyArray, "*B S K V"],
        *,
        bias: Float[AnyArray, "#*B #H #T #S"] | None = None,
        mask: Bool[Numbers, "#*B #H #T #S"] | Mask | None = None,
        block_map: Bool[Numbers, "... M N"] | None = None,
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
        """**Arguments:** as for [`ejkernel_eqx.FlashAttention`][]; `mask` and whatever else hides is intersected with the module's own mask.

        - `block_map`: booleans broadcastable to `[..., H, ceil(T / queries), ceil(S / keys)]`: the blocks that this call leaves visible. A JAX
            array is data: other values need no compilation. Blocks of at least 64 queries and keys fill a kernel's tile.

        **Returns:**

        `[..., T, H, V]` in the dtype of `q`. With `return_lse` also `[..., T, H]` in float32. It is the natural
        logarithm, including sinks. A query that sees no key has output 0 and logarithm `-inf`. Raises `ValueError` for
        invalid arguments, and `UnsupportedError` if no platform, or not the requested one, supports the call.
        """
        own = self.mask
        if block_map is not None:
            own = own & Mask.from_blocks(block_map, self.block_size)
        masking = MaskInputs(
            mask, segment_ids, kv_segment_ids, cu_seqlens, kv_cu_seqlens, q_lengths, kv_lengths, q_offset, own
        )
        inference = self.inference if inference is None else inference
        scoring = ScoreInputs(bias, sinks, alibi_slopes, key, inference, return_lse)
        call = resolve(q, k, v, self.options, masking, scoring)
        return ATTEND.attend(self.plan, self.operation, *call)
