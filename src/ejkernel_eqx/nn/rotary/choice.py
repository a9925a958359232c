"""Which of several rotations a layer has, as a value."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from .embedding import RotaryEmbedding


class RotaryChoice(eqx.Module):
    """One of several rotary embeddings, chosen by an integer that may be traced: for a scan over stacked layers that rotate differently,
    as those of Gemma 3 with and without a window. The integer is an array leaf, not a parameter to train.

    ```python
    ropes = [RotaryEmbedding.from_config(config, layer_type=kind) for kind in ("full_attention", "sliding_attention")]
    make = lambda key, window: MultiHeadAttention(
        ..., sliding_window=window, rope=RotaryChoice(ropes, (window > 0).astype(int)), key=key
    )
    layers = eqx.filter_vmap(make)(keys, windows)
    ```
    """

    index: Array  # int32 []
    ropes: tuple[RotaryEmbedding, ...] = eqx.field(static=True)

    def __init__(self, ropes: Sequence[RotaryEmbedding], index: ArrayLike):
        """**Arguments:**

        - `ropes`: `RotaryEmbedding`s of one `head_dim`, with positions along equally many axes.
        - `index`: which one, an integer from 0 on.
        """
        found = tuple(ropes) if isinstance(ropes, Sequence) else ()
        if not found or not all(isinstance(rope, RotaryEmbedding) for rope in found):
            raise ValueError(
                f"ropes: expected RotaryEmbeddings, received {ropes!r}; one alone needs no choice."
            )
        if len({(rope.head_dim, rope.num_axes) for rope in found}) > 1:
            raise ValueError(
                f"ropes: expected one head_dim and number of axes, received {[(rope.head_dim, rope.num_axes) for rope in found]}; "
                "all serve one layer."
            )
        is_integer = isinstance(index, int | Array | np.ndarray | np.integer) and not isinstance(index, bool)
        if not is_integer or jnp.ndim(index) or not jnp.issubdtype(jnp.result_type(index), jnp.integer):
            raise ValueError(f"index: expected one integer, received {index!r}; it may be a traced one.")
        self.index, self.ropes = jnp.asarray(index, jnp.int32), found

    @property
    def head_dim(self) -> int:
        return self.ropes[0].head_dim

    @property
    def num_axes(self) -> int | None:
        return self.ropes[0].num_axes

    @property
    def by_length(self) -> bool:
        return any(rope.by_length for rope in self.ropes)

    @jax.named_scope("ejx.nn.RotaryChoice")
    def __call__(self, x: Array, positions: Array | None = None, **places: Any) -> Array:
        """As `RotaryEmbedding`, whose arguments these are."""
        turns = [lambda x, rope=rope: rope(x, positions, **places) for rope in self.ropes]
        return lax.switch(self.index, turns, x)
