"""Layers with weights, built from the operations."""

from .alibi import alibi_slopes as alibi_slopes
from .attention import MultiHeadAttention as MultiHeadAttention
from .cache_state import CacheState as CacheState
from .gated_delta_net import GatedDeltaNet as GatedDeltaNet
from .gated_linear_attention import GatedLinearAttention as GatedLinearAttention
from .gated_rms_norm import GatedRMSNorm as GatedRMSNorm
from .kimi_delta_attention import KimiDeltaAttention as KimiDeltaAttention
from .kv_cache import KVCache as KVCache
from .lightning_attention import LightningAttention as LightningAttention
from .mamba1 import Mamba1Mixer as Mamba1Mixer
from .mamba2 import Mamba2Mixer as Mamba2Mixer
from .recurrent import RecurrentLayer as RecurrentLayer
from .recurrent import RecurrentState as RecurrentState
from .rolling_cache import RollingKVCache as RollingKVCache
from .rotary import DynamicScaling as DynamicScaling
from .rotary import LinearScaling as LinearScaling
from .rotary import Llama3Scaling as Llama3Scaling
from .rotary import LongRopeScaling as LongRopeScaling
from .rotary import ProportionalScaling as ProportionalScaling
from .rotary import RotaryChoice as RotaryChoice
from .rotary import RotaryEmbedding as RotaryEmbedding
from .rotary import YarnScaling as YarnScaling
from .short_convolution import ShortConvolution as ShortConvolution
