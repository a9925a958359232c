"""`CausalConv1d`: a causal convolution of each channel with its own few weights."""

from typing import Any, ClassVar

import equinox as eqx
import jax
from jax import Array

from .._kernel import Kernel, Plan
from .._shapes import AnyArray, Float, Int, Numbers
from ..core.plans import plan_of
from ..core.platforms import register
from ..dispatch import PlatformLike
from .arguments import check_activation, resolve, resolve_step
from .core import CONVOLVE
from .spec import ConvSpec
from .step import advance
from .xla import entering

register("causal_conv1d", __package__)


class CausalConv1d(Kernel):
    r"""A causal depthwise convolution over time, as the short convolutions of Mamba and of gated linear attention.

    $$y_{tc} = \mathrm{act}\Big(b_c + \sum_{w=0}^{W-1} \mathrm{weight}_{cw}\; x_{t-W+1+w,\,c}\Big)$$

    where what lies before a sequence is its initial state: the $W - 1$ inputs before its first token, the oldest first, zeros by default. Sums in
    float32 (float64 for float64). The backward keeps nothing but the inputs.

    Platforms: Triton (`"triton"`, `"triton-interpret"`), XLA (`"xla"`). Differentiable in reverse mode in every float argument and through both
    results; `platform="xla"` in forward mode and twice as well.

    Source: Gu & Dao, *Mamba* (2023), section 3.4.
    """

    operation: ClassVar[str] = "causal_conv1d"

    activation: str | None = eqx.field(static=True)
    plan: Plan = eqx.field(static=True)

    def __init__(
        self,
        activation: str | None = None,
        *,
        platform: PlatformLike | None = None,
        config: Any | None = None,
        tune_for: Any | None = None,
    ):
        """**Arguments:**

        - `activation`: `None` or `"silu"`.
        - `platform`: use this platform or raise; `None` chooses by device and request.
        - `config`: use this kernel configuration; it implies its platform.
        - `tune_for`: `(x, weight)` or [`ejkernel_eqx.inputs`][]`(...)`, arrays or `jax.ShapeDtypeStruct`s: settle the choice for these now.
        """
        self.activation = check_activation(activation)
        self.plan = plan_of(CausalConv1d, self, platform, config, tune_for)

    @jax.named_scope("ejkernel_eqx.CausalConv1d")
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

        - `x`: `[..., T, C]`, any number of leading axes. bf16, f16, f32 (f64 on XLA).
        - `weight`: `[C, W]`, any float dtype, any `W` (Triton: up to 8). The last one meets the token itself.
        - `bias`: `[C]`.
        - `initial_state`: `[..., W - 1, C]`, or `[N, W - 1, C]` with `cu_seqlens`: the inputs before the first token, oldest first.
        - `cu_seqlens`: offsets `[N + 1]` of packed sequences (no leading axes then); tokens past the last give 0.
        - `segment_ids`: `[..., T]`; a new segment, which sees nothing of what is before it, starts where the id changes. Negative ids are padding,
            left, right or between: as if it were not there; the output there is 0. The initial state enters the row's first segment; the
            final state is the last one's.

        **Returns:** `(out, final_state)`: `[..., T, C]` in the dtype of `x`, and the last `W - 1` inputs, as `initial_state` and in its dtype.
        Raises `ValueError` for arguments that do not fit, `UnsupportedError` if no platform (or not the given one) supports the call.
        """
        call = resolve(x, weight, bias, initial_state, cu_seqlens, segment_ids)
        if not call.arrays.x.size:  # nothing to launch, and states as they came
            return call.finish({"out": call.arrays.x, "final_state": entering(call.arrays)})
        return call.finish(CONVOLVE.call(self.plan, self.operation, call.arrays, ConvSpec(self.activation)))

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
        """One token of every row, for decoding; in XLA, whatever the platform.

        **Arguments:**

        - `x`: `[..., C]`. `weight`, `bias`: as in a call.
        - `state`: `[..., W - 1, C]`; with `state_indices` a pool `[slots, W - 1, C]`, written in place where it is donated.
        - `state_indices`: int `[B]`, the slot of each row of `x [B, C]`; -1: output 0 and nothing written. No slot may be given twice.

        **Returns:**

        `(out, state)`: `[..., C]` in the dtype of `x`, and the new states (the whole pool).
        """
        arguments = resolve_step(x, weight, bias, state, state_indices)
        return advance(*arguments, ConvSpec(self.activation))
