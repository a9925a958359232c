"""New tokens that may be taken back: what a pool of states keeps of them, and which of them count."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._broadcast import like
from .._values import checked, shown
from ..paged import RaggedBatch
from .arguments import read_array

Tokens = dict[str, Array]


class Drafts(eqx.Module):
    """The last new tokens of each slot, which its state does not contain yet: as inputs of the parts of a layer, from which the next call
    makes the state again. They take far less memory than a state for each of them.

    - `tokens`: for each part (the short convolutions, then the recurrence) its inputs by name, `[..., slots, num_draft_tokens, ...]`.
    - `pending`: bool `[..., slots, num_draft_tokens]`: which of them are part of the sequence.
    """

    tokens: tuple[Tokens, ...]
    pending: Array

    @property
    def num_tokens(self) -> int:
        """The most tokens that a slot has room for."""
        return self.pending.shape[-1]

    def accept(self, accepted: Any, batch: RaggedBatch) -> "Drafts":
        """Only the first `accepted` new tokens of each sequence of `batch` stay pending."""
        accepted, slots = _read_accepted(accepted, batch, self.num_tokens), batch.state_indices
        if slots is None:
            raise ValueError(
                "batch: expected state_indices, the slot of each sequence's state, received None; give the batch of the call whose tokens "
                "are accepted."
            )
        count = self.pending.shape[-2]
        there = (new_tokens(batch) > 0) & (slots >= 0) & (slots < count)
        nowhere = count + jnp.arange(slots.shape[0], dtype=jnp.int32)
        most = jnp.full((count,), self.num_tokens, jnp.int32)
        most = most.at[jnp.where(there, slots, nowhere)].set(accepted, mode="drop", unique_indices=True)
        stay = jnp.arange(self.num_tokens, dtype=jnp.int32)[None] < most[:, None]
        return Drafts(self.tokens, self.pending & like(stay, self.pending))

    def replay(self, part: int, operation: Any, parameters: dict[str, Any], state: Array) -> Array:
        """The state of a part after the pending tokens, of rows `[N, ...]` that were taken out of a pool."""
        ids = jnp.where(self.pending, jnp.int32(0), jnp.int32(-1))
        _, new = operation(**self.tokens[part], **parameters, initial_state=state, segment_ids=ids)
        return new.astype(state.dtype)

    def renewed(self, tokens: list[Tokens], batch: RaggedBatch) -> "Drafts":
        """The new tokens `[T, ...]` of each sequence in place of the last ones, all pending; none of a sequence that has too many."""
        place = jnp.arange(self.num_tokens, dtype=jnp.int32)[None]
        new = new_tokens(batch)[:, None]
        pending = (place < new) & (new <= self.num_tokens)
        source = jnp.where(pending, batch.query_start_loc[:-1, None] + place, 0)
        take = lambda x, old: jnp.where(like_rows(pending, old), x[source].astype(old.dtype), 0)
        parts = zip(tokens, self.tokens, strict=True)
        return Drafts(tuple(jax.tree.map(take, own, old) for own, old in parts), pending)


def empty_drafts(parts: list[dict[str, Any]], batch_shape: tuple[int, ...], count: int) -> Drafts:
    """Room for `count` tokens of each slot; `parts` are what each part is given for one token, `[1, ...]`."""
    make = lambda x: jnp.zeros((*batch_shape, count, *x.shape[1:]), x.dtype)
    return Drafts(tuple(jax.tree.map(make, part) for part in parts), jnp.zeros((*batch_shape, count), bool))


def new_tokens(batch: RaggedBatch) -> Array:
    """How many each sequence has, int32 `[N]`."""
    return batch.query_start_loc[1:] - batch.query_start_loc[:-1]


def like_rows(x: Array, rows: Array) -> Array:
    """`x` with axes of size one behind, as many as `rows` has more."""
    return x.reshape(*x.shape, *(1,) * (rows.ndim - x.ndim))


def _read_accepted(accepted: Any, batch: Any, room: int) -> Array:
    """Int32 `[N]`; refused where it is known and no number of new tokens."""
    if not isinstance(batch, RaggedBatch):
        raise ValueError(
            f"batch: expected the RaggedBatch of the call whose tokens are accepted, received {type(batch).__name__}; see RaggedBatch.build."
        )
    given = accepted if isinstance(accepted, Array) else np.asarray(accepted)
    array = read_array("accepted", given, "integers", "[N]")
    count = batch.lengths.shape[0]
    if array.shape != (count,):
        raise ValueError(
            f"accepted: expected shape [N] = [{count}], a number of new tokens for each sequence of the batch, padded ones included, received "
            f"shape {array.shape}; put 0 for padded sequences."
        )
    new, array = new_tokens(batch), array.astype(jnp.int32)
    # Of a sequence with more tokens than there is room for, all are in the state already.
    numbers = jnp.stack([array, jnp.where(new > room, new, 0), new])
    return checked(
        numbers,
        numbers,
        lambda x: (x[2] > 0) & ((x[0] < x[1]) | (x[0] > x[2])),
        lambda found: (
            "accepted: expected 0 to the number of new tokens of each sequence, all of them where there are more than "
            f"num_draft_tokens={room}, received {found}; build the layer's states with a larger num_draft_tokens if need be."
        ),
        lambda values: shown(values[0]),
    )[0]
