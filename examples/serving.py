"""Continuous batching: prompts of different lengths join and leave a batch that keeps decoding.

    engine = Engine(model, num_pages=512, max_batch=8)
    engine.submit(b"def ", max_new_tokens=50)
    engine.submit(b"import ", max_new_tokens=20, sampling=Sampling(temperature=0.7, top_p=0.9, seed=1))
    for event in engine.run():
        ...

Each step is one call of the model on a `RaggedBatch`: one token of every decoding sequence, and chunks of newer prompts.
`examples/serve_lm.py` is its command line.
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
from ejkernel_eqx.models import Decoder, Sampling, ServingCache
from ejkernel_eqx.models.sampling import sample, SamplingArrays


class RequestError(ValueError):
    """A request that cannot be served. The message gives the reason and the remedy; other requests are not affected."""


def _integer(
    name: str,
    value: Any,
    least: int,
    most: int | None = None,
    remedy: str = "",
    error: type[ValueError] = RequestError,
) -> int:
    """`value` as an int, if it is an integer of any library in this range; otherwise raises `error`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        expected = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise error(f"{name}: expected an integer {expected}, received {value!r}{remedy}.")
    return number


# The model over pages and slots


def last_logits(
    model: Decoder, tokens: Array, cache: ServingCache, batch: ejx.RaggedBatch
) -> tuple[Array, ServingCache]:
    """Runs the model on packed `tokens [T]`. Returns float32 logits `[N, vocabulary]` after each sequence's last new token."""
    x, cache = model.features(tokens, cache, batch=batch)
    return model.logits(x[jnp.maximum(batch.last_tokens, 0)]), cache


# The engine


class Event(NamedTuple):
    """A generated token. If `finish` is set, it is the last one: "length", "stop", or "error", without a token, if the model's logits are
    not finite."""

    request: int
    token: int  # -1: no token
    finish: str | None = None


@dataclasses.dataclass(eq=False)
class _Request:
    number: int
    tokens: list[int]  # the prompt and the generated tokens
    last_length: int
    sampling: Sampling
    stop: frozenset[int]
    computed: int = 0  # the number of tokens that the model has processed
    slot: int = -1

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed


