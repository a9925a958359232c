"""A step of serving: the one array that the host sends for it, and the programs that the device runs.

The device keeps the caches, the page table by slot, and the last token of each slot. So a step can start before the host knows the tokens of the step
before.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..models import Decoder, ServingCache
from ..models.sampling import draw, greedy, SamplingArrays
from ..nn.drafts import new_tokens
from ..paged import RaggedBatch
from ..parallel.mesh import gathered


def last_logits(
    model: Decoder, tokens: Array, cache: ServingCache, batch: RaggedBatch
) -> tuple[Array, ServingCache]:
    """Runs the model on packed `tokens [T]`. Returns float32 logits `[N, vocabulary]` after each sequence's last new token."""
    x, cache = model.features(tokens, cache, batch=batch)
    return gathered(model.logits(x[jnp.maximum(batch.last_tokens, 0)]), -1), cache


def verify(
    model: Decoder,
    tokens: Array,
    cache: ServingCache,
    batch: RaggedBatch,
    drafts: int,
    sampling: SamplingArrays | None,
) -> tuple[Array, ServingCache]:
    """Runs the model on packed `tokens [T]`: the last token of each sequence and up to `drafts` proposed ones, or none where tokens are drawn.

    **Returns:** the tokens that the model chooses, int32 `[N, 1 + drafts]`; and the cache without the drafts that are wrong. -1 follows the first
    token that was not proposed, and stands for logits that are not finite.
    """
    x, cache = model.features(tokens, cache, batch=batch)
    place = jnp.arange(drafts + 1, dtype=jnp.int32)[None]
    index = jnp.minimum(batch.query_start_loc[:-1, None] + place, tokens.shape[0] - 1)
    logits = gathered(model.logits(x[index]), -1)
    chosen = greedy(logits)
    if sampling is not None:
        chosen = chosen.at[:, 0].set(draw(logits[:, 0], sampling))
    chosen = jnp.where(jnp.isfinite(logits).all(axis=-1), chosen, -1)
    is_draft = place[:, 1:] < new_tokens(batch)[:, None]
    right = is_draft & (tokens[index[:, 1:]] == chosen[:, :-1])
    reached = jnp.cumprod(right.astype(jnp.int32), axis=1) > 0
    chosen = chosen.at[:, 1:].set(jnp.where(reached, chosen[:, 1:], -1))
    return chosen, cache.accept(jnp.sum(chosen >= 0, axis=1, dtype=jnp.int32), batch)


class Batch(NamedTuple):
    """The sequences of a step, on the host."""

    tokens: list[int]  # of all sequences, packed; `last_of(slot)` for what the slot chose last
    counts: list[int]  # new tokens of each sequence
    lengths: list[int]  # including new ones
    slots: list[int]
    pages: Sequence[tuple[int, int, int]]  # new entries of the table: slot, column and page
    restores: Sequence[tuple[int, int]] = ()  # states copied before the step: from slot, to slot
    saves: Sequence[tuple[int, int]] = ()  # and behind it


