from .flash import FlashAttention as FlashAttention
from .masks.mask import Mask as Mask
from .merge import merge_attention as merge_attention
from .native_sparse import NativeSparseAttention as NativeSparseAttention
from .plain import Attention as Attention
from .sdpa import ScaledDotProductAttention as ScaledDotProductAttention
from .spec import AttentionArrays as AttentionArrays
from .spec import AttentionSpec as AttentionSpec
