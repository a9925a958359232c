"""`Pooler`: makes one vector of a text from the features of its tokens."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from .._jitted import compiled_call
from .._signatures import check_one_of, Module
from ..core.arguments import accumulator
from ..nn.arguments import check_flags, check_tokens, read_array
from ..pooling import MeanPooling

_REDUCTIONS = {"mean": "mean", "max": "max", "last": "last", "first": "mean"}


class Pooler(Module):
    r"""The vector of a text, from the features $x_t$ of its tokens $\mathcal T$:

    $$y = f\Big(\frac{1}{|\mathcal T|} \sum_{t \in \mathcal T} x_t\Big), \qquad y / \max(\lVert y \rVert_2, 10^{-12})$$

    Instead of the mean there may be the maximum, or the features of the last or first token. The layers $f$ and the division by the norm are
    optional.

    Source: Reimers & Gurevych, *Sentence-BERT* (2019, arXiv:1908.10084), section 3.
    """

    layers: tuple[Callable[..., Any], ...]
    pool: MeanPooling
    pooling: str = eqx.field(static=True)
    normalize: bool = eqx.field(static=True)

    def __init__(
        self, pooling: str = "mean", normalize: bool = True, layers: tuple[Callable[..., Any], ...] = ()
    ):
        """**Arguments:**

        - `pooling`: `"mean"`, `"max"`, `"last"` (Qwen3-Embedding) or `"first"` (BERT's `[CLS]`).
        - `normalize`: whether a vector is divided by its Euclidean norm. The product of two vectors is then the cosine of their angle.
        - `layers`: functions of one vector that are applied after the pooling, such as `equinox.nn.Linear` (Gemma-Embedding).

        **Raises:** `ValueError` for another `pooling`.
        """
        check_one_of("pooling", pooling, _REDUCTIONS)
        check_flags(normalize=normalize)
        self.layers, self.pool = tuple(layers), MeanPooling(_REDUCTIONS[pooling])
        self.pooling, self.normalize = pooling, normalize

    @compiled_call("ejx.models.Pooler")
    def __call__(self, x: Array, padding_mask: Array | None = None) -> Array:
        """**Arguments:**

        - `x`: features `[..., T, E]`.
        - `padding_mask`: bool `[..., T]`, True for real tokens; default all.

        **Returns:** vectors `[..., E]`, or as wide as the last of `layers` makes them. They are float32, or float64 if `x` is.
        """
        x = read_array("x", x, "floats", "[..., T, E]")
        check_tokens("padding_mask", padding_mask, "booleans", "x", x)
        real = jnp.ones(x.shape[:-1], bool) if padding_mask is None else jnp.asarray(padding_mask)
        if self.pooling == "first":
            real &= jnp.cumsum(real, axis=-1) == 1
        y = self.pool(x, mask=real).astype(accumulator(x.dtype))
        for layer in self.layers:
            y = jnp.vectorize(layer, signature="(e)->(o)")(y)
        if not self.normalize:
            return y
        # The maximum is outside of the square root, since the root has no gradient at 0.
        return y * jax.lax.rsqrt(jnp.maximum(jnp.sum(y * y, axis=-1, keepdims=True), 1e-24))
