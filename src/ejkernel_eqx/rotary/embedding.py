"""`RotaryEmbedding`: rotary position embeddings."""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from .._errors import CheckpointError
from .._jitted import compiled_call
from .._shapes import AnyArray, Float, Int
from .._signatures import Module
from ..core.arguments import check_flags, read_array, read_sizes
from .by_length import DynamicScaling, LongRopeScaling
from .config import read_config, read_scaling
from .positions import axes_of_pairs, by_pair, check_positions, count_from, longest_of, read_rows
from .scaling import check_positive, LinearScaling, Llama3Scaling, ProportionalScaling, YarnScaling

FixedScaling = LinearScaling | Llama3Scaling | ProportionalScaling | YarnScaling
ScalingByLength = DynamicScaling | LongRopeScaling
RotaryScaling = FixedScaling | ScalingByLength


class RotaryEmbedding(Module):
    r"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

    Each pair $(x_a, x_b)$ of features at position $p$ is rotated by the angle $p\,\theta_i$,
    $\theta_i = \theta^{-2i/R}$ for $i < R/2$:

    $$x_a' = m\,(x_a \cos p\theta_i - x_b \sin p\theta_i), \qquad
      x_b' = m\,(x_b \cos p\theta_i + x_a \sin p\theta_i)$$

    with $R$ the rotary dimension and $m = 1$ except for YaRN and LongRoPE. With `mrope_section`, a token has a position
    along each of several axes (Qwen2-VL, Wang et al. 2024, arXiv:2409.12191), and each pair is rotated by one of them. Computed in
    float32 (float64 for float64) and returned in the dtype of the input. There are no trainable parameters.
    """

    head_dim: int = eqx.field(static=True)
    theta: float = eqx.field(static=True)
    rotary_dim: int = eqx.field(static=True)
    interleaved: bool = eqx.field(static=True)
    scaling: RotaryScaling | None = eqx.field(static=True)
    mrope_section: tuple[int, ...] | None = eqx.field(static=True)
    mrope_interleaved: bool = eqx.field(static=True)

    def __init__(
        self,
        head_dim: int,
        *,
        theta: float | None = None,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        scaling: RotaryScaling | Mapping[str, Any] | None = None,
        mrope_section: Sequence[int] | None = None,
        mrope_interleaved: bool = False,
    ):
        """**Arguments:**

        - `head_dim`: features per head, `D`.
        - `theta`: base of the frequencies; default 10000.
        - `rotary_dim`: number of leading features to rotate; the others are unchanged. Default all.
        - `interleaved`: pairs are `(2i, 2i + 1)`, as in GPT-J and weights of DeepSeek. By default they are `(i, i +
            rotary_dim / 2)`, as in GPT-NeoX and in Llama on Hugging Face.
        - `scaling`: `LinearScaling`, `DynamicScaling`, `YarnScaling`, `LongRopeScaling`, `Llama3Scaling` or `ProportionalScaling`; or
            the dict `rope_scaling` of a published configuration, with its `rope_type` (or `type`). Its values `rope_theta`,
            `partial_rotary_factor`, `mrope_section` and `mrope_interleaved` are the defaults of the arguments here.
        - `mrope_section`: number of pairs rotated by each axis of the positions, `rotary_dim / 2` in total; positions are then
            `[len(mrope_section), ..., T]`. Default: positions have one axis.
        - `mrope_interleaved`: axes alternate from pair to pair (Qwen3-VL); by default each has a contiguous block of pairs (Qwen2-VL).
        """
        (head_dim,) = read_sizes(head_dim=head_dim)
        stretched = scaling
        if isinstance(scaling, Mapping):
            found = read_scaling(scaling, head_dim)
            stretched = found.scaling
            theta = found.theta if theta is None else theta
            rotary_dim = found.rotary_dim if rotary_dim is None else rotary_dim
            mrope_section = found.mrope_section if mrope_section is None else mrope_section
            mrope_interleaved = mrope_interleaved or found.mrope_interleaved
        theta = 10000.0 if theta is None else theta
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        (rotary_dim,) = read_sizes(rotary_dim=rotary_dim)
        check_flags(interleaved=interleaved, mrope_interleaved=mrope_interleaved)
        check_positive(theta=theta)
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise ValueError(
                f"rotary_dim: expected an even number from 2 to head_dim={head_dim}, received {rotary_dim}; "
                "for an odd head_dim pass rotary_dim=."
            )
        self.head_dim, self.rotary_dim = head_dim, rotary_dim
        self.theta, self.interleaved, self.scaling = float(theta), interleaved, _known(stretched, rotary_dim)
        self.mrope_section = _read_section(mrope_section, mrope_interleaved, rotary_dim)
        self.mrope_interleaved = mrope_interleaved

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, layer_type: str | None = None, interleaved: bool = False
    ) -> "RotaryEmbedding":
        """Builds the rotary embedding of a published model from its `config.json`.

        **Arguments:**

        - `config`: the parsed configuration; of a model with several parts, that of the language model. The keys used are `rope_theta`,
            `rope_scaling` or `rope_parameters`, `rope_local_base_freq`, `partial_rotary_factor`, `head_dim` or `hidden_size` and
            `num_attention_heads`, `max_position_embeddings` and `original_max_position_embeddings`, and older names of some. A missing theta
            or partial factor defaults to that of `transformers` for the `model_type`.
        - `layer_type`: for models whose layers rotate differently (Gemma 3): `"full_attention"` or `"sliding_attention"`.
        - `interleaved`: as in the constructor; configurations do not specify it.

        **Returns:** a `RotaryEmbedding`. Raises `ValueError` for unsupported configurations; `CheckpointError` for entries that are missing, of
        another type or out of bounds.
        """
        check_flags(interleaved=interleaved)
        arguments = read_config(config, layer_type)
        try:
            return cls(**arguments, interleaved=interleaved)
        except ValueError as error:
            raise CheckpointError(f"config: {error}") from error

    @property
    def by_length(self) -> bool:
        """Returns whether the frequencies depend on the length of a sequence."""
        return isinstance(self.scaling, ScalingByLength)

    def frequencies(self, length: int = 1) -> np.ndarray:
        """Returns the angle per position of each pair, float64 `[rotary_dim / 2]`, in a sequence of `length` tokens."""
        return self._turning(np.asarray([length], np.float64), np)[0].reshape(-1)

    @property
    def num_axes(self) -> int | None:
        """The number of axes of positions; `None` without `mrope_section`, when positions have no such axis."""
        return None if self.mrope_section is None else len(self.mrope_section)

    def _turning(self, length: Any, xp: Any) -> tuple[Any, Any]:
        """The frequencies `[R / 2]`, or `[..., R / 2]` for `length` `[..., 1]`, and the magnitude."""
        base = self.theta ** (-np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim)
        if isinstance(self.scaling, ScalingByLength):
            return self.scaling.at(base, length, xp)
        if self.scaling is None:
            return base, 1.0
        return self.scaling.frequencies(base, self.theta), self.scaling.magnitude

    @compiled_call("ejx.nn.RotaryEmbedding")
    def __call__(
        self,
        x: Float[AnyArray, "*B T H D"],
        positions: Int[AnyArray, "... T"] | None = None,
        *,
        offset: int | np.integer | Int[AnyArray, "#*B"] = 0,
        lengths: int | np.integer | Int[AnyArray, "#*B #T"] | None = None,
    ) -> Float[Array, "*B T H D"]:
        """**Arguments:**

        - `x`: queries or keys `[..., T, H, D]` with any number of leading axes.
        - `positions`: integers that broadcast to `[..., T]`, or with `mrope_section` to `[axes, ..., T]`. There `[T]`
            means equal positions along all axes, as for text. The default is `offset + arange(T)`.
        - `offset`: position of the first token, an integer or an integer array `[...]` with one per row.
        - `lengths`: current length of the sequence of each token, integers that broadcast to `[..., T]`; only used by `DynamicScaling` and
            `LongRopeScaling`. Default: the last position of each row plus one.

        **Returns:** an array of the shape and dtype of `x`. Raises `ValueError` for invalid arguments.
        """
        x = read_array("x", x, "floats", "[..., T, H, D]")
        if x.ndim < 3 or x.shape[-1] != self.head_dim:
            raise ValueError(
                f"x: expected [..., T, H, D] with D = {self.head_dim}, received shape {x.shape}; "
                "split the features into heads before the rotation."
            )
        dtype = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        cos, sin = self.tables(x.shape[:-2], positions, offset=offset, lengths=lengths, dtype=dtype)
        return turned(x, cos, sin, self.interleaved)

    def tables(
        self,
        shape: tuple[int, ...],
        positions: Any = None,
        *,
        offset: Any = 0,
        lengths: Any = None,
        dtype: DTypeLike = jnp.float32,
    ) -> tuple[Array, Array]:
        """Cosines and sines of the angles of tokens of this shape, `[..., T]`: two arrays that broadcast to `[..., T, R / 2]`. The other arguments
        are those of a call."""
        axes = self.num_axes
        if positions is None:
            # Equal along all axes, so they have one; a first axis is that of the rows.
            positions, axes = count_from(offset, shape[:-1], shape[-1]), None
        else:
            positions = check_positions(positions, shape, axes)
        if lengths is not None:
            lengths = read_rows("lengths", lengths, shape, "token", "[..., 1] is one for each row")
        elif self.by_length:
            lengths = longest_of(positions, axes)
        at = None if lengths is None else lengths[..., None].astype(dtype)
        whole = lambda a: lax.expand_dims(a, range(len(shape) + 1 - a.ndim))  # [..., T, R / 2]
        found, magnitude = self._turning(at, jnp)
        section = self.mrope_section
        pairs = None if axes is None or section is None else axes_of_pairs(section, self.mrope_interleaved)
        angles = whole(by_pair(positions, pairs)).astype(dtype) * whole(jnp.asarray(found, dtype))
        if isinstance(magnitude, Array):
            magnitude = whole(magnitude)
        return magnitude * jnp.cos(angles), magnitude * jnp.sin(angles)


def _known(scaling: Any, rotary_dim: int) -> RotaryScaling | None:
    if scaling is None:
        return None
    if not isinstance(scaling, RotaryScaling):
        raise ValueError(
            "scaling: expected LinearScaling, DynamicScaling, YarnScaling, LongRopeScaling, Llama3Scaling, ProportionalScaling, a dict or "
            f"None, received {scaling!r}; build one of these with the numbers of the model's configuration."
        )
    if isinstance(scaling, ScalingByLength) and rotary_dim < scaling.least_dim:
        raise ValueError(
            f"rotary_dim: expected at least {scaling.least_dim} with {type(scaling).__name__}, received {rotary_dim}; its exponent "
            "divides by rotary_dim - 2."
        )
    if isinstance(scaling, LongRopeScaling):
        for name in ("short_factor", "long_factor"):
            if (found := len(getattr(scaling, name))) != rotary_dim // 2:
                raise ValueError(
                    f"{name}: expected {rotary_dim // 2} numbers, one for each pair of rotary_dim={rotary_dim}, received {found}; check "
                    "head_dim= and rotary_dim=."
                )
    return scaling


def _read_section(section: Any, interleaved: bool, rotary_dim: int) -> tuple[int, ...] | None:
    if section is None:
        if interleaved:
            raise ValueError(
                "mrope_interleaved: expected False without mrope_section, received True; pass mrope_section= as well."
            )
        return None
    numbers = list(section) if isinstance(section, Sequence) and not isinstance(section, str) else []
    is_whole = all(isinstance(n, int | np.integer) and not isinstance(n, bool) and n >= 0 for n in numbers)
    if not is_whole or len(numbers) < 2 or sum(numbers) != rotary_dim // 2:
        raise ValueError(
            f"mrope_section: expected two or more non-negative integers that sum to rotary_dim / 2 = {rotary_dim // 2}, received {section!r}; each "
            "pair is rotated by one axis."
        )
    if interleaved and max(numbers[1:]) > numbers[0]:
        raise ValueError(
            f"mrope_section: expected no axis with more pairs than the first if mrope_interleaved, received {section!r}; axes alternate."
        )
    return tuple(int(n) for n in numbers)


def turned(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """`x` `[..., T, H, D]`, whose leading features are rotated by angles `[..., T, R / 2]` in their dtype; the others are as they were."""
    cos, sin = (lax.expand_dims(a, (-2,)) for a in (cos, sin))  # [..., T, 1, R / 2]
    pairs, others = x[..., : 2 * cos.shape[-1]].astype(cos.dtype), x[..., 2 * cos.shape[-1] :]
    pairs = (turn_neighbours if interleaved else turn_halves)(pairs, cos, sin).astype(x.dtype)
    return jnp.concatenate([pairs, others], axis=-1) if others.shape[-1] else pairs


def turn_halves(x: Array, cos: Array, sin: Array) -> Array:
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def turn_neighbours(x: Array, cos: Array, sin: Array) -> Array:
    a, b = x[..., 0::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
