"""Scalings whose frequencies depend on the length of the sequence."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from .scaling import check_positive


@dataclasses.dataclass(frozen=True)
class DynamicScaling:
    r"""Dynamic NTK scaling: the base grows with the sequence. A sequence of $n$ tokens, more than the original length $L$, is rotated with

    $$\theta(n) = \theta\,\Big(\frac{s\,n}{L} - (s - 1)\Big)^{R / (R - 2)}$$

    instead of $\theta$; up to $L$ tokens nothing changes. As in `transformers`, cached keys keep the rotation with which they were
    written.

    **Arguments:**

    - `factor`: $s$.
    - `original_max_position`: $L$, in tokens.
    """

    least_dim: ClassVar[int] = 4  # the smallest rotary dimension: the exponent divides by R - 2

    factor: float
    original_max_position: int

    def __post_init__(self):
        check_positive(factor=self.factor, original_max_position=self.original_max_position)

    def at(self, base: np.ndarray, length: Any, xp: Any) -> tuple[Any, Any]:
        """The frequencies `[..., R / 2]` of sequences of `length` `[..., 1]`, and the magnitude; `xp` is NumPy or `jax.numpy`."""
        longest = xp.maximum(length, self.original_max_position)
        growth = self.factor * longest / self.original_max_position - (self.factor - 1)
        exponents = np.arange(len(base)) / (len(base) - 1)
        return _beside(base, growth, xp) * growth ** _beside(-exponents, growth, xp), 1.0


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    r"""LongRoPE (Ding et al. 2024, arXiv:2402.13753), as in Phi-3: $\theta_i' = \theta_i / \lambda_i$ with one list of
    $\lambda$ for sequences of up to $L$ tokens and another for longer ones. Cosine and sine are multiplied by
    $\sqrt{1 + \ln(s) / \ln(L)}$ at every length.

    **Arguments:**

    - `short_factor`, `long_factor`: $\lambda_i$, `rotary_dim / 2` numbers each.
    - `original_max_position`: $L$, in tokens.
    - `factor`: $s$, the ratio of the new context length to the trained one.
    - `attention_factor`: multiplies cosine and sine instead.
    - `short_mscale`, `long_mscale`: the same, separately for short and long sequences (Phi-3.5-MoE).
    """

    least_dim: ClassVar[int] = 2

    short_factor: Sequence[float]
    long_factor: Sequence[float]
    original_max_position: int
    factor: float | None = None
    attention_factor: float | None = None
    short_mscale: float | None = None
    long_mscale: float | None = None

    def __post_init__(self):
        for name in ("short_factor", "long_factor"):
            numbers = getattr(self, name)
            if isinstance(numbers, str) or not isinstance(numbers, Sequence | np.ndarray):
                raise ValueError(
                    f"{name}: expected a list of numbers, received {numbers!r}; pass one per pair of features."
                )
            check_positive(**{f"{name}[{i}]": number for i, number in enumerate(numbers)})
            object.__setattr__(self, name, tuple(float(number) for number in numbers))
        names = ("original_max_position", "factor", "attention_factor", "short_mscale", "long_mscale")
        check_positive(**{name: value for name in names if (value := getattr(self, name)) is not None})
        if (self.short_mscale is None) != (self.long_mscale is None):
            raise ValueError(
                "short_mscale, long_mscale: expected both or neither, received one; each applies to the sequences of one list."
            )
        if self.factor is None and self.attention_factor is None and self.short_mscale is None:
            raise ValueError(
                "factor: expected a number, received None; without attention_factor it determines the magnitude: pass the ratio of the "
                "new context length to the trained one."
            )

    @property
    def magnitude(self) -> float:
        """The magnitude for all lengths, unless it is given by length."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor is None or self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position))

    def at(self, base: np.ndarray, length: Any, xp: Any) -> tuple[Any, Any]:
        """Works as `DynamicScaling.at`."""
        is_long = length > self.original_max_position
        choose = lambda short, long: xp.where(is_long, _beside(long, length, xp), _beside(short, length, xp))
        found = choose(base / np.asarray(self.short_factor), base / np.asarray(self.long_factor))
        if self.short_mscale is None:
            return found, self.magnitude
        return found, choose(self.short_mscale, self.long_mscale)


def _beside(numbers: Any, length: Any, xp: Any) -> Any:
    """`numbers` as an array of the rank and dtype of `length`."""
    found = xp.asarray(numbers, length.dtype)
    return found.reshape((1,) * (length.ndim - found.ndim) + found.shape)
