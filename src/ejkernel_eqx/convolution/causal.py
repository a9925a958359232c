"""`CausalConv1d`: a short causal depthwise convolution."""

from typing import Any, ClassVar

import equinox as eqx
import jax
from jax import Array

from .._kernel import Kernel, Plan, replaced
from .._shapes import AnyArray, Float, Int, Numbers
from ..core.along import check_sequence_axis
from ..core.l2norm import l2norm
from ..core.plans import plan_of
from ..core.split_tokens import over_sequence_axis
from ..dispatch import PlatformLike
from .along import with_entering
from .arguments import check_activation, check_heads, check_norm_size, fits_kernels, resolve, resolve_step
from .core import CONVOLVE
from .spec import by_head, channels_as, ConvSpec, merged_results, split_heads, split_of
from .step import advance
from .xla import entering


class CausalConv1d(Kernel):
    r"""A causal depthwise convolution over time, such as the short convolutions of Mamba and gated linear attention.

    $$y_{tc} = \mathrm{act}\Big(b_c + \sum_{w=0}^{W-1} \mathrm{weight}_{cw}\; x_{t-W+1+w,\,c}\Big)$$

    where the inputs before a sequence come from its initial state: the $W - 1$ inputs before its first token, oldest first, zero by default.
    Accumulates in float32 (float64 for float64). The backward keeps only the inputs.

    Platforms: Triton (`"triton"`, `"triton-interpret"`), XLA (`"xla"`). Differentiable in reverse mode in every float argument and through both
    results; `platform="xla"` also supports forward mode and second derivatives.

    Source: Gu & Dao, *Mamba* (2023), section 3.4.
    """

    operation: ClassVar[str] = "causal_conv1d"

    activation: str | None = eqx.field(static=True)
    norm_size: int | None = eqx.field(static=True)
    sequence_axis: str | None = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(
        self,
        activation: str | None = None,
        *,
        norm_size: int | None = None,
        sequence_axis: str | None = None,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        r"""**Arguments:**

        - `activation`: `None` or `"silu"`.
        - `norm_size`: divide the outputs of every `norm_size` channels by $\sqrt{\sum y^2 + 10^{-6}}$, as delta rules
            do with the heads of queries and keys. For powers of two up to 128, this is part of the same pass over
            memory. Not with `sequence_axis`.
        - `sequence_axis`: a mesh axis that the tokens are split over, as in [`ejkernel_eqx.GatedLinearAttention`][].
        - `platform`: use this platform or raise; `None` chooses by device and call.
        - `config`: use this kernel configuration, which implies its platform.
        - `tune_for`: `(x, weight)` or [`ejkernel_eqx.inputs`][]`(...)`, arrays or `jax.ShapeDtypeStruct`s: fix the choice for these inputs now.
        """
        self.activation = check_activation(activation)
        self.norm_size = check_norm_size(norm_size, sequence_axis)
        self.sequence_axis = check_sequence_axis(sequence_axis)
        self.plan = plan_of(CausalConv1d, self, platform, config, tune_for)

    def normalising(self, size: int) -> "CausalConv1d":
        """Returns this convolution with a `norm_size`."""
        return replaced(self, norm_size=check_norm_size(size, self.sequence_axis))

    @jax.named_scope("ejkernel_eqx.CausalConv1d")
    @over_sequence_axis()
    def __call__(
        self,
        x: Float[AnyArray, "*B T C"],
        weight: Float[AnyArray, "C W"],
        bias: Float[AnyArray, " C"] | None = None,
        *,
        initial_state: Float[AnyArray, "... W-1 C"] | None = None,
        cu_seqlens: Int[Numbers, " N+1"] | None = None,
        segment_ids: Int[Numbers, "*B T"] | None = None,
    ) -> tuple[Float[Array, "*B T C"], Float[Array, "... W-1 C"]]:
        """**Arguments:**

        - `x`: `[..., T, C]` with any number of leading axes; bf16, f16, f32 (f64 on XLA).
        - `weight`: `[C, W]`, any float dtype, any `W` (Triton: up to 8). The last weight multiplies the current token.
        - `bias`: `[C]`.
        - `initial_state`: `[..., W - 1, C]`, or `[N, W - 1, C]` with `cu_seqlens`: the inputs before the first token, oldest first.
        - `cu_seqlens`: offsets `[N + 1]` of packed sequences (without leading axes); the output of tokens past the last offset is 0.
        - `segment_ids`: `[..., T]`; a new segment, which sees no earlier tokens, starts where the id changes. Negative ids are padding, on
            either side or in between: it is skipped, and its output is 0. The initial state enters the row's first segment; the final
            state is that of the last segment.

        **Returns:** `(out, final_state)`: `[..., T, C]` in the dtype of `x`, and the last `W - 1` inputs, in the shape and dtype of
        `initial_state`. Raises `ValueError` for invalid arguments, and `UnsupportedError` if no platform, or not the requested one, supports
        the call.
        """
        call = resolve(x, weight, bias, initial_state, cu_seqlens, segment_ids, self.sequence_axis)
        check_heads(self.norm_size, call.arrays.x.shape[-1])
        if not call.arrays.x.size:  # nothing to launch; states are unchanged
            return call.finish({"out": call.arrays.x, "final_state": entering(call.arrays)})
        arrays, final = call.arrays, None
        if call.along is not None:
            arrays, final = with_entering(call.along, arrays)
        # A head that does not fit a program is normalised after the call instead.
        spec = ConvSpec(self.activation, self.norm_size if fits_kernels(self.norm_size) else None)
        inputs = by_head(arrays, spec)
        results = merged_results(CONVOLVE.call(self.plan, self.operation, inputs, spec), spec)
        if self.norm_size != spec.norm_size:
            assert self.norm_size is not None
            out = results["out"]
            results["out"] = l2norm(split_heads(out, out.ndim - 1, self.norm_size)).reshape(out.shape)
        if self.norm_size is not None:  # a mesh may split heads
            results = {name: channels_as(result, split_of(arrays)) for name, result in results.items()}
        return call.finish(results if final is None else results | {"final_state": final})

    @jax.named_scope("ejkernel_eqx.CausalConv1d.step")
    def step(
        self,
        x: Float[AnyArray, "*B C"],
        weight: Float[AnyArray, "C W"],
        bias: Float[AnyArray, " C"] | None,
        state: Float[AnyArray, "... W-1 C"],
        *,
        state_indices: Int[Numbers, " B"] | None = None,
    ) -> tuple[Float[Array, "*B C"], Float[Array, "... W-1 C"]]:
        """Processes one token per row, for decoding; always on XLA.

        **Arguments:**

        - `x`: `[..., C]`. `weight`, `bias`: as in a call.
        - `state`: `[..., W - 1, C]`; with `state_indices` a pool `[slots, W - 1, C]`. Updated in place if donated.
        - `state_indices`: int `[B]`, the slot of each row of `x [B, C]`; for -1 the output is 0 and nothing is written. Slots must be distinct.

        **Returns:**

        `(out, state)`: `[..., C]` in the dtype of `x`, and the new states (with `state_indices`, the whole pool).
        """
        arguments = resolve_step(x, weight, bias, state, state_indices)
        check_heads(self.norm_size, arguments[0].shape[-1])
        return advance(*arguments, ConvSpec(self.activation, self.norm_size))
