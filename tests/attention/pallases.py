"""The Pallas kernels of attention, which tests of this room name, in one place."""

from ejkernel_eqx.attention.pallas import compiled, tile_sizes
from ejkernel_eqx.attention.pallas.compiled import interpreted, PallasConfig, TileConfig

__all__ = ["PallasConfig", "TileConfig", "compiled", "interpreted", "tile_sizes"]
