"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for testing."""

from ....core.platforms import Interpreted
from ....paged.triton.interpreted import CONFIG as PAGES
from ...triton.tiles import ChosenTile, StepTile
from . import compiled
from .compiled import KeysTile, TritonConfig

CONFIG = TritonConfig(StepTile(16, 3, 4, 1), ChosenTile(2, 4, 1), KeysTile(16, 4, 1), PAGES, PAGES)
platform = Interpreted(compiled, CONFIG, float32_dot="ieee")
