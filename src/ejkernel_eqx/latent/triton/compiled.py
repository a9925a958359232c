"""Platform `triton`: configurations and support. The kernels are those of attention, with keys that have a second part."""

from ...attention.triton import compiled as attention
from ...attention.triton.compiled import TritonConfig
from ...attention.triton.two_part_sizes import dims
from ...core.platforms import Interpreted, kernels_unavailable
from ...dispatch import DeviceFacts, Problem
from ..over_attention import halves
from ..over_attention import PARTS as PARTS

OPAQUE = True
MAX_DIM = 128
config_type = TritonConfig

unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if problem.dtype("qkv") == "float64":
        return "takes float32, float16 and bfloat16, not float64"
    nope, rope, values = dims(problem)
    if max(nope, rope, values) > MAX_DIM:
        return f"takes parts of keys and values up to {MAX_DIM}, not Dn {nope}, Dr {rope} and V {values}"
    return None


default_config, candidates = attention.default_config, attention.candidates
config_unsupported, adapted, remark = attention.config_unsupported, attention.adapted, attention.remark
forward, backward = halves(attention)


_SMALL = attention.interpreted.config
interpreted = Interpreted(__name__, _SMALL, fast_tanh=False, float32_dot="ieee")
"""The same kernels on the host, with tiles for small arrays: platform `triton-interpret`."""
