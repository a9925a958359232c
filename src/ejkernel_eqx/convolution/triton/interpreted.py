"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for testing."""

from ...core.platforms import Interpreted
from . import compiled

_TILES = compiled.ConvTile(4, 2, 2, 16, 4), compiled.ConvTile(4, 4, 2, 16, 4)
platform = Interpreted(compiled, compiled.TritonConfig(*_TILES, fast_sigmoid=False))
