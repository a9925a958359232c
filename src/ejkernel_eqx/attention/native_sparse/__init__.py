from .native import NativeSparseAttention as NativeSparseAttention