def last_of(slot: int) -> int:
    """A negative number that stands for the last token of the slot, which only the device may know."""
    return -1 - slot


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a program, to which batches are padded.

    - `tokens`, `sequences`, `query_len`: as in `ejx.Buckets`.
    - `pages`: the number of new entries of the page table.
    - `slots`: the number of slots of the engine. Sequences and entries of padding have this number as their slot.
    - `copies`: the number of states that are copied before the step, and again after it.
    - `drafts`: the maximum number of drafts of a sequence.
    """

    tokens: int
    sequences: int
    query_len: int
    pages: int
    slots: int
    copies: int = 0
    drafts: int = 0

    @functools.cached_property
    def ends(self) -> list[int]:
        """The end of each part of the array. The parts are tokens; counts, lengths, slots and sampling of sequences; entries of the table; copies."""
        sizes = [self.tokens, *[self.sequences] * 8, *[self.pages] * 3, *[self.copies] * 4]
        return np.cumsum(sizes).tolist()

    def holds(self, counts: Sequence[int], pages: int = 0, copies: int = 0) -> bool:
        """Returns whether sequences with these numbers of new tokens fit, with this many new entries of the table and copies of states."""
        few = pages <= self.pages and copies <= self.copies and len(counts) <= self.sequences
        return few and sum(counts) <= self.tokens and max(counts) <= self.query_len

    def pack(self, batch: Batch, sampling: SamplingArrays) -> np.ndarray:
        """Packs a batch into one int32 array. `sampling` has a row for each slot."""
        data = np.zeros(self.ends[-1], np.int32)
        parts = np.split(data, self.ends[:-1])
        tokens, counts, lengths, slots, *rows = parts[:9]
        count = len(batch.counts)
        tokens[: len(batch.tokens)] = batch.tokens
        counts[:count], lengths[:count] = batch.counts, batch.lengths
        slots[:count], slots[count:] = batch.slots, self.slots
        for row, column in zip(rows, sampling):
            row[:count] = column[slots[:count]].view(np.int32)
        parts[9][:] = self.slots
        for part in parts[12:]:
            part[:] = -1
        for first, entries in ((9, batch.pages), (12, batch.restores), (14, batch.saves)):
            for part, column in zip(parts[first:], zip(*entries)):
                part[: len(column)] = column
        return data

    def unpack(
        self, data: Array
    ) -> tuple[Array, Array, Array, Array, SamplingArrays, list[Array], list[Array]]:
        """The inverse of `pack`, on the device: tokens, counts, lengths, slots, sampling, entries of the table and copies."""
        tokens, counts, lengths, slots, *rest = jnp.split(data, self.ends[:-1])
        rows, pages, copies = rest[:5], rest[5:8], rest[8:]
        dtypes = (jnp.float32, jnp.int32, jnp.float32, jnp.float32, jnp.uint32)
        columns = (jax.lax.bitcast_convert_type(row, dtype) for row, dtype in zip(rows, dtypes))
        return tokens, counts, lengths, slots, SamplingArrays(*columns, position=lengths), pages, copies


class State(NamedTuple):
    """The arrays that the device keeps between steps. They are donated to each step."""

    caches: ServingCache
    table: Array  # int32 [slots, pages of the longest sequence]
    last: Array  # int32 [slots]: the token that each chose last


def new_state(caches: ServingCache, slots: int, pages: int) -> State:
    return State(caches, jnp.full((slots, pages), -1, jnp.int32), jnp.zeros(slots, jnp.int32))


Leaves = tuple[Any, ...]
Program = jax.stages.Wrapped  # (weights, state, data) -> (chosen, state)


def make_program(
    model: Decoder, sizes: Sizes, page_size: int, drawn: bool, structure: Any, traced: Callable[[], None]
) -> Program:
    """Returns the compiled step `(weights, state, data) -> (chosen, state)`.

    `weights` are the arrays of the model, and `state` those of a `State` with this structure. Both are flat tuples: flattening the tree of a model
    would take most of the host's time. `chosen` is int32 `[sequences]`, with -1 for logits that are not finite. With drafts, it is the result of
    `verify`, and `last` does not change, since the next step waits for these tokens.

    - `drawn`: whether tokens may be drawn. If not, all sequences take the most likely token.
    - `traced`: a function that is called when the program is traced.
    """
    arrays, rest = eqx.partition(model, eqx.is_array)
    model_structure = jax.tree.structure(arrays)

    def step(weights: Leaves, leaves: Leaves, data: Array) -> tuple[Array, Leaves]:
        traced()
        model = eqx.combine(jax.tree.unflatten(model_structure, weights), rest)
        state: State = jax.tree.unflatten(structure, leaves)
        tokens, counts, lengths, slots, sampling, (rows, columns, pages), copies = sizes.unpack(data)
        caches = state.caches.copy_states(*copies[:2]) if sizes.copies else state.caches
        table = state.table.at[rows, columns].set(pages, mode="drop", wrap_negative_indices=False)
        # A sequence whose logits were not finite has ended with the token -1. The next step may have started before the host knew.
        tokens = jnp.where(tokens < 0, jnp.maximum(state.last[-1 - tokens], 0), tokens)
        batch = RaggedBatch(
            jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts)]),
            lengths,
            table.at[slots].get(mode="fill", fill_value=-1, wrap_negative_indices=False),
            jnp.where(slots < sizes.slots, slots, -1),
            page_size=page_size,
            max_query_len=sizes.query_len,
            num_tokens=sizes.tokens,
        )
        if sizes.drafts:
            kept = sampling if drawn else None
            chosen, caches = verify(model, tokens, caches, batch, sizes.drafts, kept)
            return chosen, tuple(jax.tree.leaves(State(caches, table, state.last)))
        logits, caches = last_logits(model, tokens, caches, batch)
        if sizes.copies:
            caches = caches.copy_states(*copies[2:])
        chosen = draw(logits, sampling) if drawn else greedy(logits)
        chosen = jnp.where(jnp.isfinite(logits).all(axis=-1), chosen, -1)
        state = State(
            caches, table, state.last.at[slots].set(chosen, mode="drop", wrap_negative_indices=False)
        )
        return chosen, tuple(jax.tree.leaves(state))

    return jax.jit(step, donate_argnums=1)
