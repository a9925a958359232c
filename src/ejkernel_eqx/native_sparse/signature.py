"""The arguments of a call by name, for type checkers."""

from typing import TypedDict

from .._shapes import AnyArray, Float, Int, Numbers


class NativeInputs(TypedDict, total=False):
    """Those of [`ejkernel_eqx.NativeSparseAttention`][] but for `return_indices`, which decides what comes back."""

    compressed_k: Float[AnyArray, "*B C K D"] | None
    compressed_v: Float[AnyArray, "*B C K V"] | None
    block_indices: Int[Numbers, "*B T K n"] | None
    cu_seqlens: Int[Numbers, " N+1"] | None
    segment_ids: Int[Numbers, "*S T"] | None
    max_segments: int | None
    q_offset: int | Int[Numbers, "*B"] | None
