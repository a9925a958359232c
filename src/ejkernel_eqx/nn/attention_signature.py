"""Defines what the overloads of `MultiHeadAttention.__call__` share, for type checkers: the arguments by name, and the results."""

from typing import TypedDict, TypeVar

from jax import Array
from jaxtyping import PRNGKeyArray

from .._shapes import AnyArray, Bool, Float, Int
from ..attention import Mask
from ..paged import PagedKVCache
from .kv_cache import KVCache
from .rolling_cache import RollingKVCache

Tokens = Float[AnyArray, "*B T E"]
Output = Float[Array, "*B T O"]
Lse = Float[Array, "*B T H"]
Cache = KVCache | RollingKVCache | PagedKVCache
RowCache = TypeVar("RowCache", KVCache, RollingKVCache)


class Inputs(TypedDict, total=False):
    """The arguments by name of a call without a batch, but for `return_lse`, which decides what is returned."""

    kv_input: Float[AnyArray, "*B S C"] | None
    v_input: Float[AnyArray, "*B S Cv"] | None
    positions: Int[AnyArray, "... T"] | None
    padding_mask: Bool[AnyArray, "*B T"] | None
    kv_padding_mask: Bool[AnyArray, "*B S"] | None
    segment_ids: Int[AnyArray, "*B T"] | None
    cu_seqlens: Int[AnyArray, " N+1"] | None
    mask: Bool[AnyArray, "#*B #H #T #S"] | Mask | None
    bias: Float[AnyArray, "#*B #H #T #S"] | None
    key: PRNGKeyArray | None
    inference: bool | None


class BatchInputs(TypedDict, total=False):
    """The arguments by name of a call with a batch, but for `batch` and `return_lse`."""

    positions: Int[AnyArray, "... T"] | None
    inference: bool | None
