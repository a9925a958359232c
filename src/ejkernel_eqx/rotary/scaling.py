"""Scalings of rotary embeddings to longer contexts that do not depend on the length of the sequence."""

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np

from ..core.arguments import check_flags, check_numbers


def check_positive(**numbers: Any) -> None:
    check_numbers(**numbers)
    for name, number in numbers.items():
        if number is None or number <= 0:
            raise ValueError(
                f"{name}: expected a positive number, received {number!r}; take it from the configuration of the model."
            )


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    r"""Position interpolation: $\theta_i' = \theta_i / s$ (Chen et al. 2023, arXiv:2306.15595).

    **Arguments:**

    - `factor`: $s$, the ratio of the new context length to the trained one.
    """

    magnitude: ClassVar[float] = 1.0

    factor: float

    def __post_init__(self):
        check_positive(factor=self.factor)

    def frequencies(self, base: np.ndarray, theta: float) -> np.ndarray:
        return base / self.factor


@dataclasses.dataclass(frozen=True)
class ProportionalScaling:
    r"""Proportional rotation (Gemma 4): only the first `fraction` of all pairs is rotated, with $\theta_i' = \theta_i / s$ for
    $i < \lfloor f R / 2 \rfloor$ and 0 for the others. The frequencies are those of the full dimension $R$, unlike with `rotary_dim`.

    **Arguments:**

    - `fraction`: $f$, greater than 0 and at most 1.
    - `factor`: $s$.
    """

    magnitude: ClassVar[float] = 1.0

    fraction: float
    factor: float = 1.0

    def __post_init__(self):
        check_positive(fraction=self.fraction, factor=self.factor)
        if self.fraction > 1:
            raise ValueError(
                f"fraction: expected at most 1, received {self.fraction!r}; it is the fraction of pairs that are rotated."
            )

    def frequencies(self, base: np.ndarray, theta: float) -> np.ndarray:
        return np.where(np.arange(len(base)) < int(self.fraction * len(base)), base / self.factor, 0.0)


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    r"""The scaling of Llama 3.1: long wavelengths are interpolated, short ones are kept, and those in between are blended.

    With wavelength $\lambda_i = 2\pi/\theta_i$ and $L$ the original context,
    $\theta_i' = (1-m_i)\,\theta_i/s + m_i\,\theta_i$ where $m_i = \mathrm{clip}((L/\lambda_i - a)/(b - a), 0,
    1)$ (Meta's `llama-models`, `apply_scaling`).

    **Arguments:**

    - `factor`: $s$.
    - `low_freq_factor`, `high_freq_factor`: $a$ and $b$.
    - `original_max_position`: $L$, in tokens.
    """

    magnitude: ClassVar[float] = 1.0

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self):
        check_positive(**dataclasses.asdict(self))
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor: expected more than low_freq_factor={self.low_freq_factor}, received {self.high_freq_factor}; "
                "wavelengths between the two are blended."
            )

    def frequencies(self, base: np.ndarray, theta: float) -> np.ndarray:
        turns = self.original_max_position * base / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return (1 - kept) * base / self.factor + kept * base


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    r"""YaRN (Peng et al. 2023, arXiv:2309.00071), as in DeepSeek-V3 and GPT-OSS.

    Frequencies with more than `beta_fast` rotations over the original context are kept. Those with fewer than
    `beta_slow` are divided by `factor`. In between there is a linear ramp over the index. Cosine and sine are
    multiplied by the attention factor.

    **Arguments:**

    - `factor`: ratio of the new context length to the trained one.
    - `original_max_position`: trained context length, in tokens.
    - `beta_fast`, `beta_slow`: the two bounds, in rotations.
    - `attention_factor`: multiplies cosine and sine; default $0.1 \ln(\text{factor}) + 1$.
    - `mscale`, `mscale_all_dim`: the attention factor as in DeepSeek: the ratio of $0.1\, m \ln(\text{factor}) + 1$ for
        the two.
    - `truncate`: round the ends of the ramp outwards to integer indices, as in the paper's code (GPT-OSS does not).
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self):
        check_positive(factor=self.factor, original_max_position=self.original_max_position)
        check_positive(beta_fast=self.beta_fast, beta_slow=self.beta_slow)
        check_numbers(
            attention_factor=self.attention_factor, mscale=self.mscale, mscale_all_dim=self.mscale_all_dim
        )
        check_flags(truncate=self.truncate)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _yarn_mscale(self.factor, self.mscale) / _yarn_mscale(self.factor, self.mscale_all_dim)
        return _yarn_mscale(self.factor, 1.0)

    @property
    def softmax_factor(self) -> float:
        """Returns what latent attention multiplies the softmax scale by: the square of the factor for `mscale_all_dim`, 1 without it."""
        return _yarn_mscale(self.factor, self.mscale_all_dim or 0.0) ** 2

    def frequencies(self, base: np.ndarray, theta: float) -> np.ndarray:
        low, high = (self._index(turns, len(base), theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(base) - 1)
        ramp = np.clip((np.arange(len(base)) - low) / max(high - low, 1e-3), 0.0, 1.0)
        return base * (1 - ramp) + base / self.factor * ramp

    def _index(self, turns: float, half: int, theta: float) -> float:
        """The index of the frequency with this many rotations over the original context."""
        return half * math.log(self.original_max_position / (turns * 2 * math.pi)) / math.log(theta)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
