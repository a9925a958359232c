from .ring import RingAttention as RingAttention
