"""`MeanPooling`: one vector for each row, sequence or chunk of tokens."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from .._kernel import Kernel, Plan
from .._shapes import AnyArray, Bool, Float, Int, Numbers
from ..core.plans import plan_of
from ..dispatch import PlatformLike
from .arguments import Options, resolve
from .core import POOL


class MeanPooling(Kernel):
    r"""Pools the tokens of each row, packed sequence or chunk into one vector:

    $$y_s = \frac{1}{|\mathcal T_s|} \sum_{t \in \mathcal T_s} x_t \qquad
      \text{or}\quad \sum_{t \in \mathcal T_s} x_t, \quad \max_{t \in \mathcal T_s} x_t, \quad x_{\max \mathcal T_s}$$

    where $\mathcal T_s$ are the tokens of segment $s$, and with `normalize` $y_s / \max(\lVert y_s \rVert_2, \epsilon)$. A segment without tokens
    gives 0. Sums in float32 (float64 for float64) in a fixed order, so results are the same in every run. Padding may hold NaN: it affects no
    result, and its gradient is 0.

    The maximum is taken for each channel; its gradient goes to the first token that has it. A NaN is larger than any number.

    Channels are independent, so heads are channels: reshape `[B, T, H, D]` to `[B, T, H * D]`, which moves nothing, and the result back. With
    `normalize` make the heads a leading axis instead, as the norm is over all channels.

    Platforms and derivatives: as for [`ejkernel_eqx.CausalConv1d`][].

    Source: Reimers & Gurevych, *Sentence-BERT* (2019, arXiv:1908.10084), section 3; over chunks, Yuan et al., *Native Sparse Attention* (2025,
    arXiv:2502.11089), section 3.3.
    """

    operation: ClassVar[str] = "mean_pooling"

    options: Options = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(
        self,
        reduction: str = "mean",
        chunk_size: int | None = None,
        normalize: bool = False,
        *,
        eps: float = 1e-12,
        num_segments: int | None = None,
        max_chunks: int | None = None,
        indices_are_sorted: bool = False,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `reduction`: `"mean"`, `"sum"`, `"max"` or `"last"` (the last token of each segment).
        - `chunk_size`: pool every so many tokens instead of whole rows or sequences. The last chunk of a row or sequence may be short.
        - `normalize`: divide each result by its Euclidean norm, as for sentence embeddings; computed in float32 before rounding.
        - `eps`: the smallest norm that a result is divided by.
        - `num_segments`: the number of segments in `segment_ids`, a size of the result. By default the largest id plus 1, which must then be
            known (outside `jit`).
        - `max_chunks`: the number of chunks in the result for packed sequences; unused ones are 0. By default `T // chunk_size + N`, which
            always suffices.
        - `indices_are_sorted`: a promise that `segment_ids` never decrease along a row, apart from negative ids. It saves sorting them.
        - `platform`, `config`: as in [`ejkernel_eqx.CausalConv1d`][].
        - `tune_for`: `(x,)` or [`ejkernel_eqx.inputs`][]`(x, mask=mask)`, arrays or `jax.ShapeDtypeStruct`s: fix the choice for these inputs now.

        **Raises:** `ValueError` for invalid options.
        """
        self.options = Options(
            reduction, chunk_size, normalize, eps, num_segments, max_chunks, indices_are_sorted
        )
        self.plan = plan_of(MeanPooling, self, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.MeanPooling")
    def __call__(
        self,
        x: Float[AnyArray, "*B T C"],
        *,
        mask: Bool[Numbers, "*B T"] | None = None,
        lengths: int | Int[Numbers, "*B"] | None = None,
        cu_seqlens: Int[Numbers, " N+1"] | None = None,
        segment_ids: Int[Numbers, "*B T"] | None = None,
    ) -> Float[Array, "*B ... C"]:
        """**Arguments:**

        - `x`: `[..., T, C]` with any number of leading axes; bf16, f16, f32 (f64 on XLA).
        - `mask`: booleans that broadcast to `[..., T]`, false for tokens that are left out. It moves no chunk.
        - `lengths`: ints that broadcast to `[...]`; only the first so many tokens of a row are pooled.
        - `cu_seqlens`: offsets `[N + 1]` of packed sequences (without leading axes); tokens outside of them are padding.
        - `segment_ids`: ints that broadcast to `[..., T]`. Result `n` pools the tokens with id `n`, wherever they are; negative ids are
            padding. Chunks count the tokens of an id in their order.

        At most one of `lengths`, `cu_seqlens` and `segment_ids`; `mask` goes with each of them.

        **Returns:** an array in the dtype of `x`, with `N` sequences or segments:

        | | whole | with `chunk_size` |
        |---|---|---|
        | rows | `[..., C]` | `[..., ceil(T / chunk_size), C]` |
        | `cu_seqlens` | `[N, C]` | `[max_chunks, C]`: the chunks of the first sequence, then of the second, and so on |
        | `segment_ids` | `[..., N, C]` | `[..., max_chunks, C]` |

        **Raises:** the errors of [`ejkernel_eqx.CausalConv1d`][].
        """
        call = resolve(self.options, x, mask, lengths, cu_seqlens, segment_ids)
        if 0 in call.shape or 0 in call.arrays.x.shape:  # nothing to launch
            return call.finish(jnp.zeros(call.shape, call.arrays.x.dtype))
        return call.finish(POOL.call(self.plan, self.operation, call.arrays, call.spec)["out"])
