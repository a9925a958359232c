"""Platform `pallas-interpret`: the Pallas kernels for TPU themselves, interpreted on the host. Slow; for testing."""

from ...core.platforms import InterpretedPallas
from . import compiled
from .compiled import PallasConfig, TileConfig

_TILE = TileConfig(128, 128)
platform = InterpretedPallas(compiled, PallasConfig(_TILE, _TILE, _TILE))
