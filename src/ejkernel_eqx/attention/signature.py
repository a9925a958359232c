"""Defines what calls of attention share, for type checkers: their arguments by name, and their results."""

from typing import TypedDict

from jax import Array
from jaxtyping import PRNGKeyArray

from .._shapes import AnyArray, Bool, Float, Int, Numbers
from .masks.mask import Mask

Q = Float[AnyArray, "*B T H D"]
K = Float[AnyArray, "*B S K D"]
V = Float[AnyArray, "*B S K V"]
Output = Float[Array, "*B T H V"]
WithLse = tuple[Float[Array, "*B T H V"], Float[Array, "*B T H"]]


class AttentionInputs(TypedDict, total=False):
    """The arguments by name that [`ejkernel_eqx.FlashAttention`][] and others share."""

    bias: Float[AnyArray, "#*B #H #T #S"] | None
    mask: Bool[Numbers, "#*B #H #T #S"] | Mask | None
    segment_ids: Int[Numbers, "*B T"] | None
    kv_segment_ids: Int[Numbers, "*B S"] | None
    cu_seqlens: Int[Numbers, " N+1"] | None
    kv_cu_seqlens: Int[Numbers, " N+1"] | None
    q_lengths: int | Int[Numbers, "*B"] | None
    kv_lengths: int | Int[Numbers, "*B"] | None
    sinks: Float[Numbers, " H *n"] | None
    alibi_slopes: Float[Numbers, " H"] | None
    q_offset: int | Int[Numbers, "*B"] | None
    key: PRNGKeyArray | None
    inference: bool | None


class FlashInputs(AttentionInputs, total=False):
    """The arguments by name of [`ejkernel_eqx.FlashAttention`][] but for `return_lse`, which decides what comes back."""

    log_forget: Float[AnyArray, "*B S H"] | None


class BlockSparseInputs(AttentionInputs, total=False):
    """The arguments by name of [`ejkernel_eqx.BlockSparseAttention`][] but for `return_lse`, which decides what comes back."""

    block_map: Bool[Numbers, "... M N"] | None


class DotProductInputs(TypedDict, total=False):
    """The arguments by name of [`ejkernel_eqx.ScaledDotProductAttention`][] but for `return_residual`, which decides what comes back."""

    scale: float | None
    is_causal: bool
    query_seq_lengths: Int[Numbers, "*B"] | None
    key_value_seq_lengths: Int[Numbers, "*B"] | None
    local_window_size: int | tuple[int, int] | None
