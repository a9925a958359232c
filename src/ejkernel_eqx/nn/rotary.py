"""Rotary position embeddings and the published ways of stretching them to longer contexts."""

import dataclasses
import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from .arguments import broadcasts, check_flags, check_numbers, check_sizes, read_array


def _check_positive(**numbers: Any) -> None:
    check_numbers(**numbers)
    for name, number in numbers.items():
        if number is None or number <= 0:
            raise ValueError(
                f"{name}: expected a positive number, received {number!r}; the model's configuration has it."
            )


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    r"""Position interpolation: $\theta_i' = \theta_i / s$ (Chen et al. 2023, arXiv:2306.15595).

    **Arguments:**

    - `factor`: $s$, the new context length over the trained one.
    """

    magnitude: ClassVar[float] = 1.0

    factor: float

    def __post_init__(self):
        _check_positive(factor=self.factor)

    def frequencies(self, base: np.ndarray, theta: float) -> np.ndarray:
        return base / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    r"""Llama 3.1's scaling: long wavelengths are interpolated, short ones kept, those between blended.

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
        _check_positive(**dataclasses.asdict(self))
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor: expected more than low_freq_factor={self.low_freq_factor}, received {self.high_freq_factor}; the "
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

    Frequencies that turn more than `beta_fast` times over the original context are kept, those that turn
    fewer than `beta_slow` times are divided by `factor`, with a linear ramp over the index between; cosine
    and sine are multiplied by the attention factor.

    **Arguments:**

    - `factor`: the new context length over the trained one.
    - `original_max_position`: the trained context length, in tokens.
    - `beta_fast`, `beta_slow`: the two bounds, in turns.
    - `attention_factor`: what cosine and sine are multiplied by; default $0.1 \ln(\text{factor}) + 1$.
    - `mscale`, `mscale_all_dim`: DeepSeek's form of it, the quotient of $0.1\, m \ln(\text{factor}) + 1$ for
        both.
    - `truncate`: round the ramp's ends outwards to whole indices (the paper's code; GPT-OSS does not).
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
        _check_positive(factor=self.factor, original_max_position=self.original_max_position)
        _check_positive(beta_fast=self.beta_fast, beta_slow=self.beta_slow)
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

    def frequencies(self, base: np.ndarray, theta: float) -> np.ndarray:
        low, high = (self._index(turns, len(base), theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(base) - 1)
        ramp = np.clip((np.arange(len(base)) - low) / max(high - low, 1e-3), 0.0, 1.0)
        return base * (1 - ramp) + base / self.factor * ramp

    def _index(self, turns: float, half: int, theta: float) -> float:
        """The index whose frequency makes this many turns over the original context."""
        return half * math.log(self.original_max_position / (turns * 2 * math.pi)) / math.log(theta)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


RotaryScaling = LinearScaling | Llama3Scaling | YarnScaling


class RotaryEmbedding(eqx.Module):
    r"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

    Each pair $(x_a, x_b)$ of features at position $p$ is turned by the angle $p\,\theta_i$,
    $\theta_i = \theta^{-2i/R}$ for $i < R/2$:

    $$x_a' = m\,(x_a \cos p\theta_i - x_b \sin p\theta_i), \qquad
      x_b' = m\,(x_b \cos p\theta_i + x_a \sin p\theta_i)$$

    with $R$ the rotary dimension and $m = 1$ unless YaRN says otherwise. Computed in float32 (float64 for
    float64 inputs), returned in the input's dtype. There are no trainable leaves.
    """

    head_dim: int = eqx.field(static=True)
    theta: float = eqx.field(static=True)
    rotary_dim: int = eqx.field(static=True)
    interleaved: bool = eqx.field(static=True)
    scaling: RotaryScaling | None = eqx.field(static=True)

    def __init__(
        self,
        head_dim: int,
        *,
        theta: float = 10000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        scaling: RotaryScaling | None = None,
    ):
        """**Arguments:**

        - `head_dim`: features per head, `D`.
        - `theta`: the base of the frequencies.
        - `rotary_dim`: how many of the first features are turned, the rest pass unchanged; default all.
        - `interleaved`: pairs are neighbours `(2i, 2i + 1)` (GPT-J, DeepSeek's weights); by default they are
            `(i, i + rotary_dim / 2)` (GPT-NeoX, and Llama as published on Hugging Face).
        - `scaling`: `LinearScaling`, `Llama3Scaling` or `YarnScaling`.
        """
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        check_sizes(head_dim=head_dim, rotary_dim=rotary_dim)
        check_flags(interleaved=interleaved)
        _check_positive(theta=theta)
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise ValueError(
                f"rotary_dim: expected an even number from 2 to head_dim={head_dim}, received {rotary_dim}; "
                "pass rotary_dim= for a head_dim that is odd."
            )
        if scaling is not None and not isinstance(scaling, RotaryScaling):
            raise ValueError(
                f"scaling: expected LinearScaling, Llama3Scaling, YarnScaling or None, received {scaling!r}; "
                "build one of these from the numbers of the model's configuration."
            )
        self.head_dim, self.rotary_dim = head_dim, rotary_dim
        self.theta, self.interleaved, self.scaling = float(theta), interleaved, scaling

    def frequencies(self) -> np.ndarray:
        """The angle per position of each pair, float64 `[rotary_dim / 2]`."""
        base = self.theta ** (-np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim)
        return base if self.scaling is None else self.scaling.frequencies(base, self.theta)

    @jax.named_scope("ejx.nn.RotaryEmbedding")
    def __call__(self, x: Array, positions: Array | None = None, *, offset: ArrayLike = 0) -> Array:
        """**Arguments:**

        - `x`: queries or keys `[..., T, H, D]`.
        - `positions`: integers that broadcast to `[..., T]`; default `offset + arange(T)`.
        - `offset`: the position of the first token, an integer or an integer array `[...]`, one for each row.

        **Returns:** an array of the shape and dtype of `x`. Raises `ValueError` for arguments that do not fit.
        """
        x = self._check(x)
        if positions is None:
            positions = lax.expand_dims(_read_offset(offset, x.shape[:-3]), (-1,))
            steps = jnp.arange(x.shape[-3], dtype=jnp.int32)
            positions = positions + lax.expand_dims(steps, range(positions.ndim - 1))
        else:
            positions = check_positions(positions, x.shape[:-2])
        dtype = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        # [..., T, 1, 1], with as many axes as x
        positions = lax.expand_dims(positions, range(x.ndim - 2 - positions.ndim))[..., None, None]
        frequencies = jnp.asarray(self.frequencies(), dtype)
        angles = positions.astype(dtype) * lax.expand_dims(frequencies, range(x.ndim - 1))
        cos, sin = magnitude * jnp.cos(angles), magnitude * jnp.sin(angles)
        turned, passed = x[..., : self.rotary_dim].astype(dtype), x[..., self.rotary_dim :]
        turned = (_turn_neighbours if self.interleaved else _turn_halves)(turned, cos, sin).astype(x.dtype)
        return jnp.concatenate([turned, passed], axis=-1) if passed.shape[-1] else turned

    def _check(self, x: Any) -> Array:
        x = read_array("x", x, "floats", "[..., T, H, D]")
        if x.ndim < 3 or x.shape[-1] != self.head_dim:
            raise ValueError(
                f"x: expected [..., T, H, D] with D = {self.head_dim}, received shape {x.shape}; "
                "split the heads before the rotation."
            )
        return x


def check_positions(positions: Any, shape: tuple[int, ...]) -> Array:
    """Integers that broadcast to the tokens' `shape`, `[..., T]`."""
    positions = read_array("positions", positions, "integers", "[..., T]")
    if positions.ndim == 0 or not broadcasts(positions.shape, shape):
        raise ValueError(
            f"positions: expected [..., T] that broadcasts to {shape}, received shape {positions.shape}; pass offset= for the position of "
            "the first token."
        )
    return positions


def _read_offset(offset: Any, lead: tuple[int, ...]) -> Array:
    is_number = isinstance(offset, int | np.integer) and not isinstance(offset, bool)
    found = jnp.asarray(offset, jnp.int32) if is_number else read_array("offset", offset, "integers", "[...]")
    if not broadcasts(found.shape, lead):
        raise ValueError(
            f"offset: expected an integer or integers of shape {lead}, one for each row, received shape {found.shape}; pass positions= for "
            "one for each token."
        )
    return found.astype(jnp.int32)


def _turn_halves(x: Array, cos: Array, sin: Array) -> Array:
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _turn_neighbours(x: Array, cos: Array, sin: Array) -> Array:
    a, b = x[..., 0::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
