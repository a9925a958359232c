"""Written by `python -m tests.functional_stub` from the classes' own signatures: change these."""

# fmt: off
# ruff: noqa
from collections.abc import Callable
from typing import overload

from ._kernel import Kernel
from collections.abc import Sequence
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray
from typing import Any
from typing import Literal
from ._shapes import AnyArray
from ._shapes import Bool
from ._shapes import Float
from ._shapes import Int
from ._shapes import Numbers
from .attention import Mask
from .attention.masks.mask import Mask
from .attention.score_mod import ScoreMod
from .attention.signature import K
from .attention.signature import Output
from .attention.signature import Q
from .attention.signature import V
from .attention.signature import WithLse
from .cells.recurrent import GivenState
from .cells.recurrent import NewState
from .dispatch import PlatformLike
from .losses.linear_cross_entropy import Features
from .losses.linear_cross_entropy import Head
from .losses.linear_cross_entropy import HeadBias
from .losses.linear_cross_entropy import Labels
from .losses.linear_cross_entropy import Loss
from .losses.linear_cross_entropy import TokenWeights
from .losses.teacher import Teacher
from .losses.token_statistics import TokenStatistics
from .native_sparse.native_pages.operation import Output
from .native_sparse.native_pages.operation import WithIndices
from .paged import PagedLatentCache
from .paged.cache.cache import PagedKVCache
from .paged.signature import C
from .paged.signature import Cache
from .paged.signature import Output
from .paged.signature import Query
from .paged.signature import WithLse
from .quantised import QuantizedWeight
from .recurrence.linear import FinalState
from .recurrence.linear import State

MODULES_KEPT: int

def function_of(cls: type[Kernel]) -> Callable[..., Any]: ...

