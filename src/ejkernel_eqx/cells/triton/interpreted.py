"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for testing."""

from ...core.platforms import Interpreted
from . import compiled
from .tile_sizes import CellTile, TritonConfig

_PORTABLE = {"float32_dot": "ieee", "fast_sigmoid": False, "concurrent_programs": 0}

platform = Interpreted(
    compiled, TritonConfig(CellTile(16, 32, 32, 4), CellTile(16, 32, 32, 4), **_PORTABLE), **_PORTABLE
)
