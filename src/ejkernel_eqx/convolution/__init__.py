from .causal import CausalConv1d as CausalConv1d
