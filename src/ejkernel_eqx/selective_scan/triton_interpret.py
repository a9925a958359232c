"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for checking."""

from ..core.platforms import Interpreted
from . import triton
from .triton import ScanTile, TritonConfig
from .triton_step import StepTile

platform = Interpreted(
    triton, TritonConfig(8, ScanTile(32, 1, 6, unroll=2), ScanTile(32, 1, 6), StepTile(4, 1))
)
