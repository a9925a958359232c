"""The base class of native sparse attention over rows and over pages, with the options that both share."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from .._kernel import Kernel, Plan
from ..core.plans import plan_of
from ..dispatch import PlatformLike
from .arguments import Options


class SparseOperation(Kernel):
    """Base class of both operations."""

    options: Options = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(
        self,
        block_size: int = 64,
        num_blocks: int = 16,
        sliding_window: int = 512,
        *,
        compression_size: int | None = None,
        compression_stride: int | None = None,
        softmax_scale: float | None = None,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `block_size`: tokens of a block of the selected branch.
        - `num_blocks`: blocks that each query chooses, its own and the first included.
        - `sliding_window`: keys of the sliding branch, the query's own included.
        - `compression_size`, `compression_stride`: tokens of a compressed key, and between the first tokens of two; by default `block_size`, and
            `compression_size`. The stride divides both sizes. The paper has 32 and 16, with blocks of 64.
        - `softmax_scale`: default `D**-0.5`.
        - `platform`, `config`: as in [`ejkernel_eqx.FlashAttention`][].
        - `tune_for`: [`ejkernel_eqx.inputs`][] of a call, or for [`ejkernel_eqx.NativeSparseAttention`][] `(q, k, v, gates)`, arrays or
            `jax.ShapeDtypeStruct`s: fix the choice for these inputs now.

        **Raises:** `ValueError` for invalid options.
        """
        size = block_size if compression_size is None else compression_size
        stride = size if compression_stride is None else compression_stride
        self.options = Options(block_size, num_blocks, sliding_window, size, stride, softmax_scale)
        self.plan = plan_of(type(self), self, platform, config, tune_for)


def results_of(operation: SparseOperation, kind: Any, arrays: Any, spec: Any, count: int) -> dict[str, Array]:
    """`out` and the chosen blocks `indices`, `count` for each query; zeros and none if there is nothing to launch."""
    lead, kv_heads = arrays.q.shape[:-1], arrays.k.shape[-2]
    if any(x.size == 0 for x in jax.tree.leaves(arrays)):
        out = jnp.zeros((*lead, arrays.v.shape[-1]), arrays.q.dtype)
        results = {"out": out, "indices": jnp.full((*lead[:-1], kv_heads, count), -1, jnp.int32)}
    else:
        results = kind.call(operation.plan, operation.operation, arrays, spec)
    return results if arrays.indices is None else results | {"indices": arrays.indices}
