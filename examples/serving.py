"""Continuous batching: prompts of unequal lengths join and leave a batch that never stops decoding.

    engine = Engine(model, num_pages=512, max_batch=8)
    engine.submit(b"def ", max_new_tokens=50)
    engine.submit(b"import ", max_new_tokens=20, sampling=Sampling(temperature=0.7, top_p=0.9, seed=1))
    for event in engine.run():
        ...

Each step is one call of the model on a `RaggedBatch`: one token of every sequence that decodes, and pieces of the prompts that came
after. `examples/serve_lm.py` is the command line over it.
"""

import collections
import dataclasses
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import ejkernel_eqx as ejx


class RequestError(ValueError):
    """A request that cannot be served; the message says why and what to do. Nothing else is touched by it."""


def _integer(
    name: str,
    value: Any,
    least: int,
    most: int | None = None,
    remedy: str = "",
    error: type[ValueError] = RequestError,
) -> int:
    """`value` as an int, if it is an integer within these, of whatever library; `error` otherwise."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        expected = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise error(f"{name}: expected an integer {expected}, received {value!r}{remedy}.")
    return number


def _is_number(value: Any, least: float, most: float) -> bool:
    known = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return known and bool(least <= value <= most)


# Sampling


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are chosen. The same request with the same seed gives the same tokens whatever runs beside it."""

    temperature: float = 0.0
    """0 takes the likeliest token, whatever the others say."""
    top_k: int = 0
    """Only the so many likeliest; 0 for all."""
    top_p: float = 1.0
    """Of these, the smallest set of the likeliest whose probability reaches this."""
    seed: int = 0

    def __post_init__(self):
        if not _is_number(self.temperature, 0, float(np.finfo(np.float32).max)):
            raise RequestError(
                f"temperature: expected a number from 0 to 3.4e38, received {self.temperature!r}; 0 takes the likeliest."
            )
        _integer("top_k", self.top_k, 0, remedy="; 0 stands for all")
        if not _is_number(self.top_p, 0, 1) or self.top_p == 0:
            raise RequestError(
                f"top_p: expected a number above 0 and up to 1, received {self.top_p!r}; 1 stands for all."
            )
        _integer("seed", self.seed, 0, 2**32 - 1)


class SamplingArrays(NamedTuple):
    """`Sampling`, and the position of the token that is chosen, for each row of a batch."""

    temperature: Any  # float32 [N]
    top_k: Any  # int32 [N]
    top_p: Any  # float32 [N]
    seed: Any  # uint32 [N]
    position: Any  # int32 [N]

    @classmethod
    def of(cls, rows: Sequence[tuple[Sampling, int]], size: int) -> "SamplingArrays":
        """`rows` and, up to `size`, more that are greedy."""
        rows = [*rows, *[(Sampling(), 0)] * (size - len(rows))]
        kinds = {"temperature": np.float32, "top_p": np.float32, "seed": np.uint32}
        columns = {name: np.array([getattr(s, name) for s, _ in rows], kind) for name, kind in kinds.items()}
        # No vocabulary is larger than this: it stands for all.
        top_k = np.array([min(s.top_k, 2**31 - 1) for s, _ in rows], np.int32)
        return cls(**columns, top_k=top_k, position=np.array([position for _, position in rows], np.int32))


def sample(logits: Array, sampling: SamplingArrays) -> Array:
    """A token for each row of the float32 `logits [N, V]`, int32 `[N]`. A row's choice depends on nothing but the row."""
    return jax.vmap(_sample_row)(logits, sampling)