@overload
def absorbed_latent_attention(
    q: Float[AnyArray, '*B T H D'],
    latent: Float[AnyArray, '*B S R'] | PagedLatentCache,
    k_rope: Float[AnyArray, '*B S Dr'] | None = None,
    *,
    return_lse: Literal[False] = False,
    w_uk: Float[AnyArray, 'H Dn R'] | None = None,
    w_uv: Float[AnyArray, 'H V R'] | None = None,
    query_start_loc: Int[Numbers, ' N+1'] | None = None,
    max_query_len: int | None = None,
    q_starts: int | Int[Numbers, '*B'] | None = None,
    q_lengths: int | Int[Numbers, '*B'] | None = None,
    kv_lengths: int | Int[Numbers, '*B'] | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Output: ...

@overload
def absorbed_latent_attention(
    q: Float[AnyArray, '*B T H D'],
    latent: Float[AnyArray, '*B S R'] | PagedLatentCache,
    k_rope: Float[AnyArray, '*B S Dr'] | None = None,
    *,
    return_lse: Literal[True],
    w_uk: Float[AnyArray, 'H Dn R'] | None = None,
    w_uv: Float[AnyArray, 'H V R'] | None = None,
    query_start_loc: Int[Numbers, ' N+1'] | None = None,
    max_query_len: int | None = None,
    q_starts: int | Int[Numbers, '*B'] | None = None,
    q_lengths: int | Int[Numbers, '*B'] | None = None,
    kv_lengths: int | Int[Numbers, '*B'] | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> WithLse: ...

@overload
def absorbed_latent_attention(
    q: Float[AnyArray, '*B T H D'],
    latent: Float[AnyArray, '*B S R'] | PagedLatentCache,
    k_rope: Float[AnyArray, '*B S Dr'] | None = None,
    *,
    return_lse: bool,
    w_uk: Float[AnyArray, 'H Dn R'] | None = None,
    w_uv: Float[AnyArray, 'H V R'] | None = None,
    query_start_loc: Int[Numbers, ' N+1'] | None = None,
    max_query_len: int | None = None,
    q_starts: int | Int[Numbers, '*B'] | None = None,
    q_lengths: int | Int[Numbers, '*B'] | None = None,
    kv_lengths: int | Int[Numbers, '*B'] | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Output | WithLse: ...

def attention(
    q: Float[AnyArray, '*B T H D'],
    k: Float[AnyArray, '*B S K D'],
    v: Float[AnyArray, '*B S K V'],
    *,
    bias: Float[AnyArray, '#*B #H #T #S'] | None = None,
    mask: Bool[Numbers, '#*B #H #T #S'] | Mask | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    kv_segment_ids: Int[Numbers, '*B S'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    kv_cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    q_lengths: int | Int[Numbers, '*B'] | None = None,
    kv_lengths: int | Int[Numbers, '*B'] | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    alibi_slopes: Float[Numbers, ' H'] | None = None,
    q_offset: int | Int[Numbers, '*B'] | None = None,
    key: PRNGKeyArray | None = None,
    inference: bool | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    dropout_rate: float = 0.0,
    platform: PlatformLike | None = None,
) -> tuple[Float[Array, '*B T H V'], Float[Array, '*B H T S']]: ...

@overload
def block_sparse_attention(
    q: Q,
    k: K,
    v: V,
    *,
    return_lse: Literal[False] = False,
    bias: Float[AnyArray, '#*B #H #T #S'] | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    kv_segment_ids: Int[Numbers, '*B S'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    kv_cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    q_lengths: int | Int[Numbers, '*B'] | None = None,
    kv_lengths: int | Int[Numbers, '*B'] | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    alibi_slopes: Float[Numbers, ' H'] | None = None,
    q_offset: int | Int[Numbers, '*B'] | None = None,
    key: PRNGKeyArray | None = None,
    inference: bool | None = None,
    block_size: int | tuple[int, int] = 128,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    dropout_rate: float = 0.0,
    score_mod: ScoreMod | None = None,
    deterministic: bool = False,
    platform: PlatformLike | None = None,
    config: Any | None = None,
    mask: Bool[AnyArray, '#*B #H #T #S'] | Mask | None | Bool[Numbers, '#*B #H #T #S'] | Mask = None,
    block_map: Bool[AnyArray, '... M N'] | None | Bool[Numbers, '... M N'] = None,
) -> Output: ...

@overload
def block_sparse_attention(
    q: Q,
    k: K,
    v: V,
    *,
    return_lse: Literal[True],
    bias: Float[AnyArray, '#*B #H #T #S'] | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    kv_segment_ids: Int[Numbers, '*B S'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    kv_cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    q_lengths: int | Int[Numbers, '*B'] | None = None,
    kv_lengths: int | Int[Numbers, '*B'] | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    alibi_slopes: Float[Numbers, ' H'] | None = None,
    q_offset: int | Int[Numbers, '*B'] | None = None,
    key: PRNGKeyArray | None = None,
    inference: bool | None = None,
    block_size: int | tuple[int, int] = 128,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    dropout_rate: float = 0.0,
    score_mod: ScoreMod | None = None,
    deterministic: bool = False,
    platform: PlatformLike | None = None,
    config: Any | None = None,
    mask: Bool[AnyArray, '#*B #H #T #S'] | Mask | None | Bool[Numbers, '#*B #H #T #S'] | Mask = None,
    block_map: Bool[AnyArray, '... M N'] | None | Bool[Numbers, '... M N'] = None,
) -> WithLse: ...

@overload
def block_sparse_attention(
    q: Q,
    k: K,
    v: V,
    *,
    return_lse: bool,
    bias: Float[AnyArray, '#*B #H #T #S'] | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    kv_segment_ids: Int[Numbers, '*B S'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    kv_cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    q_lengths: int | Int[Numbers, '*B'] | None = None,
    kv_lengths: int | Int[Numbers, '*B'] | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    alibi_slopes: Float[Numbers, ' H'] | None = None,
    q_offset: int | Int[Numbers, '*B'] | None = None,
    key: PRNGKeyArray | None = None,
    inference: bool | None = None,
    block_size: int | tuple[int, int] = 128,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    dropout_rate: float = 0.0,
    score_mod: ScoreMod | None = None,
    deterministic: bool = False,
    platform: PlatformLike | None = None,
    config: Any | None = None,
    mask: Bool[AnyArray, '#*B #H #T #S'] | Mask | None | Bool[Numbers, '#*B #H #T #S'] | Mask = None,
    block_map: Bool[AnyArray, '... M N'] | None | Bool[Numbers, '... M N'] = None,
) -> Output | WithLse: ...

def causal_conv1d(
    x: Float[AnyArray, '*B T C'],
    weight: Float[AnyArray, 'C W'],
    bias: Float[AnyArray, ' C'] | None = None,
    *,
    initial_state: Float[AnyArray, '... W-1 C'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    activation: str | None = None,
    norm_size: int | None = None,
    sequence_axis: str | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> tuple[Float[Array, '*B T C'], Float[Array, '... W-1 C']]: ...

def delta_rule(
    q: Float[AnyArray, '*B T H D'],
    k: Float[AnyArray, '*B T H D'],
    v: Float[AnyArray, '*B T H V'],
    beta: Float[AnyArray, '*B T H'],
    *,
    initial_state: Float[AnyArray, '... H D V'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    state_indices: Int[Numbers, ' B'] | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    reverse: bool = False,
    sequence_axis: str | None = None,
    state_dtype: DTypeLike | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> tuple[Float[Array, '*B T R V'], Float[Array, '... H D V']]: ...

def dplr_delta_rule(
    q: Float[AnyArray, '*B T H D'],
    k: Float[AnyArray, '*B T H D'],
    v: Float[AnyArray, '*B T H V'],
    a: Float[AnyArray, '*B T H D'],
    b: Float[AnyArray, '*B T H D'],
    g: Float[AnyArray, '*B T H D'],
    *,
    initial_state: Float[AnyArray, '... H D V'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    state_indices: Int[Numbers, ' B'] | None = None,
    scale: float | None = None,
    reverse: bool = False,
    sequence_axis: str | None = None,
    state_dtype: DTypeLike | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> tuple[Float[Array, '*B T R V'], Float[Array, '... H D V']]: ...

@overload
def flash_attention(
    q: Q,
    k: K,
    v: V,
    *,
    return_lse: Literal[False] = False,
    bias: Float[AnyArray, '#*B #H #T #S'] | None = None,
    mask: Bool[Numbers, '#*B #H #T #S'] | Mask | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    kv_segment_ids: Int[Numbers, '*B S'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    kv_cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    q_lengths: int | Int[Numbers, '*B'] | None = None,
    kv_lengths: int | Int[Numbers, '*B'] | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    alibi_slopes: Float[Numbers, ' H'] | None = None,
    q_offset: int | Int[Numbers, '*B'] | None = None,
    key: PRNGKeyArray | None = None,
    inference: bool | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Output: ...

@overload
def flash_attention(
    q: Q,
    k: K,
    v: V,
    *,
    return_lse: Literal[True],
    bias: Float[AnyArray, '#*B #H #T #S'] | None = None,
    mask: Bool[Numbers, '#*B #H #T #S'] | Mask | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    kv_segment_ids: Int[Numbers, '*B S'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    kv_cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    q_lengths: int | Int[Numbers, '*B'] | None = None,
    kv_lengths: int | Int[Numbers, '*B'] | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    alibi_slopes: Float[Numbers, ' H'] | None = None,
    q_offset: int | Int[Numbers, '*B'] | None = None,
    key: PRNGKeyArray | None = None,
    inference: bool | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> WithLse: ...

@overload
def flash_attention(
    q: Q,
    k: K,
    v: V,
    *,
    return_lse: bool,
    bias: Float[AnyArray, '#*B #H #T #S'] | None = None,
    mask: Bool[Numbers, '#*B #H #T #S'] | Mask | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    kv_segment_ids: Int[Numbers, '*B S'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    kv_cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    q_lengths: int | Int[Numbers, '*B'] | None = None,
    kv_lengths: int | Int[Numbers, '*B'] | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    alibi_slopes: Float[Numbers, ' H'] | None = None,
    q_offset: int | Int[Numbers, '*B'] | None = None,
    key: PRNGKeyArray | None = None,
    inference: bool | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Output | WithLse: ...

def gated_delta_rule(
    q: Float[AnyArray, '*B T H D'],
    k: Float[AnyArray, '*B T H D'],
    v: Float[AnyArray, '*B T H V'],
    g: Float[AnyArray, '*B T H *D'],
    beta: Float[AnyArray, '*B T H'],
    *,
    A_log: Float[AnyArray, ' H'] | None = None,
    dt_bias: Float[AnyArray, ' H *D'] | None = None,
    initial_state: Float[AnyArray, '... H D V'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    state_indices: Int[Numbers, ' B'] | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    gate: Literal['log', 'softplus', 'bounded'] = 'log',
    lower_bound: float | None = None,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    reverse: bool = False,
    sequence_axis: str | None = None,
    state_dtype: DTypeLike | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> tuple[Float[Array, '*B T R V'], Float[Array, '... H D V']]: ...

def gated_linear_attention(
    q: Float[AnyArray, '*B T H D'],
    k: Float[AnyArray, '*B T H D'],
    v: Float[AnyArray, '*B T H V'],
    g: Float[AnyArray, '*B T H D'],
    *,
    bonus: Float[AnyArray, 'H D'] | None = None,
    initial_state: Float[AnyArray, '... H D V'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    state_indices: Int[Numbers, ' B'] | None = None,
    scale: float | None = None,
    reverse: bool = False,
    sequence_axis: str | None = None,
    state_dtype: DTypeLike | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> tuple[Float[Array, '*B T R V'], Float[Array, '... H D V']]: ...

def gated_rms_norm(
    x: Float[AnyArray, '*B C'],
    z: Float[AnyArray, '*B C'] | None = None,
    weight: Float[AnyArray, ' C'] | None = None,
    *,
    activation: str = 'silu',
    norm_before_gate: bool = False,
    group_size: int | None = None,
    eps: float = 1e-06,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Float[Array, '*B C']: ...

def grouped_matmul(
    lhs: Float[AnyArray, '*B M K'],
    rhs: AnyArray | QuantizedWeight,
    group_sizes: Int[Numbers, '*B E'],
    bias: Float[AnyArray, 'E N'] | None = None,
    *,
    rhs_scale: Float[AnyArray, 'E N'] | None = None,
    up: AnyArray | QuantizedWeight | None = None,
    up_bias: Float[AnyArray, 'E N'] | None = None,
    up_scale: Float[AnyArray, 'E N'] | None = None,
    row_indices: Int[Numbers, '*B M'] | None = None,
    activation: str | None = None,
    gate_up: str | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_shift: float = 0.0,
    transpose_rhs: bool = False,
    preferred_element_type: Any | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Float[Array, '*B M N']: ...

def kernel_delta_attention(
    q: Float[AnyArray, '*B T H D'],
    k: Float[AnyArray, '*B T H D'],
    v: Float[AnyArray, '*B T H V'],
    g: Float[AnyArray, '*B T H *D'],
    beta: Float[AnyArray, '*B T H'],
    *,
    A_log: Float[AnyArray, ' H'] | None = None,
    dt_bias: Float[AnyArray, ' H *D'] | None = None,
    initial_state: Float[AnyArray, '... H D V'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    state_indices: Int[Numbers, ' B'] | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    gate: Literal['log', 'softplus', 'bounded'] = 'log',
    lower_bound: float | None = None,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    reverse: bool = False,
    sequence_axis: str | None = None,
    state_dtype: DTypeLike | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> tuple[Float[Array, '*B T R V'], Float[Array, '... H D V']]: ...

def lightning_attention(
    q: Float[AnyArray, '*B T H D'],
    k: Float[AnyArray, '*B T H D'],
    v: Float[AnyArray, '*B T H V'],
    *,
    initial_state: Float[AnyArray, '... H D V'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    state_indices: Int[Numbers, ' B'] | None = None,
    layer_index: int = 0,
    num_layers: int = 1,
    scale: float | None = None,
    reverse: bool = False,
    sequence_axis: str | None = None,
    state_dtype: DTypeLike | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
    slopes: Literal['minimax', 'fla'] | None | Float[AnyArray, ' H'] = 'minimax',
) -> tuple[Float[Array, '*B T R V'], Float[Array, '... H D V']]: ...

def linear_attention(
    q: Float[AnyArray, '*B T H D'],
    k: Float[AnyArray, '*B T H D'],
    v: Float[AnyArray, '*B T H V'],
    *,
    g: Float[AnyArray, '*B T H'] | None = None,
    gk: Float[AnyArray, '*B T H D'] | None = None,
    gv: Float[AnyArray, '*B T H V'] | None = None,
    g_gamma: Float[AnyArray, ' H'] | None = None,
    initial_state: State | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    state_indices: Int[Numbers, ' B'] | None = None,
    scale: float | None = None,
    normalize: bool = False,
    reverse: bool = False,
    sequence_axis: str | None = None,
    state_dtype: DTypeLike | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> tuple[Float[Array, '*B T R V'], FinalState]: ...

@overload
def linear_cross_entropy(
    x: Features,
    labels: Labels,
    weight: Head,
    bias: HeadBias | None = None,
    token_weights: TokenWeights | None = None,
    *,
    return_statistics: Literal[False] = False,
    reduction: str = 'mean',
    logits_soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    temperature: float = 1.0,
    vocab_axis: str | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Loss: ...

@overload
def linear_cross_entropy(
    x: Features,
    labels: Labels,
    weight: Head,
    bias: HeadBias | None = None,
    token_weights: TokenWeights | None = None,
    *,
    return_statistics: Literal[True],
    reduction: str = 'mean',
    logits_soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    temperature: float = 1.0,
    vocab_axis: str | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> tuple[Loss, TokenStatistics]: ...

def linear_divergence(
    x: Float[AnyArray, '*B E'],
    weight: Float[AnyArray, 'V E'],
    teacher: Teacher,
    bias: Float[AnyArray, ' V'] | None = None,
    token_weights: Float[AnyArray, '*B'] | None = None,
    *,
    mask: Bool[AnyArray, '*B'] | None = None,
    divergence: str = 'forward_kl',
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = 'mean',
    logits_soft_cap: float | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Float[Array, '...']: ...

def matmul(
    x: Float[AnyArray, '*B K'],
    *,
    biases: Sequence[Float[AnyArray, ' N'] | None] = (),
    norm: Float[AnyArray, ' K'] | bool = False,
    norm_eps: float = 1e-06,
    residual: Float[AnyArray, '*B N'] | None = None,
    activation: str | None = None,
    gated: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_shift: float = 0.0,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Float[Array, '*B N']: ...

def mean_pooling(
    x: Float[AnyArray, '*B T C'],
    *,
    mask: Bool[Numbers, '*B T'] | None = None,
    lengths: int | Int[Numbers, '*B'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    reduction: str = 'mean',
    chunk_size: int | None = None,
    normalize: bool = False,
    eps: float = 1e-12,
    num_segments: int | None = None,
    max_chunks: int | None = None,
    indices_are_sorted: bool = False,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Float[Array, '*B ... C']: ...

@overload
def multi_head_latent_attention(
    q: Float[AnyArray, '*B T H D'],
    k: Float[AnyArray, '*B S H Dn'],
    k_rope: Float[AnyArray, '*B S Dr'],
    v: Float[AnyArray, '*B S H V'],
    *,
    return_lse: Literal[False] = False,
    bias: Float[AnyArray, '#*B #H #T #S'] | None = None,
    mask: Bool[Numbers, '#*B #H #T #S'] | Mask | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    kv_segment_ids: Int[Numbers, '*B S'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    kv_cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    q_lengths: int | Int[Numbers, '*B'] | None = None,
    kv_lengths: int | Int[Numbers, '*B'] | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    alibi_slopes: Float[Numbers, ' H'] | None = None,
    q_offset: int | Int[Numbers, '*B'] | None = None,
    key: PRNGKeyArray | None = None,
    inference: bool | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    dropout_rate: float = 0.0,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Output: ...

@overload
def multi_head_latent_attention(
    q: Float[AnyArray, '*B T H D'],
    k: Float[AnyArray, '*B S H Dn'],
    k_rope: Float[AnyArray, '*B S Dr'],
    v: Float[AnyArray, '*B S H V'],
    *,
    return_lse: Literal[True],
    bias: Float[AnyArray, '#*B #H #T #S'] | None = None,
    mask: Bool[Numbers, '#*B #H #T #S'] | Mask | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    kv_segment_ids: Int[Numbers, '*B S'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    kv_cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    q_lengths: int | Int[Numbers, '*B'] | None = None,
    kv_lengths: int | Int[Numbers, '*B'] | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    alibi_slopes: Float[Numbers, ' H'] | None = None,
    q_offset: int | Int[Numbers, '*B'] | None = None,
    key: PRNGKeyArray | None = None,
    inference: bool | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    dropout_rate: float = 0.0,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> WithLse: ...

@overload
def multi_head_latent_attention(
    q: Float[AnyArray, '*B T H D'],
    k: Float[AnyArray, '*B S H Dn'],
    k_rope: Float[AnyArray, '*B S Dr'],
    v: Float[AnyArray, '*B S H V'],
    *,
    return_lse: bool,
    bias: Float[AnyArray, '#*B #H #T #S'] | None = None,
    mask: Bool[Numbers, '#*B #H #T #S'] | Mask | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    kv_segment_ids: Int[Numbers, '*B S'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    kv_cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    q_lengths: int | Int[Numbers, '*B'] | None = None,
    kv_lengths: int | Int[Numbers, '*B'] | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    alibi_slopes: Float[Numbers, ' H'] | None = None,
    q_offset: int | Int[Numbers, '*B'] | None = None,
    key: PRNGKeyArray | None = None,
    inference: bool | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    dropout_rate: float = 0.0,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Output | WithLse: ...

@overload
def native_sparse_attention(
    q: Float[AnyArray, '*B T H D'],
    k: Float[AnyArray, '*B S K D'],
    v: Float[AnyArray, '*B S K V'],
    gates: Float[AnyArray, '*B T H 3'],
    *,
    return_indices: Literal[False] = False,
    compressed_k: Float[AnyArray, '*B C K D'] | None = None,
    compressed_v: Float[AnyArray, '*B C K V'] | None = None,
    block_indices: Int[Numbers, '*B T K n'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    segment_ids: Int[Numbers, '*S T'] | None = None,
    max_segments: int | None = None,
    q_offset: int | Int[Numbers, '*B'] | None = None,
    block_size: int = 64,
    num_blocks: int = 16,
    sliding_window: int = 512,
    compression_size: int | None = None,
    compression_stride: int | None = None,
    softmax_scale: float | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Float[Array, '*B T H V']: ...

@overload
def native_sparse_attention(
    q: Float[AnyArray, '*B T H D'],
    k: Float[AnyArray, '*B S K D'],
    v: Float[AnyArray, '*B S K V'],
    gates: Float[AnyArray, '*B T H 3'],
    *,
    return_indices: Literal[True],
    compressed_k: Float[AnyArray, '*B C K D'] | None = None,
    compressed_v: Float[AnyArray, '*B C K V'] | None = None,
    block_indices: Int[Numbers, '*B T K n'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    segment_ids: Int[Numbers, '*S T'] | None = None,
    max_segments: int | None = None,
    q_offset: int | Int[Numbers, '*B'] | None = None,
    block_size: int = 64,
    num_blocks: int = 16,
    sliding_window: int = 512,
    compression_size: int | None = None,
    compression_stride: int | None = None,
    softmax_scale: float | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> tuple[Float[Array, '*B T H V'], Int[Array, '*B T K n']]: ...

@overload
def paged_attention(
    q: Query,
    cache: Cache,
    *,
    return_lse: Literal[False] = False,
    sinks: Float[Numbers, ' H *n'] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Output: ...

@overload
def paged_attention(
    q: Query,
    cache: Cache,
    *,
    return_lse: Literal[True],
    sinks: Float[Numbers, ' H *n'] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> WithLse: ...

@overload
def paged_attention(
    q: Query,
    cache: Cache,
    *,
    return_lse: bool,
    sinks: Float[Numbers, ' H *n'] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Output | WithLse: ...

@overload
def paged_native_sparse_attention(
    q: Float[AnyArray, '*B T H D'],
    gates: Float[AnyArray, '*B T H 3'],
    cache: PagedKVCache,
    compressed: PagedKVCache,
    *,
    return_indices: Literal[False] = False,
    query_start_loc: Int[Numbers, ' N+1'] | None = None,
    max_query_len: int | None = None,
    block_indices: Int[Numbers, '*B T K n'] | None = None,
    block_size: int = 64,
    num_blocks: int = 16,
    sliding_window: int = 512,
    compression_size: int | None = None,
    compression_stride: int | None = None,
    softmax_scale: float | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Output: ...

@overload
def paged_native_sparse_attention(
    q: Float[AnyArray, '*B T H D'],
    gates: Float[AnyArray, '*B T H 3'],
    cache: PagedKVCache,
    compressed: PagedKVCache,
    *,
    return_indices: Literal[True],
    query_start_loc: Int[Numbers, ' N+1'] | None = None,
    max_query_len: int | None = None,
    block_indices: Int[Numbers, '*B T K n'] | None = None,
    block_size: int = 64,
    num_blocks: int = 16,
    sliding_window: int = 512,
    compression_size: int | None = None,
    compression_stride: int | None = None,
    softmax_scale: float | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> WithIndices: ...

@overload
def prefill_paged_attention(
    q: Query,
    cache: Cache,
    *,
    return_lse: Literal[False] = False,
    query_start_loc: Int[Numbers, ' N+1'],
    max_query_len: int | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Output: ...

@overload
def prefill_paged_attention(
    q: Query,
    cache: Cache,
    *,
    return_lse: Literal[True],
    query_start_loc: Int[Numbers, ' N+1'],
    max_query_len: int | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> WithLse: ...

@overload
def prefill_paged_attention(
    q: Query,
    cache: Cache,
    *,
    return_lse: bool,
    query_start_loc: Int[Numbers, ' N+1'],
    max_query_len: int | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Output | WithLse: ...

@overload
def ragged_decode_attention(
    q: Float[AnyArray, '*B H D'],
    k: Float[AnyArray, '*B S K D'],
    v: Float[AnyArray, '*B S K V'],
    start: int | Int[Numbers, '*B'],
    end: int | Int[Numbers, '*B'],
    *,
    return_lse: Literal[False] = False,
    sinks: Float[Numbers, ' H *n'] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Output: ...

@overload
def ragged_decode_attention(
    q: Float[AnyArray, '*B H D'],
    k: Float[AnyArray, '*B S K D'],
    v: Float[AnyArray, '*B S K V'],
    start: int | Int[Numbers, '*B'],
    end: int | Int[Numbers, '*B'],
    *,
    return_lse: Literal[True],
    sinks: Float[Numbers, ' H *n'] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> WithLse: ...

@overload
def ragged_decode_attention(
    q: Float[AnyArray, '*B H D'],
    k: Float[AnyArray, '*B S K D'],
    v: Float[AnyArray, '*B S K V'],
    start: int | Int[Numbers, '*B'],
    end: int | Int[Numbers, '*B'],
    *,
    return_lse: bool,
    sinks: Float[Numbers, ' H *n'] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Output | WithLse: ...

@overload
def ragged_paged_attention(
    q: Query,
    cache: Cache,
    k: None = None,
    v: None = None,
    *,
    return_lse: Literal[False] = False,
    query_start_loc: Int[Numbers, ' N+1'],
    max_query_len: int | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    window: Int[Numbers, ''] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    append: bool = False,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Output: ...

@overload
def ragged_paged_attention(
    q: Query,
    cache: Cache,
    k: None = None,
    v: None = None,
    *,
    return_lse: Literal[True],
    query_start_loc: Int[Numbers, ' N+1'],
    max_query_len: int | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    window: Int[Numbers, ''] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    append: bool = False,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> WithLse: ...

@overload
def ragged_paged_attention(
    q: Query,
    cache: C,
    k: Float[AnyArray, 'T *K D'],
    v: Float[AnyArray, 'T *K V'],
    *,
    return_lse: Literal[False] = False,
    query_start_loc: Int[Numbers, ' N+1'],
    max_query_len: int | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    window: Int[Numbers, ''] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    append: bool = False,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> tuple[Output, C]: ...

@overload
def ragged_paged_attention(
    q: Query,
    cache: C,
    k: Float[AnyArray, 'T *K D'],
    v: Float[AnyArray, 'T *K V'],
    *,
    return_lse: Literal[True],
    query_start_loc: Int[Numbers, ' N+1'],
    max_query_len: int | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    window: Int[Numbers, ''] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    append: bool = False,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> tuple[Output, Float[Array, '*B T H'], C]: ...

def recurrent(
    inputs: Float[AnyArray, '*B T I'],
    weight_hh: Float[AnyArray, 'G H'],
    bias_hh: Float[AnyArray, ' G'] | None = None,
    *,
    weight_ih: Float[AnyArray, 'G I'] | None = None,
    bias_ih: Float[AnyArray, ' G'] | None = None,
    initial_state: GivenState | None = None,
    lengths: Int[Numbers, '*B'] | None = None,
    resets: Bool[Numbers, '*B T'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    state_indices: Int[Numbers, ' B'] | None = None,
    cell: str = 'lstm',
    activation: str = 'tanh',
    gate_activation: str = 'sigmoid',
    reverse: bool = False,
    state_dtype: DTypeLike | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> tuple[Float[Array, '*B T H'], NewState]: ...

def residual_rms_norm(
    x: Float[AnyArray, '*B C'],
    branch: Float[AnyArray, '*B C'] | None = None,
    weight: Float[AnyArray, ' C'] | None = None,
    *,
    eps: float = 1e-06,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> tuple[Float[Array, '*B C'], Float[Array, '*B C']]: ...

@overload
def ring_attention(
    q: Q,
    k: K,
    v: V,
    *,
    return_lse: Literal[False] = False,
    bias: Float[AnyArray, '#*B #H #T ...'] | None = None,
    mask: Bool[Numbers, '#*B #H #T ...'] | Mask | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    kv_segment_ids: Int[Numbers, '*B S'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    kv_cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    q_lengths: int | Int[Numbers, '*B'] | None = None,
    kv_lengths: int | Int[Numbers, '*B'] | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    alibi_slopes: Float[Numbers, ' H'] | None = None,
    q_offset: int | Int[Numbers, '*B'] | None = None,
    key: PRNGKeyArray | None = None,
    inference: bool | None = None,
    axis_name: str,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    dropout_rate: float = 0.0,
    order: Literal['contiguous', 'zigzag'] = 'contiguous',
    method: Literal['ring', 'all_to_all'] | None = None,
    deterministic: bool = False,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Output: ...

@overload
def ring_attention(
    q: Q,
    k: K,
    v: V,
    *,
    return_lse: Literal[True],
    bias: Float[AnyArray, '#*B #H #T ...'] | None = None,
    mask: Bool[Numbers, '#*B #H #T ...'] | Mask | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    kv_segment_ids: Int[Numbers, '*B S'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    kv_cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    q_lengths: int | Int[Numbers, '*B'] | None = None,
    kv_lengths: int | Int[Numbers, '*B'] | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    alibi_slopes: Float[Numbers, ' H'] | None = None,
    q_offset: int | Int[Numbers, '*B'] | None = None,
    key: PRNGKeyArray | None = None,
    inference: bool | None = None,
    axis_name: str,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    dropout_rate: float = 0.0,
    order: Literal['contiguous', 'zigzag'] = 'contiguous',
    method: Literal['ring', 'all_to_all'] | None = None,
    deterministic: bool = False,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> WithLse: ...

@overload
def ring_attention(
    q: Q,
    k: K,
    v: V,
    *,
    return_lse: bool,
    bias: Float[AnyArray, '#*B #H #T ...'] | None = None,
    mask: Bool[Numbers, '#*B #H #T ...'] | Mask | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    kv_segment_ids: Int[Numbers, '*B S'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    kv_cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    q_lengths: int | Int[Numbers, '*B'] | None = None,
    kv_lengths: int | Int[Numbers, '*B'] | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    alibi_slopes: Float[Numbers, ' H'] | None = None,
    q_offset: int | Int[Numbers, '*B'] | None = None,
    key: PRNGKeyArray | None = None,
    inference: bool | None = None,
    axis_name: str,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    dropout_rate: float = 0.0,
    order: Literal['contiguous', 'zigzag'] = 'contiguous',
    method: Literal['ring', 'all_to_all'] | None = None,
    deterministic: bool = False,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Output | WithLse: ...

def rotary_heads(
    q: Float[AnyArray, '*B T H D'],
    k: Float[AnyArray, '*B T K D'],
    cos: Float[AnyArray, '*B T R'],
    sin: Float[AnyArray, '*B T R'],
    *,
    q_norm: Float[AnyArray, ' D'] | None = None,
    k_norm: Float[AnyArray, ' D'] | None = None,
    norm_eps: float | None = None,
    interleaved: bool = False,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> tuple[Float[Array, '*B T H D'], Float[Array, '*B T K D']]: ...

def rwkv7(
    r: Float[AnyArray, '*B T H D'],
    w: Float[AnyArray, '*B T H D'],
    k: Float[AnyArray, '*B T H D'],
    v: Float[AnyArray, '*B T H V'],
    kappa: Float[AnyArray, '*B T H D'],
    eta: Float[AnyArray, '*B T H D'],
    *,
    initial_state: Float[AnyArray, '... H D V'] | None = None,
    cu_seqlens: Int[Numbers, ' N+1'] | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    state_indices: Int[Numbers, ' B'] | None = None,
    reverse: bool = False,
    sequence_axis: str | None = None,
    state_dtype: DTypeLike | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> tuple[Float[Array, '*B T R V'], Float[Array, '... H D V']]: ...

@overload
def scaled_dot_product_attention(
    query: Q,
    key: K,
    value: V,
    bias: Float[AnyArray, '#*B #H #T #S'] | None = None,
    mask: Bool[Numbers, '#*B #H #T #S'] | None = None,
    *,
    return_residual: Literal[False] = False,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Numbers, '*B'] | None = None,
    key_value_seq_lengths: Int[Numbers, '*B'] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    deterministic: bool = False,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Output: ...

@overload
def scaled_dot_product_attention(
    query: Q,
    key: K,
    value: V,
    bias: Float[AnyArray, '#*B #H #T #S'] | None = None,
    mask: Bool[Numbers, '#*B #H #T #S'] | None = None,
    *,
    return_residual: Literal[True],
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Numbers, '*B'] | None = None,
    key_value_seq_lengths: Int[Numbers, '*B'] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    deterministic: bool = False,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> WithLse: ...

@overload
def scaled_dot_product_attention(
    query: Q,
    key: K,
    value: V,
    bias: Float[AnyArray, '#*B #H #T #S'] | None = None,
    mask: Bool[Numbers, '#*B #H #T #S'] | None = None,
    *,
    return_residual: bool,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Numbers, '*B'] | None = None,
    key_value_seq_lengths: Int[Numbers, '*B'] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    deterministic: bool = False,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Output | WithLse: ...

def scaled_matmul(
    x: Float[AnyArray, '*B K'],
    weight: QuantizedWeight,
    group_sizes: Int[AnyArray, '*C E'] | None = None,
    *,
    x_scale: Float[AnyArray, ''] | float | None = None,
    preferred_element_type: Any | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Float[Array, '*B N']: ...

def state_space_v1(
    x: Float[AnyArray, '*B T I'],
    dt: Float[AnyArray, '*B T I'],
    A: Float[AnyArray, 'I N'],
    B: Float[AnyArray, '*B T *G N'],
    C: Float[AnyArray, '*B T *G N'],
    *,
    D: Float[AnyArray, ' I'] | None = None,
    z: Float[AnyArray, '*B T I'] | None = None,
    dt_bias: Float[AnyArray, ' I'] | None = None,
    initial_state: Float[AnyArray, '... I N'] | None = None,
    cu_seqlens: Int[Numbers, ' S+1'] | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    state_indices: Int[Numbers, ' B'] | None = None,
    dt_softplus: bool = False,
    num_groups: int = 1,
    reverse: bool = False,
    sequence_axis: str | None = None,
    state_dtype: DTypeLike | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> tuple[Float[Array, '*B T I'], Float[Array, '... I N']]: ...

def state_space_v2(
    x: Float[AnyArray, '*B T H P'],
    dt: Float[AnyArray, '*B T H'],
    A: Float[AnyArray, ' H'],
    B: Float[AnyArray, '*B T G N'],
    C: Float[AnyArray, '*B T G N'],
    *,
    D: Float[AnyArray, ' H *P'] | None = None,
    z: Float[AnyArray, '*B T H P'] | None = None,
    dt_bias: Float[AnyArray, ' H'] | None = None,
    norm_weight: Float[AnyArray, 'H P'] | None = None,
    initial_state: Float[AnyArray, '... H P N'] | None = None,
    cu_seqlens: Int[Numbers, ' S+1'] | None = None,
    segment_ids: Int[Numbers, '*B T'] | None = None,
    state_indices: Int[Numbers, ' B'] | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    norm: Literal['group', 'whole'] | None = None,
    norm_eps: float = 1e-05,
    reverse: bool = False,
    sequence_axis: str | None = None,
    state_dtype: DTypeLike | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> tuple[Float[Array, '*B T H P'], Float[Array, '... H P N']]: ...

@overload
def unified_attention(
    q: Query,
    cache: Cache,
    *,
    return_lse: Literal[False] = False,
    query_start_loc: Int[Numbers, ' N+1'],
    max_query_len: int | None = None,
    alibi_slopes: Float[Numbers, ' H'] | None = None,
    qq_bias: Float[AnyArray, 'Q Q'] | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    window: Int[Numbers, ''] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Output: ...

@overload
def unified_attention(
    q: Query,
    cache: Cache,
    *,
    return_lse: Literal[True],
    query_start_loc: Int[Numbers, ' N+1'],
    max_query_len: int | None = None,
    alibi_slopes: Float[Numbers, ' H'] | None = None,
    qq_bias: Float[AnyArray, 'Q Q'] | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    window: Int[Numbers, ''] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> WithLse: ...

@overload
def unified_attention(
    q: Query,
    cache: Cache,
    *,
    return_lse: bool,
    query_start_loc: Int[Numbers, ' N+1'],
    max_query_len: int | None = None,
    alibi_slopes: Float[Numbers, ' H'] | None = None,
    qq_bias: Float[AnyArray, 'Q Q'] | None = None,
    sinks: Float[Numbers, ' H *n'] | None = None,
    window: Int[Numbers, ''] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    platform: PlatformLike | None = None,
    config: Any | None = None,
) -> Output | WithLse: ...
