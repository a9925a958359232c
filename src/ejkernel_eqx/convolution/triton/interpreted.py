"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for testing."""

from ...core.platforms import Interpreted
from . import compiled

platform = Interpreted(
    compiled,
    compiled.TritonConfig(
        compiled.ConvTile(4, 2, 2, 16, 4), compiled.ConvTile(4, 4, 2, 16, 4), fast_sigmoid=False
    ),
)
