"""Platform `triton-interpret`: the same Triton kernels, interpreted on the host. Slow; for testing."""

import functools

from jax import Array

from ...core.platforms import Interpreted
from ...launch import run
from ..spec import WriteArrays
from . import compiled
from .call import TritonConfig
from .tile_sizes import SMALLEST


class _Interpreted(Interpreted):
    def write(self, arrays: WriteArrays) -> dict[str, Array]:
        return compiled.write(arrays, execute=functools.partial(run, interpret=True))


CONFIG = TritonConfig(
    SMALLEST, SMALLEST, split_k=3, chunk_size=16, fast_tanh=False, fast_bytes=False, float32_dot="ieee"
)
platform = _Interpreted(compiled, CONFIG, fast_tanh=False, fast_bytes=False, float32_dot="ieee")
