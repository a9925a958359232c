"""Platform `triton-interpret`: the Triton kernel itself, interpreted on the host. Slow; for testing."""

from ....core.platforms import Interpreted
from . import compiled

platform = Interpreted(compiled, compiled.TritonConfig(compiled.HeadsTile(2, 4)))
