"""Platform `pallas-interpret`: the Pallas kernels for TPU themselves, interpreted on the host. Slow; for testing."""

from ...attention.pallas.compiled import PallasConfig, TileConfig
from ...core.platforms import InterpretedPallas
from . import compiled

_TILE = TileConfig(128, 128)
platform = InterpretedPallas(compiled, PallasConfig(_TILE, _TILE, _TILE))
