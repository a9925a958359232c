"""Rotary position embeddings, and the published methods of scaling them to longer contexts."""

from .by_length import DynamicScaling as DynamicScaling
from .by_length import LongRopeScaling as LongRopeScaling
from .choice import RotaryChoice as RotaryChoice
from .embedding import RotaryEmbedding as RotaryEmbedding
from .positions import check_positions as check_positions
from .scaling import LinearScaling as LinearScaling
from .scaling import Llama3Scaling as Llama3Scaling
from .scaling import ProportionalScaling as ProportionalScaling
from .scaling import YarnScaling as YarnScaling
