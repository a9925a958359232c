"""The parts of layers, built with one key and one dtype, and initial decay rates of recurrent layers."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ..core.arguments import accumulator
from ..dispatch import PlatformLike
from .arguments import check_key, read_dtype, read_weight_dtype
from .gated_rms_norm import GatedRMSNorm
from .initial import keys_of, linear, uniform
from .short_convolution import ShortConvolution

O = TypeVar("O")


class Parts:
    """Builds the parts of one layer with one dtype and platform, each from the next of `count` keys."""

    def __init__(
        self,
        key: Array,
        count: int,
        dtype: Any,
        compute_dtype: Any,
        platform: PlatformLike | None = None,
        sequence_axis: str | None = None,
    ):
        check_key(key)
        self.dtype, computed = read_weight_dtype(dtype), read_dtype("compute_dtype", compute_dtype)
        self.compute_dtype = None if computed is None else computed.name
        self.wide = accumulator(self.dtype)  # of decay rates
        self.platform: PlatformLike | None = platform
        self.sequence_axis = sequence_axis
        self._keys = iter(keys_of(key, count))

    def key(self) -> Array:
        """The next key, for a part that is built elsewhere."""
        return next(self._keys)

    def left_out(self) -> None:
        """Skips the key of an omitted part, so that later parts start with the same weights as in a layer that has it."""
        next(self._keys)

    def linear(self, features: int, out: int, use_bias: bool = False) -> eqx.nn.Linear:
        return linear(next(self._keys), features, out, use_bias, self.dtype)

    def convolution(self, channels: int, width: int, use_bias: bool = False, **more: Any) -> ShortConvolution:
        options: dict[str, Any] = {"use_bias": use_bias, "platform": self.platform, "dtype": self.dtype}
        options |= {"sequence_axis": self.sequence_axis, **more}
        return ShortConvolution(channels, width, **options, key=next(self._keys))

    def norm(self, features: int, **options: Any) -> GatedRMSNorm:
        return GatedRMSNorm(features, platform=self.platform, dtype=self.dtype, **options)

    def operation(self, kind: Callable[..., O], state_dtype: Any, config: Any, **options: Any) -> O:
        """The operation of a recurrent layer."""
        shared = {"sequence_axis": self.sequence_axis, "platform": self.platform}
        return kind(**options, **shared, state_dtype=state_dtype, config=config)

    def uniform(self, shape: tuple[int, ...], bound: float) -> Array:
        return uniform(next(self._keys), shape, self.dtype, bound)

    def log_rates(self, heads: int, low: float = 1.0) -> Array:
        """Logarithms of rates drawn uniformly from `low` to 16."""
        return jnp.log(jax.random.uniform(next(self._keys), (heads,), self.wide, low, 16.0))

    def time_step_bias(self, size: int) -> Array:
        """Biases whose softplus is a time step, log-uniform from 1e-3 to 1e-1, as in Mamba."""
        low, high = math.log(1e-3), math.log(1e-1)
        steps = jnp.exp(jax.random.uniform(next(self._keys), (size,), self.wide, low, high))
        return steps + jnp.log(-jnp.expm1(-steps))
