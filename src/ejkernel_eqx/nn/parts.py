"""What layers are built of: their parts, from one key and in one dtype, and the rates that recurrent ones start with."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ..core.arguments import accumulator
from ..dispatch import PlatformLike
from .arguments import check_key, read_dtype, read_weight_dtype
from .gated_rms_norm import GatedRMSNorm
from .short_convolution import ShortConvolution


class Parts:
    """The parts of one layer while it is built: of one dtype, on one platform, each drawn from the next of the layer's `count` keys."""

    def __init__(
        self, key: Array, count: int, dtype: Any, compute_dtype: Any, platform: PlatformLike | None = None
    ):
        check_key(key)
        self.dtype, computed = read_weight_dtype(dtype), read_dtype("compute_dtype", compute_dtype)
        self.compute_dtype = None if computed is None else computed.name
        self.wide = accumulator(self.dtype)  # of what says how fast things are forgotten
        self.platform: PlatformLike | None = platform
        self._keys = iter(jax.random.split(key, count))

    def left_out(self) -> None:
        """In the place of a part that the layer is built without: those behind it start as in a layer with it."""
        next(self._keys)

    def linear(self, features: int, out: int, use_bias: bool = False) -> eqx.nn.Linear:
        return eqx.nn.Linear(features, out, use_bias, self.dtype, key=next(self._keys))

    def convolution(self, channels: int, width: int, use_bias: bool = False) -> ShortConvolution:
        options = {"use_bias": use_bias, "platform": self.platform, "dtype": self.dtype}
        return ShortConvolution(channels, width, **options, key=next(self._keys))

    def norm(self, features: int, **options: Any) -> GatedRMSNorm:
        return GatedRMSNorm(features, platform=self.platform, dtype=self.dtype, **options)

    def log_rates(self, heads: int, low: float = 1.0) -> Array:
        """The logarithms of numbers drawn evenly from `low` to 16."""
        return jnp.log(jax.random.uniform(next(self._keys), (heads,), self.wide, low, 16.0))

    def time_step_bias(self, size: int) -> Array:
        """What a softplus makes into time steps whose logarithms are spread evenly from 1e-3 to 1e-1, as in Mamba."""
        low, high = math.log(1e-3), math.log(1e-1)
        steps = jnp.exp(jax.random.uniform(next(self._keys), (size,), self.wide, low, high))
        return steps + jnp.log(-jnp.expm1(-steps))


def negative_exp(A_log: Array) -> Array:
    """The decay rates $-e^{A}$, at least in float32."""
    return -jnp.exp(A_log.astype(accumulator(A_log.dtype)))
