"""Draft tokens of speculative decoding in pools of states: stored until they are accepted or rolled back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._broadcast import like
from .._signatures import Module
from .._values import checked, shown
from ..paged import RaggedBatch
from .arguments import read_array

Tokens = dict[str, Array]


class Drafts(Module):
    """The last new tokens of each slot, which are not part of its state yet: the inputs of the parts of a layer, from which the next call
    recomputes the state. This takes far less memory than one state per token.

    - `tokens`: for each part (the short convolutions, then the recurrence) its inputs by name, `[..., slots, num_draft_tokens, ...]`.
    - `pending`: bool `[..., slots, num_draft_tokens]`, True for tokens that belong to the sequence.
    """

    tokens: tuple[Tokens, ...]
    pending: Array

    @property
    def num_tokens(self) -> int:
        """The maximum number of tokens per slot."""
        return self.pending.shape[-1]

    def accept(self, accepted: Any, batch: RaggedBatch) -> "Drafts":
        """Keeps only the first `accepted` new tokens of each sequence of `batch` pending."""
        accepted, slots = _read_accepted(accepted, batch, self.num_tokens), batch.state_indices
        if slots is None:
            raise ValueError(
                "batch: expected state_indices, the slot of each sequence's state, received None; pass the batch of the call whose "
                "tokens are accepted."
            )
        count = self.pending.shape[-2]
        there = (new_tokens(batch) > 0) & (slots >= 0) & (slots < count)
        nowhere = count + jnp.arange(slots.shape[0], dtype=jnp.int32)
        most = jnp.full((count,), self.num_tokens, jnp.int32)
        most = most.at[jnp.where(there, slots, nowhere)].set(accepted, mode="drop", unique_indices=True)
        stay = jnp.arange(self.num_tokens, dtype=jnp.int32)[None] < most[:, None]
        return Drafts(self.tokens, self.pending & like(stay, self.pending))

    def replay(self, part: int, operation: Any, parameters: dict[str, Any], state: Any) -> Any:
        """The state of a part after the pending tokens, for rows `[N, ...]` of a pool."""
        ids = jnp.where(self.pending, jnp.int32(0), jnp.int32(-1))
        _, new = operation(**self.tokens[part], **parameters, initial_state=state, segment_ids=ids)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), new, state)

    def renewed(self, tokens: list[Tokens], batch: RaggedBatch) -> "Drafts":
        """Replaces the stored tokens by the new ones `[T, ...]`, all pending; by none for a sequence with too many."""
        place = jnp.arange(self.num_tokens, dtype=jnp.int32)[None]
        new = new_tokens(batch)[:, None]
        pending = (place < new) & (new <= self.num_tokens)
        source = jnp.where(pending, batch.query_start_loc[:-1, None] + place, 0)
        take = lambda x, old: jnp.where(like_rows(pending, old), x[source].astype(old.dtype), 0)
        parts = zip(tokens, self.tokens, strict=True)
        return Drafts(tuple(jax.tree.map(take, own, old) for own, old in parts), pending)


def empty_drafts(parts: list[dict[str, Any]], batch_shape: tuple[int, ...], count: int) -> Drafts:
    """Empty drafts with room for `count` tokens per slot; `parts` are the inputs of each part for one token, `[1, ...]`."""
    make = lambda x: jnp.zeros((*batch_shape, count, *x.shape[1:]), x.dtype)
    return Drafts(tuple(jax.tree.map(make, part) for part in parts), jnp.zeros((*batch_shape, count), bool))


def new_tokens(batch: RaggedBatch) -> Array:
    """The number of new tokens of each sequence, int32 `[N]`."""
    return batch.query_start_loc[1:] - batch.query_start_loc[:-1]


def like_rows(x: Array, rows: Array) -> Array:
    """`x` with trailing axes of size one, up to the rank of `rows`."""
    return x.reshape(*x.shape, *(1,) * (rows.ndim - x.ndim))


def _read_accepted(accepted: Any, batch: Any, room: int) -> Array:
    """The accepted counts as int32 `[N]`, checked when they are known."""
    if not isinstance(batch, RaggedBatch):
        raise ValueError(
            f"batch: expected the RaggedBatch of the call whose tokens are accepted, received {type(batch).__name__}; "
            "build it with RaggedBatch.build."
        )
    given = accepted if isinstance(accepted, Array) else np.asarray(accepted)
    array = read_array("accepted", given, "integers", "[N]")
    count = batch.lengths.shape[0]
    if array.shape != (count,):
        raise ValueError(
            f"accepted: expected shape [N] = [{count}], one number per sequence of the batch, padded ones included, received "
            f"shape {array.shape}; use 0 for padded sequences."
        )
    new, array = new_tokens(batch), array.astype(jnp.int32)
    # All tokens of a sequence with more than there is room for are part of its state already.
    numbers = jnp.stack([array, jnp.where(new > room, new, 0), new])
    return checked(
        numbers,
        numbers,
        lambda x: (x[2] > 0) & ((x[0] < x[1]) | (x[0] > x[2])),
        lambda found: (
            "accepted: expected 0 to the number of new tokens of each sequence, or exactly that number if it exceeds "
            f"num_draft_tokens={room}, received {found}; build the pool with a larger num_draft_tokens to roll back more."
        ),
        lambda values: shown(values[0]),
    )[0]
