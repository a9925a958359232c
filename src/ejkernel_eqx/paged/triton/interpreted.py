"""Platform `triton-interpret`: the same Triton kernels, interpreted on the host. Slow; for testing."""

from jax import Array

from ...core.platforms import Interpreted
from ..spec import WriteArrays
from . import compiled
from .call import TritonConfig
from .tile_sizes import SMALLEST


class _Interpreted(Interpreted):
    def write(self, arrays: WriteArrays) -> dict[str, Array]:
        return compiled.write(arrays, execute=self.execute)


CONFIG = TritonConfig(SMALLEST, SMALLEST, split_k=3, chunk_size=16, **compiled.PORTABLE)
platform = _Interpreted(compiled, CONFIG, **compiled.PORTABLE)
