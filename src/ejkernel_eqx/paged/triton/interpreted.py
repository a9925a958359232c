"""Platform `triton-interpret`: the same Triton kernels, interpreted on the host. Slow; for testing."""

from ...core.platforms import Interpreted
from . import compiled
from .call import TritonConfig
from .tile_sizes import SMALLEST

CONFIG = TritonConfig(SMALLEST, SMALLEST, split_k=3, chunk_size=16, **compiled.PORTABLE)
platform = Interpreted(compiled, CONFIG, **compiled.PORTABLE)
