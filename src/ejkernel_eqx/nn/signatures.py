"""Defines what the overloads of the calls of layers share, for type checkers: the arguments by name, and the results."""

from typing import TypedDict, TypeVar

import equinox as eqx
from jax import Array
from jaxtyping import PRNGKeyArray

from .._shapes import AnyArray, Bool, Float, Int
from ..attention import Mask
from ..paged import PagedKVCache, RaggedBatch
from .kv_cache import KVCache
from .rolling_cache import RollingKVCache

Tokens = Float[AnyArray, "*B T E"]
Output = Float[Array, "*B T O"]
SameOutput = Float[Array, "*B T E"]
Lse = Float[Array, "*B T H"]
Pages = PagedKVCache
Cache = KVCache | RollingKVCache | Pages
RowCache = TypeVar("RowCache", KVCache, RollingKVCache)


class Packing(TypedDict, total=False):
    """The sequences of the rows of a call."""

    segment_ids: Int[AnyArray, "*B T"] | None
    cu_seqlens: Int[AnyArray, " N+1"] | None


class TokenInputs(Packing, total=False):
    """The arguments by name of a call without a batch, of layers that need nothing but tokens."""

    padding_mask: Bool[AnyArray, "*B T"] | None


class LatentInputs(TokenInputs, total=False):
    """Those of `MultiHeadLatentAttention`."""

    positions: Int[AnyArray, "... T"] | None
    mask: Bool[AnyArray, "#*B #H #T #S"] | Mask | None


class CellInputs(TokenInputs, total=False):
    """Those of `LSTM`, `GRU` and `RNN`."""

    lengths: Int[AnyArray, "*B"] | None
    resets: Bool[AnyArray, "*B T"] | None
    key: PRNGKeyArray | None
    inference: bool | None


class BlockInputs(TypedDict, total=False):
    """The norm and the residual of the block around a layer."""

    norm: eqx.nn.RMSNorm | eqx.nn.LayerNorm | None
    residual: Float[AnyArray, "*B T O"] | None


class Inputs(LatentInputs, BlockInputs, total=False):
    """Those of `MultiHeadAttention`, but for `return_lse`, which decides what is returned."""

    kv_input: Float[AnyArray, "*B S C"] | None
    v_input: Float[AnyArray, "*B S Cv"] | None
    kv_padding_mask: Bool[AnyArray, "*B S"] | None
    bias: Float[AnyArray, "#*B #H #T #S"] | None
    key: PRNGKeyArray | None
    inference: bool | None


class BatchInputs(BlockInputs, total=False):
    """The arguments by name of a call of `MultiHeadAttention` with a batch, but for `batch` and `return_lse`."""

    positions: Int[AnyArray, "... T"] | None
    inference: bool | None


class PageInputs(BatchInputs):
    """`BatchInputs`, and the batch."""

    batch: RaggedBatch


class AnyInputs(Inputs, total=False):
    """`Inputs`, and perhaps a batch."""

    batch: RaggedBatch | None
