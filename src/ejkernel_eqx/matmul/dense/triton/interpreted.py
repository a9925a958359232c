"""Platform `triton-interpret`: the Triton kernel itself, interpreted on the host. Slow; for testing."""

from ....core.platforms import Interpreted
from . import compiled

_CONFIG = compiled.TritonConfig(compiled.RowsTile(64, 16, 32, 4, 1), True, "ieee", False)
platform = Interpreted(compiled, _CONFIG, float32_dot="ieee", fast_sigmoid=False)
