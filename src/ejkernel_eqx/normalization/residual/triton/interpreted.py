"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for testing."""

from ....core.platforms import Interpreted
from ...triton.tile_sizes import NormTile
from . import compiled

platform = Interpreted(compiled, compiled.TritonConfig(NormTile(4, 4), NormTile(2, 4, 2)))
