"""Platform `pallas` on TPU: the kernels of attention, with keys that have a second part."""

from jax import Array

from ...attention.pallas import compiled as attention
from ...attention.pallas.compiled import PallasConfig
from ...attention.spec import AttentionSpec
from ...dispatch import FORWARD
from ...launch.pallas import Execute, run
from ..spec import LatentArrays, LatentGrads

OPAQUE, NOTE = attention.OPAQUE, attention.NOTE
PARTS = {"forward": FORWARD, "key_gradient": "k k_rope v", "query_gradient": "q bias alibi_slopes sinks"}
config_type = PallasConfig
unsupported, config_unsupported = attention.unsupported, attention.config_unsupported
default_config, candidates = attention.default_config, attention.candidates


def forward(
    arrays: LatentArrays, spec: AttentionSpec, config: PallasConfig, *, execute: Execute = run
) -> tuple[Array, Array]:
    """`out [B, T, H, V]`, `lse [B, H, T]`."""
    return attention.attended(arrays.apart, spec, config, k_rope=arrays.k_rope, execute=execute)


def backward(
    arrays: LatentArrays,
    spec: AttentionSpec,
    config: PallasConfig,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
    *,
    execute: Execute = run,
) -> LatentGrads:
    """All gradients; bitwise repeatable, as every sum has one fixed order."""
    grads, dk_rope = attention.gradients(
        arrays.apart, spec, config, (out, lse), (dout, dlse), k_rope=arrays.k_rope, execute=execute
    )
    assert dk_rope is not None
    return LatentGrads(k_rope=dk_rope, **grads._asdict())
