"""Platform `xla`: attention's scan over tiles, on keys with the rotary part repeated for every head."""

from jax import Array

from ..attention import xla
from ..attention.spec import AttentionSpec
from ..attention.xla import XlaConfig
from ..core.arguments import accumulator
from .spec import LatentArrays, LatentGrads

PARTS = xla.PARTS
config_type = XlaConfig
unsupported, default_config, candidates = xla.unsupported, xla.default_config, xla.candidates


def forward(arrays: LatentArrays, spec: AttentionSpec, config: XlaConfig) -> tuple[Array, Array]:
    """`out [B, T, H, V]`, `lse [B, H, T]`."""
    return xla.forward(arrays.whole, spec, config)


def backward(
    arrays: LatentArrays,
    spec: AttentionSpec,
    config: XlaConfig,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
) -> LatentGrads:
    """Gradients of all arrays, from `out`, `lse` and their cotangents. That of the rotary keys is a sum over heads, of numbers that have not been
    rounded."""
    wide, nope = accumulator(arrays.q.dtype), arrays.k.shape[-1]
    grads = xla.backward(arrays.whole, spec, config, out, lse, dout, dlse, key_dtype=wide)
    dk, dk_rope = grads.k[..., :nope].astype(arrays.k.dtype), grads.k[..., nope:].sum(-2)
    return LatentGrads(k_rope=dk_rope, **grads._replace(k=dk)._asdict())
