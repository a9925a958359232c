"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for testing."""

from ...core.platforms import Interpreted
from . import compiled

_TILES = compiled.ReadTile(2, 16, 4, 4), compiled.WriteTile(4, 16, 4)
platform = Interpreted(compiled, compiled.TritonConfig(*_TILES))
