"""Platform `pallas-interpret`: the same Pallas kernels, interpreted on the host. Slow; for testing."""

from ...core.platforms import InterpretedPallas
from . import compiled
from .call import PallasConfig

CONFIG = PallasConfig(decode_queries=2, decode_keys=16, block_q=16, block_k=16)
platform = InterpretedPallas(compiled, CONFIG)
