"""Scalings whose frequencies depend on how long a sequence has become."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from .scaling import check_positive


@dataclasses.dataclass(frozen=True)
class DynamicScaling:
    r"""Dynamic NTK scaling (the base grows with the sequence): beyond the original length $L$, a sequence of $n$ tokens is turned with

    $$\theta(n) = \theta\,\Big(\frac{s\,n}{L} - (s - 1)\Big)^{R / (R - 2)}$$

    in the place of $\theta$. Up to $L$ tokens nothing changes. As in `transformers`, keys in a cache keep the rotation that they got
    when they were written.

    **Arguments:**

    - `factor`: $s$.
    - `original_max_position`: $L$, in tokens.
    """

    least_dim: ClassVar[int] = 4  # of the rotation: the exponent divides by two less

    factor: float
    original_max_position: int

    def __post_init__(self):
        check_positive(factor=self.factor, original_max_position=self.original_max_position)

    def at(self, base: np.ndarray, length: Any, xp: Any) -> tuple[Any, Any]:
        """The frequencies `[..., R / 2]` of sequences of `length` `[..., 1]`, with `xp` of NumPy or JAX, and the magnitude."""
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
    - `factor`: $s$, the new context length over the trained one.
    - `attention_factor`: what cosine and sine are multiplied by instead.
    - `short_mscale`, `long_mscale`: the same by length, each for the sequences that its list is for (Phi-3.5-MoE).
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
                    f"{name}: expected a list of numbers, received {numbers!r}; it has one for each pair."
                )
            check_positive(**{f"{name}[{i}]": number for i, number in enumerate(numbers)})
            object.__setattr__(self, name, tuple(float(number) for number in numbers))
        names = ("original_max_position", "factor", "attention_factor", "short_mscale", "long_mscale")
        check_positive(**{name: value for name in names if (value := getattr(self, name)) is not None})
        if (self.short_mscale is None) != (self.long_mscale is None):
            raise ValueError(
                "short_mscale, long_mscale: expected both or none, received one; each is for the sequences of one list."
            )
        if self.factor is None and self.attention_factor is None and self.short_mscale is None:
            raise ValueError(
                "factor: expected a number, received None; without an attention_factor the magnitude follows from it: pass the new context "
                "length over the trained one."
            )

    @property
    def magnitude(self) -> float:
        """That of every length, unless it is given by length."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor is None or self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position))

    def at(self, base: np.ndarray, length: Any, xp: Any) -> tuple[Any, Any]:
        """As `DynamicScaling.at`."""
        is_long = length > self.original_max_position
        choose = lambda short, long: xp.where(is_long, _beside(long, length, xp), _beside(short, length, xp))
        found = choose(base / np.asarray(self.short_factor), base / np.asarray(self.long_factor))
        if self.short_mscale is None:
            return found, self.magnitude
        return found, choose(self.short_mscale, self.long_mscale)


def _beside(numbers: Any, length: Any, xp: Any) -> Any:
    """As an array with as many axes as `length` and of its dtype."""
    found = xp.asarray(numbers, length.dtype)
    return found.reshape((1,) * (length.ndim - found.ndim) + found.shape)
