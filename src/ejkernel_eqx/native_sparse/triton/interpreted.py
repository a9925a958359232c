"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for testing."""

from ...attention.triton.compiled import TileConfig
from ...attention.triton.compiled import TritonConfig as AttentionConfig
from ...core.platforms import Interpreted
from ...paged.triton.interpreted import CONFIG as PAGES
from . import compiled
from .compiled import TritonConfig
from .tiles import FewTiles, ForwardTile, KeyTile, RowTile, SelectionTile, StepTile

_SQUARE = TileConfig(32, 32, 4, 1)
_WHOLE = AttentionConfig(_SQUARE, _SQUARE, _SQUARE, fast_tanh=False, float32_dot="ieee")
_TILES = ForwardTile(0, 2, 4, 1), RowTile(4, 1), KeyTile(2, 8, 4, 1), SelectionTile(16, 16, 4, 1)
_FEW = FewTiles(StepTile(16, 3, 4, 1), PAGES, PAGES)
platform = Interpreted(compiled, TritonConfig(*_TILES, _WHOLE, _WHOLE, _FEW), float32_dot="ieee")
