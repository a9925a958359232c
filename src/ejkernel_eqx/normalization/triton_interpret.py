"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for checking."""

from ..core.platforms import Interpreted
from . import triton

platform = Interpreted(
    triton, triton.TritonConfig(triton.NormTile(4, 4), triton.NormTile(2, 4, 2), fast_sigmoid=False)
)
