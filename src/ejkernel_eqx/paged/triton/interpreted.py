"""Platform `triton-interpret`: the same Triton kernels, interpreted on the host. Slow; for testing."""

import functools

from ...core.platforms import Interpreted
from . import compiled
from .call import TritonConfig
from .tile_sizes import SMALLEST

CONFIG = TritonConfig(
    SMALLEST, SMALLEST, split_k=3, chunk_size=16, fast_tanh=False, fast_bytes=False, float32_dot="ieee"
)
platform = Interpreted(compiled, CONFIG, fast_tanh=False, fast_bytes=False, float32_dot="ieee")
vars(platform)["write"] = functools.partial(compiled.write, execute=platform.execute)
