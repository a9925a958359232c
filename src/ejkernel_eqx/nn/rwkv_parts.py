"""What the layers of RWKV share: the shift by one token, and projections of low rank."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from .._broadcast import like
from .._signatures import Module
from ..convolution import CausalConv1d
from ..weights.rwkv import low_rank
from .parts import Parts
from .projection import project
from .recurrent_state import Rows


class TokenShift(Module):
    """What is new in each token: the difference of the token before and itself. A short convolution without parameters finds the token before."""

    convolution: CausalConv1d
    channels: int = eqx.field(static=True)

    width: ClassVar[int] = 2

    def __init__(self, channels: int, parts: Parts):
        self.channels = channels
        self.convolution = CausalConv1d(sequence_axis=parts.sequence_axis, platform=parts.platform)

    def __call__(self, x: Array, rows: Rows) -> Array:
        before = jnp.broadcast_to(jnp.array([1, 0], x.dtype), (self.channels, self.width))
        return rows.run(self.convolution, {"x": x}, {"weight": before, "bias": None}) - x


class LowRank(Module):
    """A projection of low rank, with an activation between its two parts."""

    down: eqx.nn.Linear  # [R, E]
    up: eqx.nn.Linear  # [F, R]
    rank: int = eqx.field(static=True)
    features: int = eqx.field(static=True)

    _published = low_rank

    def __init__(self, parts: Parts, embed_dim: int, rank: int, features: int, bias: Any = None):
        """`bias`: the initial bias, `[F]`; `None` for none."""
        self.down, self.rank, self.features = parts.linear(embed_dim, rank), rank, features
        up = parts.linear(rank, features, bias is not None)
        self.up = up if bias is None else eqx.tree_at(lambda up: up.bias, up, bias)

    def __call__(self, name: str, x: Array, activation: Callable[[Array], Array] | None = None) -> Array:
        inner = project(f"{name}.down", self.down, x, self.rank)
        inner = inner if activation is None else activation(inner)
        return project(f"{name}.up", self.up, inner, self.features)

    def parts(self) -> tuple[Any, Any]:
        """Both projections, or what stands in their places, such as `LoRA`."""
        return self.down, self.up


def mixed(x: Array, delta: Array, weight: Array) -> Array:
    """`x` with some of the token before, by one `weight` per feature, or per token and feature."""
    return x + delta * like(weight.astype(x.dtype), x)