def _sample_row(logits: Array, sampling: SamplingArrays) -> Array:
    order, ranked, kept = candidates(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    key = jax.random.fold_in(jax.random.key(sampling.seed), sampling.position)
    drawn = jax.random.categorical(key, jnp.where(kept, ranked, -jnp.inf))
    return order[jnp.where(sampling.temperature > 0, drawn, 0)].astype(jnp.int32)


def candidates(logits: Array, temperature: Array, top_k: Array, top_p: Array) -> tuple[Array, Array, Array]:
    """The tokens from the likeliest on, their logits over the temperature, and whether each may be drawn; `[V]` each."""
    order = jnp.argsort(-logits)  # stable: the first of equals comes first, as with argmax
    ranked = logits[order]
    ranked = (ranked - ranked[0]) / jnp.maximum(temperature, 1e-6)
    rank = jnp.arange(logits.shape[0], dtype=jnp.int32)
    kept = (top_k <= 0) | (rank < top_k)
    mass = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf))
    before = jnp.cumsum(mass) - mass
    # What is in front has not reached top_p yet. Sums are rounded, so that 1 needs words of its own.
    return order, ranked, kept & ((before < top_p) | (rank == 0) | (top_p >= 1))


# The model over pages and slots


def last_logits(
    model: Any, tokens: Array, state: ejx.nn.CacheState, batch: ejx.RaggedBatch
) -> tuple[Array, ejx.nn.CacheState]:
    """The model of `train_lm.py` on packed `tokens [T]`: float32 logits `[N, vocabulary]` after each sequence's last new token.

    The caches are carried through the scan and written in place; as part of what is scanned over they would be copied.
    """
    arrays, static = eqx.partition(model.layers, eqx.is_array)

    def period(carry, index_and_layers):
        x, state = carry
        index, arrays = index_and_layers
        caches, numbered = state.of_layer(index, batch)
        new = []
        for layer, cache in zip(eqx.combine(arrays, static), caches):
            x, cache = layer(x, cache, numbered)
            new.append(cache)
        return (x, state.with_layers(new)), None

    indices = jnp.arange(model.num_periods, dtype=jnp.int32)
    (x, state), _ = jax.lax.scan(period, (model.embedding[tokens], state), (indices, arrays))
    last = x[jnp.maximum(batch.last_tokens, 0)]
    return jax.vmap(model.head)(jax.vmap(model.norm)(last)).astype(jnp.float32), state


# The engine


class Event(NamedTuple):
    """A token of a request, the last one if `finish` says why: "length" or "stop"; or "error", without a token, where the model's
    logits are not finite."""

    request: int
    token: int  # -1 for none
    finish: str | None = None


@dataclasses.dataclass(eq=False)
class _Request:
    number: int
    tokens: list[int]  # the prompt and what was written after it
    last_length: int
    sampling: Sampling
    stop: int | None
    computed: int = 0  # how many of its tokens the model has seen
    slot: int = -1

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed


