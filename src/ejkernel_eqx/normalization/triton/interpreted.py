"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for testing."""

from ...core.platforms import Interpreted
from . import compiled

_TILES = compiled.NormTile(4, 4), compiled.NormTile(2, 4, 2)
platform = Interpreted(compiled, compiled.TritonConfig(*_TILES, fast_sigmoid=False))
