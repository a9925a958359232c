"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for testing."""

from ...core.platforms import Interpreted
from . import compiled

_TILE = compiled.GroupedTile(16, 16, 16, 4, 2, 2)
platform = Interpreted(
    compiled, compiled.TritonConfig(_TILE, _TILE, _TILE, "ieee", fast_sigmoid=False), fast_sigmoid=False
)
