"""Platform `triton-interpret`: the same Triton kernels, interpreted on the host. Slow; for testing."""

from jax import Array

from ...core.platforms import Interpreted
from ...launch import executing
from ..spec import WriteArrays
from . import compiled
from .call import TritonConfig
from .tile_sizes import SMALLEST


class _Interpreted(Interpreted):
    def write(self, arrays: WriteArrays) -> dict[str, Array]:
        with executing(self.execute):
            return compiled.write(arrays)


CONFIG = TritonConfig(SMALLEST, SMALLEST, split_k=3, chunk_size=16, **compiled.PORTABLE)
platform = _Interpreted(compiled, CONFIG, **compiled.PORTABLE)
