"""Speculative decoding: several tokens are proposed, and one call of the model verifies them."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from .._signatures import Module
from .._take import take_along
from ..nn import CacheState
from ..nn.arguments import read_sizes
from ..paged import RaggedBatch
from .caches import ServingCache
from .decoder import Decoder
from .sampling import draw, greedy
from .steps import Prompts, Rules, State, take

_PAGE_SIZE = 64


class Speculation(Module):
    """Speculative decoding (Leviathan et al. 2023, arXiv:2211.17192): several tokens in one step of the model.

    A step proposes `num_draft_tokens` tokens of each row, the drafts. One call of the model verifies them all. The row gets the drafts up to the
    first one that the model itself would not have chosen, and one token more. Reading the weights takes most of the time of a decode step, so this
    call takes little longer than one for a single token. [`generate`][ejkernel_eqx.models.generate] takes a `Speculation`. So does
    [`Engine`][ejkernel_eqx.serving.Engine], without a draft model.

    Every token is the one that the model chooses at its position, with the same seed. So texts are the same as without speculation, drawn ones
    included, up to the rounding of logits. A draft is drawn with the random numbers of its position, which makes it agree with the model's choice
    more often (Daliri et al. 2024, arXiv:2408.07978). If the weights hold NaN, a wrong draft may read them and end a row.

    **Arguments:**

    - `draft`: a smaller [`Decoder`][ejkernel_eqx.models.Decoder] with the vocabulary of the model. With `None`, drafts are looked up in the row
        itself, prompt included: the last tokens of the text are searched in the text before, and the drafts are the tokens that followed there
        (prompt lookup, Saxena 2023). This takes next to no time. It helps if texts repeat their prompts, as in summaries and changes of code.
    - `num_draft_tokens`: the number of drafts in a step.
    - `max_ngram`: without a draft model, the maximum number of last tokens that are searched.

    **Raises:** `ValueError` for a draft that is no `Decoder`, or sizes below 1.
    """

    draft: Decoder | None
    num_draft_tokens: int = eqx.field(static=True)
    max_ngram: int = eqx.field(static=True)

    def __init__(self, draft: Decoder | None = None, *, num_draft_tokens: int = 4, max_ngram: int = 3):
        if not isinstance(draft, Decoder | None):
            raise ValueError(
                f"draft: expected an ejx.models.Decoder or None, received {type(draft).__name__}; None looks drafts up in the text."
            )
        sizes = read_sizes(num_draft_tokens=num_draft_tokens, max_ngram=max_ngram)
        self.draft, (self.num_draft_tokens, self.max_ngram) = draft, sizes


def check_speculation(speculate: Any, vocabulary: int) -> None:
    if not isinstance(speculate, Speculation | None):
        raise ValueError(
            f"speculate: expected a Speculation, received {type(speculate).__name__}; Speculation() looks drafts up in the text."
        )
    if speculate is None or speculate.draft is None:
        return
    if (size := speculate.draft.config.vocab_size) != vocabulary:
        raise ValueError(
            f"speculate: expected a draft model with the vocabulary of the model, {vocabulary} tokens, received one with {size}; both need the "
            "same tokenizer."
        )


class _Known(NamedTuple):
    """The texts and caches that the device keeps between steps."""

    cache: ServingCache
    """What was before the last token."""
    draft: ServingCache | None
    """What was before the last `fresh` tokens."""
    text: Array  # int32 [N, S]: each row's prompt and new tokens
    length: Array  # int32 [N]: how many there are
    fresh: Array  # int32 [N]: how many of them the draft model has not read


def begin(
    model: Decoder,
    rules: Rules,
    speculation: Speculation,
    prompts: Prompts,
    capacity: int,
    dtype: DTypeLike | None,
) -> tuple[State, Array]:
    """Reads the prompts in one pass of each model and takes the first token of each row."""
    tokens, mask = prompts
    rows, width = tokens.shape
    pages = rows * (capacity // _PAGE_SIZE)
    sizes = {"num_pages": pages, "page_size": _PAGE_SIZE, "num_slots": rows, "dtype": dtype}
    length = jnp.sum(mask, axis=1, dtype=jnp.int32)
    place = jnp.arange(width, dtype=jnp.int32)[None]
    # The real tokens of a row are side by side. Padding may be on both sides.
    tokens = take_along(tokens, (jnp.argmax(mask, axis=1)[:, None] + place) % width, axis=1)
    tokens = jnp.where(place < length[:, None], tokens, 0)
    none = jnp.zeros(rows, jnp.int32)
    cache = model.init_serving_cache(**sizes, num_draft_tokens=speculation.num_draft_tokens + 1)
    x, places, cache, _ = _read(model, cache, tokens, length, none, capacity)
    logits = model.logits(x[places[jnp.arange(rows), length - 1]])[:, None]
    draft = None
    if speculation.draft is not None:
        draft = speculation.draft.init_serving_cache(**sizes)
        _, _, draft, _ = _read(speculation.draft, draft, tokens, length, none, capacity)
    text = jnp.pad(tokens, ((0, 0), (0, capacity - width)))
    state = State.empty(_Known(cache, draft, text, length, none), rows, capacity)
    state, new = take(state, logits, jnp.zeros((rows, 0), jnp.int32), rules)
    return _written(state, new), new


def step(model: Decoder, rules: Rules, speculation: Speculation, state: State) -> tuple[State, Array]:
    """Takes one to `1 + num_draft_tokens` more tokens of each row. Rows that have ended stand still."""
    known: _Known = state.cache
    if speculation.draft is None:
        drafts = looked_up(known.text, known.length, speculation.num_draft_tokens, speculation.max_ngram)
    else:
        drafts, known = _drafted(speculation.draft, rules, speculation.num_draft_tokens, state)
    tokens = jnp.concatenate([state.last[:, None], drafts], axis=1)
    counts = jnp.where(state.done, 0, tokens.shape[1])
    x, places, cache, batch = _read(model, known.cache, tokens, counts, known.length - 1, known.text.shape[1])
    state, new = take(state, model.logits(x[places]), drafts, rules)
    cache = cache.accept(jnp.sum(new >= 0, axis=1, dtype=jnp.int32), batch)
    return _written(state._replace(cache=known._replace(cache=cache)), new), new


def looked_up(text: Array, length: Array, count: int, most: int) -> Array:
    """Drafts `[N, count]`, looked up in texts of at least two tokens. The search is for an earlier place with the same tokens as the end of the text,
    as many as possible up to `most`. The last such place counts. If fewer than `count` tokens follow it, they are repeated."""
    rows, room = text.shape
    place = jnp.arange(room, dtype=jnp.int32)[None]
    same, matches = jnp.ones((rows, room), bool), jnp.zeros((rows, room), jnp.int32)
    for back in range(min(most, room)):
        end = take_along(text, jnp.maximum(length[:, None] - 1 - back, 0), axis=1)
        same &= (jnp.roll(text, back, axis=1) == end) & (place >= back)
        matches += same.astype(jnp.int32)
    # Longer matches are better. Of equally long ones, the last is taken.
    score = jnp.where(place < length[:, None] - 1, matches * room + place, -1)
    best = jnp.argmax(score, axis=1).astype(jnp.int32)[:, None]
    period = jnp.maximum(length[:, None] - 1 - best, 1)
    ahead = jnp.arange(count, dtype=jnp.int32)[None]
    return take_along(text, best + 1 + ahead % period, axis=1)


def _drafted(draft: Decoder, rules: Rules, count: int, state: State) -> tuple[Array, _Known]:
    """Drafts `[N, count]` of a draft model, and the texts with its new cache."""
    known: _Known = state.cache
    assert known.draft is not None
    rows, room = known.text.shape
    goes_on = (~state.done).astype(jnp.int32)

    def choose(x: Array, ahead: Array) -> Array:
        logits, sampling = draft.logits(x), rules.sampling._replace(position=state.count + ahead)
        return draw(logits, sampling) if rules.draws else greedy(logits)

    def one(carry: tuple[Array, ServingCache], ahead: Array) -> tuple[tuple[Array, ServingCache], Array]:
        token, cache = carry
        x, places, cache, _ = _read(draft, cache, token[:, None], goes_on, known.length + ahead, room)
        token = choose(x[places[:, 0]], ahead + 1)
        return (token, cache), token

    before = known.length - known.fresh
    index = before[:, None] + jnp.arange(count + 1, dtype=jnp.int32)[None]
    tokens = take_along(known.text, jnp.minimum(index, room - 1), axis=1)
    x, places, cache, _ = _read(draft, known.draft, tokens, goes_on * known.fresh, before, room)
    first = choose(x[places[jnp.arange(rows), jnp.maximum(known.fresh - 1, 0)]], jnp.int32(0))
    (_, ahead), more = jax.lax.scan(one, (first, cache), jnp.arange(count - 1, dtype=jnp.int32))
    drafts = jnp.concatenate([first[None], more]).T
    return drafts, known._replace(draft=_taken_back(ahead, cache))


def _taken_back(ahead: ServingCache, before: ServingCache) -> ServingCache:
    """The caches without the tokens that were read last. Pages stay, since later tokens overwrite them. States are the earlier ones."""
    keep = lambda new, old: new if hasattr(new, "copy_pages") else old
    stacks = [
        CacheState(tuple(map(keep, new.layers, old.layers)), new.batch_ndim)
        for new, old in zip(ahead.stacks, before.stacks, strict=True)
    ]
    return ServingCache(tuple(stacks))


def _written(state: State, new: Array) -> State:
    """The state after new tokens were added to the texts: int32 `[N, 1 + D]`, padded with -1."""
    known: _Known = state.cache
    rows, width = new.shape
    place = known.length[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    place = jnp.where(new >= 0, place, known.text.shape[1])
    text = known.text.at[jnp.arange(rows)[:, None], place].set(new, mode="drop")
    fresh = jnp.sum(new >= 0, axis=1, dtype=jnp.int32)
    return state._replace(cache=known._replace(text=text, length=known.length + fresh, fresh=fresh))


def _read(
    model: Decoder, cache: ServingCache, tokens: Array, counts: Array, before: Array, room: int
) -> tuple[Array, Array, ServingCache, RaggedBatch]:
    """Runs a model on the first `counts [N]` of the tokens `[N, T]` of each row, after `before [N]` cached tokens. `room` is the capacity of a row.

    **Returns:** the packed features `[N * T, E]`; the index of each token's features, int32 `[N, T]`; the cache; and the batch.
    """
    rows, width = tokens.shape
    total, row = rows * width, jnp.arange(rows, dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    place = jnp.arange(width, dtype=jnp.int32)[None]
    places = starts[:-1, None] + place
    real = place < counts[:, None]
    packed = jnp.zeros(total, jnp.int32).at[jnp.where(real, places, total)].set(tokens, mode="drop")
    pages = room // _PAGE_SIZE
    batch = RaggedBatch(
        starts,
        before + counts,
        row[:, None] * pages + jnp.arange(pages, dtype=jnp.int32)[None],
        row,
        page_size=_PAGE_SIZE,
        max_query_len=width,
        num_tokens=total,
    )
    x, cache = model.features(packed, cache, batch=batch)
    return x, jnp.minimum(places, total - 1), cache, batch
