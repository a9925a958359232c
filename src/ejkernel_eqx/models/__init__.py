"""Whole language models on our layers: a decoder and an encoder, described by data; published models; texts continued and embedded."""

from .caches import DecoderCache as DecoderCache
from .caches import ServingCache as ServingCache
from .config import BranchConfig as BranchConfig
from .config import DecoderConfig as DecoderConfig
from .config import EncoderConfig as EncoderConfig
from .config import LayerConfig as LayerConfig
from .config import MLPConfig as MLPConfig
from .config import MoEConfig as MoEConfig
from .decoder import Decoder as Decoder
from .embeddings import embed as embed
from .encoder import Encoder as Encoder
from .generate import generate as generate
from .generate import Generated as Generated
from .layer import DecoderLayer as DecoderLayer
from .layer import MLP as MLP
from .mixers import MIXERS as MIXERS
from .pooler import Pooler as Pooler
from .pretrained import from_config as from_config
from .pretrained import from_pretrained as from_pretrained
from .published import decoder_config as decoder_config
from .published import encoder_config as encoder_config
from .published import FAMILIES as FAMILIES
from .sampling import Sampling as Sampling
from .speculative import Speculation as Speculation
from .stream import stream as stream
