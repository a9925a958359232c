"""Both halves of the expanded form by the kernels of attention, which take keys with a second part."""

from collections.abc import Callable
from typing import Any

from jax import Array

from ..attention.spec import AttentionSpec
from ..dispatch import FORWARD
from .spec import LatentArrays, LatentGrads

PARTS = {"forward": FORWARD, "key_gradient": "k k_rope v", "query_gradient": "q bias alibi_slopes sinks"}


def halves(attention: Any) -> tuple[Callable[..., tuple[Array, Array]], Callable[..., LatentGrads]]:
    """`forward` and `backward` of a platform whose kernels are those of a platform of attention."""

    def forward(arrays: LatentArrays, spec: AttentionSpec, config: Any) -> tuple[Array, Array]:
        """`out [B, T, H, V]`, `lse [B, H, T]`."""
        return attention.forward(arrays.apart, spec, config, k_rope=arrays.k_rope)

    def backward(
        arrays: LatentArrays,
        spec: AttentionSpec,
        config: Any,
        out: Array,
        lse: Array,
        dout: Array,
        dlse: Array,
    ) -> LatentGrads:
        """Gradients of all arrays; bitwise repeatable, as every sum has one fixed order."""
        call = arrays.apart, spec, config, out, lse, dout, dlse
        grads, dk_rope = attention.gradients(*call, k_rope=arrays.k_rope)
        return LatentGrads(k_rope=dk_rope, **grads._asdict())

    return forward, backward
