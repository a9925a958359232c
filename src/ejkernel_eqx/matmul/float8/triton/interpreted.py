"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for testing."""

from ....core.platforms import Interpreted
from . import compiled

platform = Interpreted(compiled, compiled.ScaledTile(32, 32, 4, 1))
