"""Platform `pallas-interpret`: the same Pallas kernels, interpreted on the host. Slow; for testing."""

from jax import Array

from ...core.platforms import InterpretedPallas
from ...launch import executing
from ..spec import WriteArrays
from . import compiled
from .call import PallasConfig


class _Interpreted(InterpretedPallas):
    def write(self, arrays: WriteArrays) -> dict[str, Array]:
        with executing(self.execute):
            return compiled.write(arrays)


CONFIG = PallasConfig(decode_queries=2, decode_keys=16, block_q=16, block_k=16)
platform = _Interpreted(compiled, CONFIG)
