"""Platform `pallas` on TPU: the kernels of attention, with keys that have a second part."""

from ...attention.pallas import compiled as attention
from ...attention.pallas.compiled import PallasConfig
from ...core.platforms import InterpretedPallas
from ..over_attention import halves
from ..over_attention import PARTS as PARTS

OPAQUE, NOTE = attention.OPAQUE, attention.NOTE
config_type = PallasConfig
unsupported, config_unsupported = attention.unsupported, attention.config_unsupported
default_config, candidates = attention.default_config, attention.candidates
forward, backward = halves(attention)


interpreted = InterpretedPallas(__name__, attention.interpreted.config)
"""The same kernels, simulated on the host with small tiles: platform `pallas-interpret`."""
