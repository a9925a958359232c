"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for checking."""

from ..core.platforms import Interpreted
from . import triton

platform = Interpreted(
    triton,
    triton.TritonConfig(triton.ConvTile(4, 2, 2, 16, 4), triton.ConvTile(4, 4, 2, 16, 4), fast_sigmoid=False),
)
