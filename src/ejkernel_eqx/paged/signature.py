"""Types that calls over pages share, for type checkers: their arguments by name, and their results."""

from typing import TypedDict, TypeVar

from jax import Array

from .._shapes import AnyArray, Float, Int, Numbers
from .cache.cache import PagedKVCache, PagedLatentCache

Cache = PagedKVCache | PagedLatentCache
C = TypeVar("C", PagedKVCache, PagedLatentCache)
Query = Float[AnyArray, "*B T H D"]
Output = Float[Array, "*B T H V"]
WithLse = tuple[Float[Array, "*B T H V"], Float[Array, "*B T H"]]


class DecodeInputs(TypedDict, total=False):
    """The arguments by name of [`ejkernel_eqx.PagedAttention`][] but for `return_lse`, which decides what comes back, as below."""

    sinks: Float[Numbers, " H *n"] | None


class _Offsets(TypedDict):
    query_start_loc: Int[Numbers, " N+1"]


class PackedInputs(_Offsets, DecodeInputs, total=False):
    """The arguments by name of [`ejkernel_eqx.PrefillPagedAttention`][]."""

    max_query_len: int | None


class RaggedInputs(PackedInputs, total=False):
    """The arguments by name of [`ejkernel_eqx.RaggedPagedAttention`][]."""

    window: Int[Numbers, ""] | None


class UnifiedInputs(RaggedInputs, total=False):
    """The arguments by name of [`ejkernel_eqx.UnifiedAttention`][]."""

    alibi_slopes: Float[Numbers, " H"] | None
    qq_bias: Float[AnyArray, "Q Q"] | None
