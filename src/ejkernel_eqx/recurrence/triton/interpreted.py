"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for testing."""

from ...core.platforms import Interpreted
from . import compiled
from .tile_sizes import Tile, TritonConfig

platform = Interpreted(
    compiled, TritonConfig(32, *[Tile(32, 32, 4, 1)] * 6, float32_dot="ieee"), float32_dot="ieee"
)
