"""Platform `pallas-interpret`: the Pallas kernels for TPU, simulated on the host. Slow; for testing."""

from ...core.platforms import InterpretedPallas
from . import compiled

platform = InterpretedPallas(compiled, compiled.PallasConfig(16, 2, 2))
