"""`ShortConvolution`: the causal convolution that precedes the mixers of published linear-time models."""

from typing import Any, overload, TYPE_CHECKING, Unpack

import equinox as eqx
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from .._jitted import compiled_call
from .._shapes import AnyArray, Float, Int
from .._signatures import Module
from ..convolution import CausalConv1d
from ..dispatch import PlatformLike
from .arguments import (
    check_key,
    check_slots,
    check_tokens,
    checked,
    read_array,
    read_batch_shape,
    read_dtype,
    read_features,
    read_weight_dtype,
)
from .initial import keys_of, uniform
from .signatures import Packing

_Tokens = Float[AnyArray, "*B T C"]
_Output = Float[Array, "*B T C"]


class ShortConvolution(Module):
    r"""A causal depthwise convolution over time (Gu & Dao 2023, arXiv:2312.00752, section 3.4):

    $$y_{tc} = \mathrm{act}\Big(b_c + \sum_{w=0}^{W-1} \mathrm{weight}_{c,0,w}\; x_{t-W+1+w,\,c}\Big)$$

    The state holds the last $W - 1$ inputs, oldest first, and is initially zero. Parameters have the shapes of PyTorch's depthwise `Conv1d`,
    so published weights load by renaming.
    """

    weight: Array  # [C, 1, W]
    bias: Array | None  # [C]
    convolution: CausalConv1d
    channels: int = eqx.field(static=True)
    width: int = eqx.field(static=True)

    @checked
    def __init__(
        self,
        channels: int,
        width: int = 4,
        *,
        activation: str | None = "silu",
        use_bias: bool = False,
        sequence_axis: str | None = None,
        platform: PlatformLike | None = None,
        config: Any = None,
        dtype: DTypeLike | None = None,
        key: PRNGKeyArray,
    ):
        r"""**Arguments:**

        - `channels`: features `C` of the input and the output.
        - `width`: kernel size `W`: each output depends on the current input and the `W - 1` before it.
        - `activation`: `"silu"` or `None`.
        - `use_bias`: whether the convolution has a bias.
        - `sequence_axis`, `platform`, `config`: as in [`ejkernel_eqx.CausalConv1d`][].
        - `dtype`: of the parameters; default float32 (float64 in JAX's 64-bit mode).
        - `key`: PRNG key for the initial parameters, uniform in $\pm 1 / \sqrt{W}$.
        """
        check_key(key)
        dtype = read_weight_dtype(dtype)
        weight_key, bias_key = keys_of(key)
        bound = width**-0.5
        self.weight = uniform(weight_key, (channels, 1, width), dtype, bound)
        self.bias = uniform(bias_key, (channels,), dtype, bound) if use_bias else None
        self.convolution = CausalConv1d(
            activation, sequence_axis=sequence_axis, platform=platform, config=config
        )
        self.channels = channels
        self.width = width

    def init_state(
        self, batch_shape: tuple[int, ...] | int = (), dtype: DTypeLike | None = None
    ) -> Float[Array, "... W-1 C"]:
        """Returns the state before the first token, zeros of shape `[*batch_shape, W - 1, C]`, by default in the dtype of the weights. For `N`
        packed sequences, `batch_shape` is `N`."""
        dtype = self.weight.dtype if dtype is None else read_dtype("dtype", dtype)
        return jnp.zeros((*read_batch_shape(batch_shape), self.width - 1, self.channels), dtype)

    if TYPE_CHECKING:

        @overload
        def __call__(self, x: _Tokens, state: None = None, **packing: Unpack[Packing]) -> _Output: ...

        @overload
        def __call__(
            self, x: _Tokens, state: Float[AnyArray, "... W-1 C"], **packing: Unpack[Packing]
        ) -> tuple[_Output, Float[Array, "... W-1 C"]]: ...

    @compiled_call("ejx.nn.ShortConvolution")
    def __call__(
        self,
        x: Float[AnyArray, "*B T C"],
        state: Float[AnyArray, "... W-1 C"] | None = None,
        *,
        segment_ids: Int[AnyArray, "*B T"] | None = None,
        cu_seqlens: Int[AnyArray, " N+1"] | None = None,
    ) -> Float[Array, "*B T C"] | tuple[Float[Array, "*B T C"], Float[Array, "... W-1 C"]]:
        """**Arguments:**

        - `x`: `[..., T, C]` with any number of leading axes.
        - `state`: the inputs before `x`, `[..., W - 1, C]`, or `[N, W - 1, C]` with `cu_seqlens`. Processing a sequence in chunks of any length,
            down to single tokens, returns the same as processing it at once.
        - `segment_ids`: integers `[..., T]`; tokens see their own segment only. Negative ids are padding, which is skipped. The state enters
            the first segment of the row; the new one is that of the last segment.
        - `cu_seqlens`: offsets `[N + 1]` of packed sequences, without leading axes.

        **Returns:** `y`, in the shape and dtype of `x`, 0 at padding positions; with a state, the tuple `(y, state)`. Accumulates in float32
        (float64 for float64), independent of the dtype of the weights. Raises `ValueError` for invalid arguments.
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
        packing = {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens}
        y, new = self.convolution(x, self.weight[:, 0], self.bias, initial_state=state, **packing)
        return y if state is None else (y, new)

    def step(
        self,
        x: Float[AnyArray, "*B C"],
        state: Float[AnyArray, "... W-1 C"],
        *,
        state_indices: Int[AnyArray, " B"] | None = None,
    ) -> tuple[Float[Array, "*B C"], Float[Array, "... W-1 C"]]:
        """Processes one token per row, for decoding.

        **Arguments:**

        - `x`: `[..., C]`.
        - `state`: `[..., W - 1, C]`; with `state_indices` a pool `[slots, W - 1, C]`.
        - `state_indices`: integers `[B]`, the slot of each row, as in [`ejkernel_eqx.CausalConv1d`][].

        **Returns:** `(y, state)`: `[..., C]` and the new states (with `state_indices`, the whole pool). Raises `ValueError` for invalid
        arguments, and for slots that are out of range or not distinct.
        """
        x = read_array("x", x, "floats", "[..., C]")
        if x.ndim < 1 or x.shape[-1] != self.channels:
            raise ValueError(
                f"x: expected [..., C] with C = {self.channels}, received shape {x.shape}; a step takes one token per row."
            )
        state = read_array("state", state, "floats", "[..., W - 1, C]")
        if state_indices is not None:
            state_indices = read_array("state_indices", state_indices, "integers", "[B]")
            check_slots("state_indices", state_indices, state.shape[0] if state.ndim else 0)
        return self.convolution.step(x, self.weight[:, 0], self.bias, state, state_indices=state_indices)
