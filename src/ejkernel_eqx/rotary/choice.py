"""`RotaryChoice`: one of several rotary embeddings, chosen by an array."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._jitted import compiled_call
from .._shapes import AnyArray, Float, Int
from .._signatures import Module
from .embedding import RotaryEmbedding


class RotaryChoice(Module):
    """One of several rotary embeddings, chosen by an integer that may be traced. So a scan can run over stacked layers
    with different rotations, such as those of Gemma 3 with and without a window. The integer is an untrained array
    leaf.

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

    def __init__(self, ropes: Sequence[RotaryEmbedding], index: int | np.integer | Int[AnyArray, ""]):
        """**Arguments:**

        - `ropes`: `RotaryEmbedding`s with equal `head_dim` and equal numbers of position axes.
        - `index`: index of the one to use, from 0.
        """
        found = tuple(ropes) if isinstance(ropes, Sequence) else ()
        if not found or not all(isinstance(rope, RotaryEmbedding) for rope in found):
            raise ValueError(
                f"ropes: expected RotaryEmbeddings, received {ropes!r}; pass a list or tuple of at least one."
            )
        if len({(rope.head_dim, rope.num_axes) for rope in found}) > 1:
            raise ValueError(
                f"ropes: expected equal head_dim and num_axes, received {[(rope.head_dim, rope.num_axes) for rope in found]}; "
                "they are alternatives for one layer."
            )
        is_integer = isinstance(index, int | Array | np.ndarray | np.integer) and not isinstance(index, bool)
        if not is_integer or jnp.ndim(index) or not jnp.issubdtype(jnp.result_type(index), jnp.integer):
            raise ValueError(f"index: expected one integer, received {index!r}; it may be traced.")
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

    @compiled_call("ejx.nn.RotaryChoice")
    def __call__(
        self,
        x: Float[AnyArray, "*B T H D"],
        positions: Int[AnyArray, "... T"] | None = None,
        *,
        offset: int | np.integer | Int[AnyArray, "#*B"] = 0,
        lengths: int | np.integer | Int[AnyArray, "#*B #T"] | None = None,
    ) -> Float[Array, "*B T H D"]:
        """Rotates `x`, with the arguments of [`RotaryEmbedding`][ejkernel_eqx.nn.RotaryEmbedding]."""
        places = {"offset": offset, "lengths": lengths}
        turns = [lambda x, rope=rope: rope(x, positions, **places) for rope in self.ropes]
        return lax.switch(self.index, turns, x)
