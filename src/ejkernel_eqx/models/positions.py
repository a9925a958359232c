"""Learned embeddings of positions."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from .._broadcast import like
from .._values import check_known, stopped, stops_programs
from ..nn.projection import mesh_of
from ..nn.tokens import ids_of
from ..sequences import segment_positions
from .vocabulary import embed


def embed_positions(table: Array, tokens: Array, cache: Any, rows: dict[str, Any]) -> Array:
    """The embeddings `[..., T, E]` of the positions of tokens `[..., T]`, from the table `[positions, E]`. Positions after the end of the table give
    NaN, where they are no error."""
    at = rows["batch"].positions if "batch" in rows else positions_of(tokens, rows, table.shape[0], cache)
    return jnp.where(at[..., None] < table.shape[0], embed(table, at), jnp.asarray(jnp.nan, table.dtype))


def positions_of(tokens: Array, rows: dict[str, Any], room: int, cache: Any = None) -> Array:
    """The positions of tokens `[..., T]`, int32. They count from the first real token of each row or segment, cached tokens included. Positions from
    `room` on are an error, except in a program for a GPU, as tokens that do not fit into a cache."""
    if cache is not None and not cache.bounded:
        raise ValueError(
            "cache: expected a layer of attention over all tokens, whose cache counts the positions of learned embeddings, received none; "
            "call the model without a cache, or build it with max_positions=None."
        )
    bounded = None if cache is None else cache.bounded[0]
    given = (rows.get("segment_ids"), rows.get("padding_mask"), None if bounded is None else bounded.lengths)
    say = lambda found: (
        f"tokens: expected texts of at most {room} tokens, the positions that the model has, received {found}; shorten the text."
    )

    def places(given: Any) -> Array:
        *given, lengths = given
        ids = ids_of(*given)
        # Without ids one row of positions, and of embeddings, serves all rows.
        at = (
            like(jnp.arange(tokens.shape[-1], dtype=jnp.int32), tokens)
            if ids is None
            else segment_positions(ids)
        )
        if lengths is None:
            return at
        at = at + like(lengths[0][..., None], at)  # those of the first layer
        return at if ids is None else jnp.where(ids < 0, 0, at)

    def check(given: Any) -> None:
        if (longest := 1 + int(np.max(places(given), initial=-1))) > room:
            raise ValueError(say(longest))

    at = places(given)
    may_exceed = (tokens.shape[-1] if bounded is None else bounded.max_length) > room
    if may_exceed and not check_known(given, check) and stops_programs() and mesh_of((tokens, at)) is None:
        at = stopped(at, at >= room, say("more"))
    return at
