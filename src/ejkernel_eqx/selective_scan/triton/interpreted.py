"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for testing."""

from ...core.platforms import Interpreted
from . import compiled
from .compiled import ScanTile, TritonConfig
from .step_kernel import StepTile

platform = Interpreted(
    compiled, TritonConfig(8, ScanTile(32, 1, 6, unroll=2), ScanTile(32, 1, 6), StepTile(4, 1))
)
