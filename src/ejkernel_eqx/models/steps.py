"""Decode steps: reading the prompts, a step of one token, and how a step adds tokens to each row."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from .._take import take_along
from .caches import after_prompts, before_prompts
from .decoder import Decoder
from .rows_as_pages import meshes_of, MOST_TOKENS
from .sampling import draw, greedy, SamplingArrays


class Prompts(NamedTuple):
    """The prompts of a call, padded."""

    tokens: Array  # int32 [N, T]
    mask: Array  # bool [N, T], True for real tokens, side by side in each row


class Rules(NamedTuple):
    """How tokens are chosen, and when a row ends."""

    sampling: SamplingArrays
    stop: Array  # int32 [...], -1 for none
    most: Array  # int32 []: the maximum number of new tokens
    draws: bool = (
        True  # whether any row may draw; static. If not, no sorting of the vocabulary is in the program
    )


class State(NamedTuple):
    """The arrays that the device keeps between steps."""

    cache: Any
    """The tokens before `last`."""
    last: Array  # int32 [N]: the last token of each row
    written: Array  # int32 [N, S]: the new tokens of each row, padded with -1
    count: Array  # int32 [N]: the number of new tokens
    done: Array  # bool [N]: the row has ended
    finite: Array  # bool [N]: all logits of the row were finite

    @classmethod
    def empty(cls, cache: Any, rows: int, room: int) -> "State":
        none = jnp.zeros(rows, jnp.int32)
        written = jnp.full((rows, room), -1, jnp.int32)
        return cls(cache, none, written, none, jnp.zeros(rows, bool), jnp.ones(rows, bool))


def take(state: State, logits: Array, drafts: Array, rules: Rules) -> tuple[State, Array]:
    """Adds new tokens to each row: the drafts up to the first one that the model does not choose, and one token more.

    **Arguments:**

    - `logits`: float32 `[N, 1 + D, V]`, after the last token and after each draft.
    - `drafts`: int32 `[N, D]`, proposed for the next places.

    **Returns:** the state, and the new tokens, int32 `[N, 1 + D]`, padded with -1.
    """
    rows, width, vocabulary = logits.shape
    place = jnp.arange(width, dtype=jnp.int32)[None]
    position = state.count[:, None] + place
    each = SamplingArrays(*(jnp.repeat(jnp.asarray(x), width) for x in rules.sampling))
    flat = logits.reshape(-1, vocabulary)
    token = draw(flat, each._replace(position=position.reshape(-1))) if rules.draws else greedy(flat)
    token = token.reshape(rows, width)
    broken = ~jnp.all(jnp.isfinite(logits), axis=-1)
    ends = broken | jnp.any(token[..., None] == rules.stop[None, None], axis=-1)
    # The logits after a draft count only if all drafts up to it are right, and no token before it ends the row.
    reached = ~state.done[:, None]
    if width > 1:
        goes_on = jnp.concatenate([reached, (drafts == token[:, :-1]) & ~ends[:, :-1]], axis=1)
        reached = (jnp.cumprod(goes_on.astype(jnp.int32), axis=1) > 0) & (position < rules.most)
    new = reached & ~broken
    added = jnp.sum(new, axis=1, dtype=jnp.int32)
    count = state.count + added
    row = jnp.arange(rows)[:, None]
    written = state.written.at[row, jnp.where(new, position, state.written.shape[1])].set(token, mode="drop")
    newest = jnp.sum(jnp.where(place == added[:, None] - 1, token, 0), axis=1, dtype=jnp.int32)
    last = jnp.where(added > 0, newest, state.last)
    finite = state.finite & ~jnp.any(reached & broken, axis=1)
    done = state.done | jnp.any(reached & ends, axis=1) | (count >= rules.most)
    return State(state.cache, last, written, count, done, finite), jnp.where(new, token, -1)


def begin(
    model: Decoder, rules: Rules, prompts: Prompts, capacity: int, dtype: DTypeLike | None
) -> tuple[State, Array]:
    """Reads the prompts in one pass and takes the first token of each row."""
    tokens, mask = prompts
    rows, width = tokens.shape
    cache = model.init_cache(rows, capacity, dtype)
    # Without padding before them, real tokens see real ones alone, at the same places in each row.
    count, at = jnp.sum(mask, axis=-1, dtype=jnp.int32), jnp.arange(width, dtype=jnp.int32)[None]
    first = jnp.argmax(mask, axis=-1).astype(jnp.int32)[:, None]
    tokens, mask = (
        take_along(tokens, jnp.minimum(at + first, width - 1), axis=1),
        at < count[:, None],
    )
    if width > MOST_TOKENS and not meshes_of((model, prompts)):
        cache = before_prompts(model, cache)
    x, cache = model.features(jnp.where(mask, tokens, 0), cache, padding_mask=mask)
    cache = after_prompts(cache, count)
    x = take_along(x, count[:, None, None] - 1, axis=1)[:, 0]
    return _take_one(model, rules, State.empty(cache, rows, capacity), x)


def step(model: Decoder, rules: Rules, state: State) -> tuple[State, Array]:
    """Generates one token of each row. Rows that have ended do not change."""
    x, cache = model.features(state.last[:, None], state.cache, padding_mask=~state.done[:, None])
    return _take_one(model, rules, state._replace(cache=cache), x[:, 0])


def _take_one(model: Decoder, rules: Rules, state: State, x: Array) -> tuple[State, Array]:
    logits = model.logits(x)[:, None]
    return take(state, logits, jnp.zeros((logits.shape[0], 0), jnp.int32), rules)
