"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for checking."""

from ..core.platforms import Interpreted
from . import triton
from .triton_config import Tile, TritonConfig

platform = Interpreted(
    triton, TritonConfig(32, *[Tile(32, 32, 4, 1)] * 6, float32_dot="ieee"), float32_dot="ieee"
)
