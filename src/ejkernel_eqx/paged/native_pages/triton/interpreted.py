"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for testing."""

from ....attention.native_sparse.triton.compiled import RowTile
from ....core.platforms import Interpreted
from ...triton.interpreted import platform as pages
from . import compiled
from .compiled import KeysTile, TritonConfig

_WHOLE = pages.default_config(None, None)  # pyright: ignore[reportArgumentType]
platform = Interpreted(
    compiled, TritonConfig(RowTile(4, 1), KeysTile(16, 4, 1), _WHOLE, _WHOLE), float32_dot="ieee"
)