class Engine:
    """Serves requests on one model and one pool of pages.

    Every `step` takes first a token of each sequence that decodes, then pieces of prompts in the order of their arrival, `step_tokens` in all.
    A request is admitted when there are pages for all the tokens it has. Where decoding runs out of them, the youngest request goes back
    to the front of the queue; its tokens are kept and computed again later, which changes nothing in what it writes. Pages and slots of a
    request that ends are free at once.

    Batches are padded to a few sizes, `buckets`, each of which is compiled once, when it is first met; `compiled` counts them.

    A step that raises leaves the engine as it was before: the next one tries the same again. If the caches were lost with it, which are
    donated, there are new ones, and all that was in the batch is computed again.

    **Arguments:**

    - `model`: a `Decoder` of `train_lm.py`, in the dtype to compute in.
    - `num_pages`, `page_size`: pages of each attention layer and tokens a page.
    - `max_batch`: sequences at once; recurrent layers have as many slots for their states.
    - `step_tokens`: the most tokens of a step; at least `max_batch`.
    - `max_length`: the most tokens of a request, prompt included; by default, and at most, what all pages hold. With sliding windows
        alone it may be more, up to 2**20 pages.
    - `kv_dtype`: of the pages, by default that of the model; int8, float8_e4m3fn and float8_e5m2 are quantised by token and head.

    **Raises:** `ValueError` for sizes that are no integers or below 1, or `step_tokens` below `max_batch`.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_pages: int = 512,
        page_size: int = 16,
        max_batch: int = 8,
        step_tokens: int = 128,
        max_length: int | None = None,
        kv_dtype: Any = None,
    ):
        count = functools.partial(_integer, least=1, most=2**30, error=ValueError)
        num_pages, page_size = count("num_pages", num_pages), count("page_size", page_size)
        max_batch, step_tokens = count("max_batch", max_batch), count("step_tokens", step_tokens)
        if step_tokens < max_batch:
            raise ValueError(
                f"step_tokens: expected at least max_batch={max_batch}, received {step_tokens}; every sequence decodes in every step."
            )
        self.model, self.max_batch, self.step_tokens = model, max_batch, step_tokens
        mixers = [layer.mixer for layer in model.layers]
        attention = [mixer for mixer in mixers if isinstance(mixer, ejx.nn.MultiHeadAttention)]
        self.table = ejx.PageTable(num_pages, page_size) if attention else None
        self.window = _window(attention)
        self._new_state = functools.partial(
            ejx.nn.CacheState.init,
            mixers,
            num_pages=num_pages,
            page_size=page_size,
            num_slots=max_batch,
            batch_shape=(model.num_periods,),
            dtype=kv_dtype,
        )
        self.state = self._new_state()
        self.num_pages = num_pages if attention else 0
        # Without attention nothing has pages; one page of any length, which is nowhere, says so.
        self.page_size = page_size if attention else 2**30
        held = self.num_pages * self.page_size if attention else 2**30
        # A row of the page table has all pages that there ever were, also those behind a window.
        room = held if self.window is None else max(held, min(2**20 * self.page_size, 2**30))
        self.max_length = (
            held if max_length is None else min(room, _integer("max_length", max_length, 1, error=ValueError))
        )
        self.buckets = _buckets(max_batch, step_tokens, -(-self.max_length // self.page_size))
        self.compiled: collections.Counter[tuple[int, int, int, int]] = collections.Counter()
        self.steps = self.preemptions = self.tokens_written = self.peak_pages = 0
        self._events: collections.deque[Event] = collections.deque()  # that nobody has taken yet
        self._waiting: collections.deque[_Request] = collections.deque()
        self._running: list[_Request] = []  # in the order of their admission
        self._slots = list(range(max_batch))[::-1]
        self._count = 0

        def step(inputs, state):
            model, tokens, batch, sampling = inputs
            # Only tracing comes here.
            self.compiled[(batch.num_tokens, *batch.page_table.shape, batch.max_query_len)] += 1
            logits, state = last_logits(model, tokens, state, batch)
            return jnp.where(jnp.isfinite(logits).all(axis=-1), sample(logits, sampling), -1), state

        self._compute = eqx.filter_jit(step, donate="all-except-first")

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def pages_used(self) -> int:
        return 0 if self.table is None else self.table.num_used

    def submit(
        self,
        prompt: Sequence[int] | bytes,
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        stop: int | None = None,
    ) -> int:
        """Puts a request into the queue. It ends after `max_new_tokens`, or with the token `stop`.

        **Returns:** the request's number, by which events name it.

        **Raises:** `RequestError` for a request that can never be served: empty, too long, or with tokens that the model does not have.
        """
        if isinstance(prompt, str) or not hasattr(prompt, "__iter__"):
            raise RequestError(
                f"prompt: expected bytes or the numbers of tokens, received {type(prompt).__name__}; encode it for this model."
            )
        last, remedy = self.model.embedding.shape[0] - 1, "; encode it for this model"
        tokens = [_integer(f"prompt[{i}]", token, 0, last, remedy) for i, token in enumerate(prompt)]
        if not tokens:
            raise RequestError("prompt: expected at least one token, received none; give it some text.")
        max_new_tokens = _integer("max_new_tokens", max_new_tokens, 1)
        stop = None if stop is None else _integer("stop", stop, 0, last, "; None for no such token")
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            raise RequestError(f"sampling: expected a Sampling, received {type(sampling).__name__}.")
        length = len(tokens) + max_new_tokens
        if length > self.max_length:
            raise RequestError(
                f"prompt: expected at most {self.max_length} tokens with those to be written, received {len(tokens)} + {max_new_tokens}; "
                "shorten it, ask for fewer, or serve with more pages or a larger max_length."
            )
        if self._most_pages(length) > self.num_pages:
            raise RequestError(
                f"prompt: expected to need at most the {self.num_pages} pages there are, received {len(tokens)} tokens and {max_new_tokens} to be "
                f"written, which need {self._most_pages(length)}; shorten it, ask for fewer, or serve with more pages."
            )
        self._count += 1
        request = _Request(self._count - 1, tokens, length, sampling, stop)
        self._waiting.append(request)
        return request.number

    def cancel(self, number: int) -> bool:
        """Ends a request now, its pages free at once; no event of it comes after this. False if the last one had come already."""
        known = len(self._events)
        self._events = collections.deque(event for event in self._events if event.request != number)
        for request in (*self._running, *self._waiting):
            if request.number == number:
                self._release(request)
                return True
        if not 0 <= number < self._count:
            raise ValueError(f"number: expected that of a request, received {number}; submit gives it.")
        return len(self._events) < known

    def run(self) -> Iterator[Event]:
        """Steps until nothing is left to do. Events that were not taken, as after a `break`, come first the next time."""
        while self._events or self._running or self._waiting:
            if self._events:
                yield self._events.popleft()
            else:
                self._step()

    def step(self) -> list[Event]:
        """One call of the model, and the tokens that came of it."""
        self._step()
        events = list(self._events)
        self._events.clear()
        return events

    def _step(self) -> None:
        try:
            plan = self._schedule()
            chosen = self._call(plan) if plan else np.zeros(0)
        except BaseException:  # Ctrl-C as well
            self._undo()
            raise
        if not plan:
            return
        self.steps += 1
        self.peak_pages = max(self.peak_pages, self.pages_used)
        for (request, count), token in zip(plan.items(), chosen):
            request.computed += count
            if self.table is not None and self.window is not None:
                self.table.free_behind(request.number, max(0, request.computed - self.window + 1))
            if request.remaining == 0:  # and not in the midst of its prompt
                finish = self._write(request, int(token))
                self._events.append(Event(request.number, int(token), finish))
                if finish is not None:
                    self._release(request)

    def _write(self, request: _Request, token: int) -> str | None:
        """Gives the request its next token, and why it ends with it."""
        if token < 0:
            return "error"
        request.tokens.append(token)
        self.tokens_written += 1
        if request.tokens[-1] == request.stop:
            return "stop"
        return "length" if len(request.tokens) == request.last_length else None

    def _call(self, plan: dict[_Request, int]) -> np.ndarray:
        """The token after each request's part of the batch."""
        requests, counts = list(plan), list(plan.values())
        if self.table is None:
            rows = np.full((len(requests), 1), -1)
        else:
            rows = self.table.rows([request.number for request in requests])
        batch = ejx.RaggedBatch.build(
            counts,
            [request.computed + count for request, count in plan.items()],
            rows,
            page_size=self.page_size,
            buckets=self._bucket(counts),
            state_indices=[request.slot for request in requests],
        )
        tokens = np.zeros(batch.num_tokens, np.int32)
        parts = [request.tokens[request.computed :][:count] for request, count in plan.items()]
        tokens[: sum(counts)] = np.concatenate(parts)
        choices = [(request.sampling, request.computed + count) for request, count in plan.items()]
        sampling = SamplingArrays.of(choices, batch.lengths.shape[0])
        chosen, state = self._compute((self.model, tokens, batch, sampling), self.state)
        chosen = np.asarray(chosen)  # waits for it, and raises if it failed
        self.state = state
        return chosen

    def _undo(self) -> None:
        """After a step that raised: as it was before, or all from the start where the caches are gone."""
        lost = any(array.is_deleted() for array in jax.tree.leaves(self.state))
        for request in self._running[::-1]:
            if lost or request.computed == 0:  # which was admitted in this step
                self._put_back(request)
            elif self.table is not None:
                self.table.truncate(request.number, request.computed)
        if lost:
            self.state = self._new_state()

    def _bucket(self, counts: list[int]) -> ejx.Buckets:
        fitting = [b for b in self.buckets if max(counts) <= b.query_len[0] and sum(counts) <= b.tokens[0]]
        return next(b for b in fitting if len(counts) <= b.sequences[0])

    def _schedule(self) -> dict[_Request, int]:
        """How many tokens of which requests the next step takes. Their pages are allocated."""
        plan: dict[_Request, int] = {}
        before = self.preemptions
        for request in sorted(self._running, key=lambda request: request.remaining > 1):
            count = min(request.remaining, self.step_tokens - sum(plan.values()))
            if request.slot >= 0 and count and self._allocate(request, count, plan):
                plan[request] = count
        while self._waiting and self.preemptions == before and self._fits(self._waiting[0]):
            count = min(self._waiting[0].remaining, self.step_tokens - sum(plan.values()))
            if not count or not self._slots:
                break
            request = self._waiting[0]
            if self.table is not None:
                self.table.allocate(request.number, count)
            request.slot = self._slots.pop()
            self._running.append(self._waiting.popleft())
            plan[request] = count
        return plan

    def _allocate(self, request: _Request, count: int, plan: dict[_Request, int]) -> bool:
        """Pages for more tokens, from the youngest requests if need be; False if it was the youngest itself."""
        while self.table is not None:
            try:
                self.table.allocate(request.number, count)
                break
            except ejx.OutOfPagesError:
                youngest = self._running[-1]
                plan.pop(youngest, None)
                self._put_back(youngest)
                self.preemptions += 1
                if youngest is request:
                    return False
        return True

    def _fits(self, request: _Request) -> bool:
        """Whether there are pages for all its tokens, beside those that the others' prompts still need and one more for each of them."""
        if self.table is None:
            return True
        wanted = self._most_pages(len(request.tokens))
        for other in self._running:
            held = int((self.table.row(other.number) >= 0).sum())
            wanted += max(1, self._most_pages(len(other.tokens)) - held)
        return wanted <= self.table.num_free

    def _most_pages(self, length: int) -> int:
        """The most pages that a sequence of so many tokens has at a time."""
        if self.table is None:
            return 0
        pages = -(-length // self.page_size)
        if self.window is None:
            return pages
        return min(pages, -(-(self.window - 1 + self.step_tokens) // self.page_size) + 1)

    def _put_back(self, request: _Request) -> None:
        """From the batch to the front of the queue, to be computed again."""
        self._release(request)
        self._waiting.appendleft(request)
        request.computed = 0

    def _release(self, request: _Request) -> None:
        """Takes the request out of queue and batch, and back what it has."""
        if request.slot < 0:
            self._waiting.remove(request)
            return
        self._running.remove(request)
        self._slots.append(request.slot)
        request.slot = -1
        if self.table is not None:
            self.table.free(request.number)


def _window(attention: list[Any]) -> int | None:
    """The keys that the next query of a sequence may see, its own included; `None` if a layer sees all."""
    lefts = [None if mixer.attention.window is None else mixer.attention.window[0] for mixer in attention]
    known = [left for left in lefts if left is not None]
    return max(known) + 1 if known and len(known) == len(lefts) else None


def _buckets(max_batch: int, step_tokens: int, max_pages: int) -> list[ejx.Buckets]:
    """The sizes of batches, smallest first: two for batches that only decode, two for those with pieces of prompts."""

    def sizes(tokens: int, sequences: int, query_len: int) -> ejx.Buckets:
        return ejx.Buckets((tokens,), (sequences,), (max_pages,), (query_len,))

    quarter = lambda size: sorted({-(-size // 4), size})
    decoding = [sizes(n, n, 1) for n in quarter(max_batch)]
    return decoding + [sizes(n, max_batch, n) for n in quarter(step_tokens)]
