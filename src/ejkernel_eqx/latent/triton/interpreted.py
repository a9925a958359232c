"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for testing."""

from ...attention.triton.compiled import TileConfig, TritonConfig
from ...core.platforms import Interpreted
from . import compiled

_TILE = TileConfig(32, 32, 4, 1)
platform = Interpreted(compiled, TritonConfig(_TILE, _TILE, _TILE), fast_tanh=False, float32_dot="ieee")
