"""Platform `pallas-interpret`: the Pallas kernels for TPU, simulated on the host. Slow; for testing."""

from ...core.platforms import InterpretedPallas
from . import compiled
from .tile_sizes import TpuTile

_TILE = TpuTile(16, 128, 128)
platform = InterpretedPallas(compiled, compiled.PallasConfig(_TILE, _TILE, _TILE))
