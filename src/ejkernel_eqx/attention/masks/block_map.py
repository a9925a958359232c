"""`BlockMap`: blocks of scores that are visible as a whole or not at all, as an array."""

import equinox as eqx
from jax import Array
from jaxtyping import Bool

from ..._signatures import Module


class BlockMap(Module):
    """Map of the visible blocks of scores: booleans `[..., H or 1, query blocks, key blocks]` and the queries and keys of a block."""

    block_map: Bool[Array, "... M N"]
    size: tuple[int, int] = eqx.field(static=True)


def check_map(
    shape: tuple[int, ...], size: tuple[int, int], num_queries: int, num_keys: int, num_heads: int | None
) -> None:
    """`ValueError` unless a map has a block for all queries and keys, and the heads of a call or one."""
    expected = (-(-num_queries // size[0]), -(-num_keys // size[1]))
    if shape[-2:] != expected:
        raise ValueError(
            f"block_map: expected {expected[0]} by {expected[1]} blocks of {size[0]} by {size[1]} for {num_queries} queries and {num_keys} "
            f"keys, received shape {shape}; the last block of each may be shorter."
        )
    heads = shape[-3] if len(shape) > 2 else 1
    if heads != 1 and num_heads not in (None, heads):
        raise ValueError(f"block_map: expected 1 or {num_heads} heads, received {heads} in shape {shape}.")
