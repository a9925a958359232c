"""A short causal convolution with weights, as the published linear-time models have it before their mixers."""

from typing import Any, overload, TypedDict, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from ..convolution import CausalConv1d
from ..dispatch import PlatformLike
from .arguments import (
    check_flags,
    check_key,
    check_sizes,
    check_slots,
    check_tokens,
    read_array,
    read_batch_shape,
    read_dtype,
    read_features,
    read_weight_dtype,
)


class _Packing(TypedDict, total=False):
    segment_ids: Array | None
    cu_seqlens: Array | None


class ShortConvolution(eqx.Module):
    r"""A causal depthwise convolution over time (Gu & Dao 2023, arXiv:2312.00752, section 3.4):

    $$y_{tc} = \mathrm{act}\Big(b_c + \sum_{w=0}^{W-1} \mathrm{weight}_{c,0,w}\; x_{t-W+1+w,\,c}\Big)$$

    Its state is the last $W - 1$ inputs, the oldest first, zeros before the start. The parameters have the shapes of PyTorch's depthwise `Conv1d`, so
    published weights load by renaming.
    """

    weight: Array  # [C, 1, W]
    bias: Array | None  # [C]
    convolution: CausalConv1d
    channels: int = eqx.field(static=True)
    width: int = eqx.field(static=True)

    def __init__(
        self,
        channels: int,
        width: int = 4,
        *,
        activation: str | None = "silu",
        use_bias: bool = False,
        platform: PlatformLike | None = None,
        config: Any = None,
        dtype: DTypeLike | None = None,
        key: Array,
    ):
        r"""**Arguments:**

        - `channels`: features of the input and the output, `C`.
        - `width`: inputs that an output sees, `W`, its own included.
        - `activation`: `"silu"` or `None`.
        - `use_bias`: whether there is a bias.
        - `platform`, `config`: as in [`ejkernel_eqx.CausalConv1d`][].
        - `dtype`: of the parameters; default float32 (float64 in JAX's 64-bit mode).
        - `key`: a PRNG key for the initial parameters, uniform in $\pm 1 / \sqrt{W}$.
        """
        check_sizes(channels=channels, width=width)
        check_flags(use_bias=use_bias)
        check_key(key)
        dtype = read_weight_dtype(dtype)
        weight_key, bias_key = jax.random.split(key)
        bound = width**-0.5
        self.weight = jax.random.uniform(weight_key, (channels, 1, width), dtype, -bound, bound)
        self.bias = jax.random.uniform(bias_key, (channels,), dtype, -bound, bound) if use_bias else None
        self.convolution = CausalConv1d(activation, platform=platform, config=config)
        self.channels = channels
        self.width = width

    def init_state(self, batch_shape: tuple[int, ...] | int = (), dtype: DTypeLike | None = None) -> Array:
        """The state before the first token, zeros `[*batch_shape, W - 1, C]`, by default in the dtype of the weights; `batch_shape` is `N` for packed
        sequences."""
        dtype = self.weight.dtype if dtype is None else read_dtype("dtype", dtype)
        return jnp.zeros((*read_batch_shape(batch_shape), self.width - 1, self.channels), dtype)

    @overload
    def __call__(self, x: Array, state: None = None, **packing: Unpack[_Packing]) -> Array: ...

    @overload
    def __call__(self, x: Array, state: Array, **packing: Unpack[_Packing]) -> tuple[Array, Array]: ...

    @jax.named_scope("ejx.nn.ShortConvolution")
    def __call__(
        self,
        x: Array,
        state: Array | None = None,
        *,
        segment_ids: Array | None = None,
        cu_seqlens: Array | None = None,
    ) -> Array | tuple[Array, Array]:
        """**Arguments:**

        - `x`: `[..., T, C]`, any number of leading axes; its dtype is that of the output, sums are in float32 (float64 for float64), whatever the
            dtype of the weights.
        - `state`: the inputs before `x`, `[..., W - 1, C]`, or `[N, W - 1, C]` with `cu_seqlens`. A prompt at once and then token by token, or in
            chunks of any length: all give what the whole sequence at once gives.
        - `segment_ids`: integers `[..., T]`: tokens see their own segment only; negative is padding, which is neither read nor kept. The state enters
            the first segment and leaves the last.
        - `cu_seqlens`: offsets `[N + 1]` of packed sequences, without leading axes.

        **Returns:** `y`, an array of the shape and dtype of `x`, 0 for padding; with a state, the tuple `(y, state)`. Raises `ValueError` for
        arguments that do not fit.
        """
        x = read_features("x", x, "[..., T, C]", "C", self.channels)
        check_tokens("segment_ids", segment_ids, "integers", "x", x)
        if cu_seqlens is not None:
            read_array("cu_seqlens", cu_seqlens, "integers", "[N + 1]")
        if state is not None:
            read_array("state", state, "floats", "[..., W - 1, C]")
        if state is not None and x.shape[-2] == 1 and segment_ids is None and cu_seqlens is None:
            y, state = self.step(x[..., 0, :], state)
            return y[..., None, :], state
        y, new = self.convolution(
            x,
            self.weight[:, 0],
            self.bias,
            initial_state=state,
            segment_ids=segment_ids,
            cu_seqlens=cu_seqlens,
        )
        return y if state is None else (y, new)

    def step(self, x: Array, state: Array, *, state_indices: Array | None = None) -> tuple[Array, Array]:
        """One token of every row: `x [..., C]` and its state; or a pool `[slots, W - 1, C]` with the slot of each row, as
        [`ejkernel_eqx.CausalConv1d`][] has it. Returns `(y, state)`. Raises `ValueError` for arguments that do not fit, a slot that is not there
        or given twice."""
        x = read_array("x", x, "floats", "[..., C]")
        if x.ndim < 1 or x.shape[-1] != self.channels:
            raise ValueError(
                f"x: expected [..., C] with C = {self.channels}, received shape {x.shape}; a step takes one token of every row."
            )
        state = read_array("state", state, "floats", "[..., W - 1, C]")
        if state_indices is not None:
            state_indices = read_array("state_indices", state_indices, "integers", "[B]")
            check_slots("state_indices", state_indices, state.shape[0] if state.ndim else 0)
        return self.convolution.step(x, self.weight[:, 0], self.bias, state, state_indices=state_indices)