class Engine:
    """Serves requests with one model and one pool of pages.

    Every `step` processes one token of each decoding sequence, then chunks of prompts in order of arrival, `step_tokens` in total. A
    request is admitted when there are pages for all of its tokens. If pages run out while decoding, the newest request returns to the
    front of the queue. Its tokens are kept and recomputed later, which does not change its output. When a request ends, its pages and
    slots are freed immediately.

    Batches are padded to a few sizes, `buckets`. Each is compiled once, on first use; `compiled` counts the compilations.

    A step that raises leaves the engine in its previous state, so that the next one retries it. If the caches, which are donated, were
    lost with it, they are replaced, and the requests of the batch are recomputed.

    **Arguments:**

    - `model`: an `ejx.models.Decoder`, in the dtype to compute in.
    - `num_pages`, `page_size`: the pages of each attention layer, and tokens per page.
    - `max_batch`: the maximum number of concurrent sequences, and of slots for the states of recurrent layers.
    - `step_tokens`: the maximum number of tokens per step; at least `max_batch`.
    - `max_length`: the maximum number of tokens of a request, including the prompt; by default, and at most, what all pages hold. If all
        layers have sliding windows, it may be larger, up to 2**20 pages.
    - `kv_dtype`: the dtype of the pages, by default that of the model; int8, float8_e4m3fn and float8_e5m2 are quantised by token and head.

    **Raises:** `ValueError` for sizes that are not integers of at least 1, or `step_tokens` below `max_batch`.
    """

    def __init__(
        self,
        model: Decoder,
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
        mixers = [layer.mixer for stack in model.stacks for layer in stack]
        paged = (
            ejx.nn.MultiHeadAttention,
            ejx.nn.MultiHeadLatentAttention,
            ejx.nn.NativeSparseAttention,
        )
        attention = [mixer for mixer in mixers if isinstance(mixer, paged)]
        self.table = ejx.PageTable(num_pages, page_size) if attention else None
        self.window = _window(attention)
        self._new_state = functools.partial(
            model.init_serving_cache,
            num_pages=num_pages,
            page_size=page_size,
            num_slots=max_batch,
            dtype=kv_dtype,
        )
        self.state = self._new_state()
        self.num_pages = num_pages if attention else 0
        # Without attention there are no pages; a single missing page of any length stands for that.
        self.page_size = page_size if attention else 2**30
        held = self.num_pages * self.page_size if attention else 2**30
        # A row of the page table has an entry for every page, including freed ones behind a window.
        room = held if self.window is None else max(held, min(2**20 * self.page_size, 2**30))
        self.max_length = (
            held if max_length is None else min(room, _integer("max_length", max_length, 1, error=ValueError))
        )
        self.buckets = _buckets(max_batch, step_tokens, -(-self.max_length // self.page_size))
        self.compiled: collections.Counter[tuple[int, int, int, int]] = collections.Counter()
        self.steps = self.preemptions = self.tokens_written = self.peak_pages = 0
        self._events: collections.deque[Event] = collections.deque()  # not yet returned to the caller
        self._waiting: collections.deque[_Request] = collections.deque()
        self._running: list[_Request] = []  # in order of admission
        self._slots = list(range(max_batch))[::-1]
        self._count = 0

        def step(inputs, state):
            model, tokens, batch, sampling = inputs
            # Runs only while tracing.
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
        stop: int | Sequence[int] | None = None,
    ) -> int:
        """Queues a request. It ends after `max_new_tokens`, or with the token `stop` or one of several, by default the model's stop tokens.

        **Returns:** the request's number, which its events carry.

        **Raises:** `RequestError` for a request that can never be served: empty, too long, or with tokens outside the vocabulary.
        """
        if isinstance(prompt, str) or not hasattr(prompt, "__iter__"):
            raise RequestError(
                f"prompt: expected bytes or token ids, received {type(prompt).__name__}; encode it for this model."
            )
        last, remedy = self.model.config.vocab_size - 1, "; encode it for this model"
        tokens = [_integer(f"prompt[{i}]", token, 0, last, remedy) for i, token in enumerate(prompt)]
        if not tokens:
            raise RequestError("prompt: expected at least one token, received none; pass some text.")
        max_new_tokens = _integer("max_new_tokens", max_new_tokens, 1)
        stops = (
            self.model.config.stop_tokens if stop is None else stop if isinstance(stop, Sequence) else (stop,)
        )
        ends = frozenset(_integer("stop", token, 0, last, "; pass () for no stop token") for token in stops)
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            raise RequestError(
                f"sampling: expected a Sampling, received {type(sampling).__name__}; pass Sampling(temperature=...)."
            )
        length = len(tokens) + max_new_tokens
        if length > self.max_length:
            raise RequestError(
                f"prompt: expected at most {self.max_length} tokens including new ones, received {len(tokens)} + {max_new_tokens}; "
                "shorten it, request fewer, or serve with more pages or a larger max_length."
            )
        if self._most_pages(length) > self.num_pages:
            raise RequestError(
                f"prompt: expected to need at most {self.num_pages} pages, received {len(tokens)} tokens and {max_new_tokens} new ones, "
                f"which need {self._most_pages(length)}; shorten it, request fewer, or serve with more pages."
            )
        self._count += 1
        request = _Request(self._count - 1, tokens, length, sampling, ends)
        self._waiting.append(request)
        return request.number

    def cancel(self, number: int) -> bool:
        """Ends a request and frees its pages; it has no further events. Returns False if its last event was already returned."""
        known = len(self._events)
        self._events = collections.deque(event for event in self._events if event.request != number)
        for request in (*self._running, *self._waiting):
            if request.number == number:
                self._release(request)
                return True
        if not 0 <= number < self._count:
            raise ValueError(
                f"number: expected the number of a request, received {number}; submit returns it."
            )
        return len(self._events) < known

    def run(self) -> Iterator[Event]:
        """Runs steps until all requests have ended. Events not consumed, for instance after a `break`, come first in the next call."""
        while self._events or self._running or self._waiting:
            if self._events:
                yield self._events.popleft()
            else:
                self._step()

    def step(self) -> list[Event]:
        """Calls the model once and returns the generated tokens."""
        self._step()
        events = list(self._events)
        self._events.clear()
        return events

    def _step(self) -> None:
        try:
            plan = self._schedule()
            chosen = self._call(plan) if plan else np.zeros(0)
        except BaseException:  # including Ctrl-C
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
            if request.remaining == 0:  # not in the middle of its prompt
                finish = self._write(request, int(token))
                self._events.append(Event(request.number, int(token), finish))
                if finish is not None:
                    self._release(request)

    def _write(self, request: _Request, token: int) -> str | None:
        """Appends a token to the request. Returns the reason if the request ends with it."""
        if token < 0:
            return "error"
        request.tokens.append(token)
        self.tokens_written += 1
        if request.tokens[-1] in request.stop:
            return "stop"
        return "length" if len(request.tokens) == request.last_length else None

    def _call(self, plan: dict[_Request, int]) -> np.ndarray:
        """The next token after each request's part of the batch."""
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
        """Restores the state before a step that raised, or restarts all requests if the caches are lost."""
        lost = any(array.is_deleted() for array in jax.tree.leaves(self.state))
        for request in self._running[::-1]:
            if lost or request.computed == 0:  # admitted in this step
                self._put_back(request)
            elif self.table is not None:
                self.table.truncate(request.number, request.computed)
        if lost:
            self.state = self._new_state()

    def _bucket(self, counts: list[int]) -> ejx.Buckets:
        fitting = [b for b in self.buckets if max(counts) <= b.query_len[0] and sum(counts) <= b.tokens[0]]
        return next(b for b in fitting if len(counts) <= b.sequences[0])

    def _schedule(self) -> dict[_Request, int]:
        """The number of tokens of each request in the next step. Allocates their pages."""
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
        """Allocates pages for more tokens, preempting the newest requests if necessary; False if it preempted this one."""
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
        """Whether there are pages for all its tokens, besides those that other prompts still need and one more for each of them."""
        if self.table is None:
            return True
        wanted = self._most_pages(len(request.tokens))
        for other in self._running:
            held = int((self.table.row(other.number) >= 0).sum())
            wanted += max(1, self._most_pages(len(other.tokens)) - held)
        return wanted <= self.table.num_free

    def _most_pages(self, length: int) -> int:
        """The maximum number of pages that a sequence of this length holds at a time."""
        if self.table is None:
            return 0
        pages = -(-length // self.page_size)
        if self.window is None:
            return pages
        return min(pages, -(-(self.window - 1 + self.step_tokens) // self.page_size) + 1)

    def _put_back(self, request: _Request) -> None:
        """Moves a request from the batch to the front of the queue, to be recomputed."""
        self._release(request)
        self._waiting.appendleft(request)
        request.computed = 0

    def _release(self, request: _Request) -> None:
        """Removes the request from queue and batch, and frees its pages and slot."""
        if request.slot < 0:
            self._waiting.remove(request)
            return
        self._running.remove(request)
        self._slots.append(request.slot)
        request.slot = -1
        if self.table is not None:
            self.table.free(request.number)


def _window(attention: list[Any]) -> int | None:
    """The number of keys that a query may see, including its own; `None` if a layer sees all."""
    windows = [getattr(mixer.attention, "window", None) for mixer in attention]
    lefts = [None if window is None else window[0] for window in windows]
    known = [left for left in lefts if left is not None]
    return max(known) + 1 if known and len(known) == len(lefts) else None


def _buckets(max_batch: int, step_tokens: int, max_pages: int) -> list[ejx.Buckets]:
    """The sizes of batches, smallest first: two for batches that only decode, two for those with chunks of prompts."""

    def sizes(tokens: int, sequences: int, query_len: int) -> ejx.Buckets:
        return ejx.Buckets((tokens,), (sequences,), (max_pages,), (query_len,))

    quarter = lambda size: sorted({-(-size // 4), size})
    decoding = [sizes(n, n, 1) for n in quarter(max_batch)]
    return decoding + [sizes(n, max_batch, n) for n in quarter(step_tokens)]
