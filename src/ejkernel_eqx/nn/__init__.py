"""Layers with weights, built from the operations."""

from .attention import MultiHeadAttention as MultiHeadAttention
from .kv_cache import KVCache as KVCache
from .rotary import LinearScaling as LinearScaling
from .rotary import Llama3Scaling as Llama3Scaling
from .rotary import RotaryEmbedding as RotaryEmbedding
from .rotary import YarnScaling as YarnScaling
