"""Continuous batching: prompts of different lengths join and leave a batch that keeps decoding.

    engine = Engine(model, num_pages=512, max_batch=8)
    engine.submit(b"def ", max_new_tokens=50)
    engine.submit(b"import ", max_new_tokens=20, sampling=Sampling(temperature=0.7, top_p=0.9, seed=1))
    for event in engine.run():
        ...

Each step is one call of the model on a `RaggedBatch`: one token of every decoding sequence, and chunks of newer prompts. While the device runs a
step, the host schedules the next one. `serving_step.py`, next to this file, is the part that runs on the device, and `serve_lm.py` the command line.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax import Array
from serving_step import Batch, last_of, make_program, new_state, Program, Sizes, State

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Decoder, Sampling
from ejkernel_eqx.models.sampling import SamplingArrays


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


# The engine


class Event(NamedTuple):
    """A generated token. If `finish` is set, it is the last one: "length", "stop", or "error", without a token, if the model's logits are
    not finite."""

    request: int
    token: int  # -1: no token
    finish: str | None = None


@dataclasses.dataclass(eq=False, slots=True)
class _Request:
    number: int
    tokens: list[int]  # the prompt and the generated tokens, as far as the host knows them
    last_length: int
    sampling: Sampling
    stop: frozenset[int]
    ready: int  # the number of tokens that the model can process, known or not; never the last one
    computed: int = 0  # the number of tokens that the model has processed, or does in a step under way
    awaited: int = 0  # the number of tokens that steps under way will choose
    room: int = 0  # the number of tokens that its pages hold
    slot: int = -1

    @property
    def remaining(self) -> int:
        """The number of tokens that the model can process and has not; 1 for a text that is continued."""
        return self.ready - self.computed

    def wait(self) -> None:
        """A step under way will choose its next token."""
        self.awaited += 1
        if self.ready < self.last_length - 1:
            self.ready += 1


class _Flight(NamedTuple):
    """A step under way: what it chooses, and the requests that it chooses for, by their places in the batch."""

    chosen: concurrent.futures.Future[Array]
    requests: list[tuple[int, _Request]]


class Engine:
    """Serves requests with one model and one pool of pages.

    Every `step` processes one token of each decoding sequence, then chunks of prompts, `step_tokens` in total. The prompts share what the
    decoding sequences leave, so that a long one delays neither running texts nor shorter prompts. A request is admitted when there are
    pages for all of its tokens. If pages run out while decoding, the newest request returns to the
    front of the queue. Its tokens are kept and recomputed later, which does not change its output. When a request ends, its pages and
    slots are freed immediately.

    A step starts while the device still runs the one before, whose tokens stay on the device. The host learns them one step late: a text that ends
    with a stop token is in one more step, whose result is dropped.

    Batches are padded to the sizes of three `programs`: prompts, and decoding with and without drawn tokens. Each is compiled once, on first use
    or by `warm_up`; `compiled` counts the compilations.

    A step that raises while it is scheduled leaves the engine in its previous state, so that the next one retries it. If it raises later, the caches,
    which are donated, are replaced, and the running requests are recomputed.

    **Arguments:**

    - `model`: an `ejx.models.Decoder`, in the dtype to compute in.
    - `num_pages`, `page_size`: the pages of each attention layer, and tokens per page.
    - `max_batch`: the maximum number of concurrent sequences, and of slots for the states of recurrent layers.
    - `step_tokens`: the maximum number of tokens per step; at least `max_batch`.
    - `max_length`: the maximum number of tokens of a request, including the prompt; by default, and at most, what all pages hold. If all
        layers have sliding windows, it may be larger, up to 2**20 pages.
    - `kv_dtype`: the dtype of the pages, by default that of the model; int8, float8_e4m3fn and float8_e5m2 are quantised by token and head.
    - `overlap`: whether a step starts before the tokens of the one before are known.

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
        overlap: bool = True,
    ):
        count = functools.partial(_integer, least=1, most=2**30, error=ValueError)
        num_pages, page_size = count("num_pages", num_pages), count("page_size", page_size)
        max_batch, step_tokens = count("max_batch", max_batch), count("step_tokens", step_tokens)
        if step_tokens < max_batch:
            raise ValueError(
                f"step_tokens: expected at least max_batch={max_batch}, received {step_tokens}; every sequence decodes in every step."
            )
        self.max_batch, self.step_tokens, self.overlap = max_batch, step_tokens, overlap
        mixers = [layer.mixer for stack in model.stacks for layer in stack]
        paged = (
            ejx.nn.MultiHeadAttention,
            ejx.nn.MultiHeadLatentAttention,
            ejx.nn.NativeSparseAttention,
        )
        attention = [mixer for mixer in mixers if isinstance(mixer, paged)]
        self.table = ejx.PageTable(num_pages, page_size) if attention else None
        self.window = _window(attention)
        self._new_caches = functools.partial(
            model.init_serving_cache,
            num_pages=num_pages,
            page_size=page_size,
            num_slots=max_batch,
            dtype=kv_dtype,
        )
        self.num_pages = num_pages if attention else 0
        # Without attention there are no pages; a single missing page of any length stands for that.
        self.page_size = page_size if attention else 2**30
        held = self.num_pages * self.page_size if attention else 2**30
        # A row of the page table has an entry for every page, including freed ones behind a window.
        room = held if self.window is None else max(held, min(2**20 * self.page_size, 2**30))
        self.max_length = (
            held if max_length is None else min(room, _integer("max_length", max_length, 1, error=ValueError))
        )
        self.compiled: collections.Counter[str] = collections.Counter()
        self.steps = self.preemptions = self.tokens_written = self.peak_pages = 0
        self._events: collections.deque[Event] = collections.deque()  # not yet returned to the caller
        self._waiting: collections.deque[_Request] = collections.deque()
        self._running: list[_Request] = []  # in order of admission
        self._flights: collections.deque[_Flight] = collections.deque()
        # To start a program takes as long as to schedule one, and needs no Python: it has a thread of its own.
        self._starter = concurrent.futures.ThreadPoolExecutor(1, "ejkernel_eqx.serving")
        self._slots = list(range(max_batch))[::-1]
        self._count = 0
        self._sampling = SamplingArrays.of([], max_batch)  # by slot
        self._new_pages: list[tuple[int, int, int]] = []  # not yet sent to the device: slot, column, page
        self.model = model
        self._restart()
        self.programs = self._programs()

    @property
    def model(self) -> Decoder:
        return self._model

    @model.setter
    def model(self, model: Decoder) -> None:
        """Another one of the same shapes."""
        self._model, self._weights = model, tuple(jax.tree.leaves(eqx.filter(model, eqx.is_array)))

    @property
    def state(self) -> State:
        """What the device keeps between steps."""
        return jax.tree.unflatten(self._structure, self._state)

    def _restart(self) -> None:
        """Empty caches, for the first step or after the device lost them."""
        pages = -(-self.max_length // self.page_size)
        leaves, self._structure = jax.tree.flatten(new_state(self._new_caches(), self.max_batch, pages))
        self._state: tuple[Array, ...] = tuple(leaves)
        self._flights.clear()

    def _programs(self) -> dict[str, tuple[Sizes, Program]]:
        most, tokens = self.max_batch, self.step_tokens
        # A sequence has at most one new page for each full one of its new tokens, and one more.
        pages = lambda tokens: min(tokens, most + tokens // self.page_size)
        decoding = Sizes(most, most, 1, pages(most), most)
        sizes = {"decode": decoding, "decode and draw": decoding}
        sizes["prompts"] = Sizes(tokens, most, tokens, pages(tokens), most)

        def make(name: str, size: Sizes) -> Program:
            def traced() -> None:
                self.compiled[name] += 1

            return make_program(self.model, size, self.page_size, name != "decode", self._structure, traced)

        return {name: (size, make(name, size)) for name, size in sizes.items()}

    def warm_up(self, *names: str) -> None:
        """Compiles these programs, by default all, side by side before the first request."""
        nothing = {
            name: self.programs[name][0].pack(Batch([], [], [], [], []), self._sampling)
            for name in names or self.programs
        }
        # All are traced before the first is lowered, which waits for its kernels. What is compiled here, the calls below find.
        traced = [
            self.programs[name][1].trace(self._weights, self._state, data) for name, data in nothing.items()
        ]
        with concurrent.futures.ThreadPoolExecutor(len(traced), "ejkernel_eqx.warm_up") as pool:
            for compiled in [pool.submit(program.lower().compile) for program in traced]:
                compiled.result()
        for name, data in nothing.items():
            self._compute(name, data)

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
        prompt, max_new_tokens = list(prompt), _integer("max_new_tokens", max_new_tokens, 1)
        if not prompt:
            raise RequestError("prompt: expected at least one token, received none; pass some text.")
        self._check_length(len(prompt), max_new_tokens)
        last, remedy = self.model.config.vocab_size - 1, "; encode it for this model"
        tokens = [_integer(f"prompt[{i}]", token, 0, last, remedy) for i, token in enumerate(prompt)]
        stops = (
            self.model.config.stop_tokens if stop is None else stop if isinstance(stop, Sequence) else (stop,)
        )
        ends = frozenset(_integer("stop", token, 0, last, "; pass () for no stop token") for token in stops)
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            raise RequestError(
                f"sampling: expected a Sampling, received {type(sampling).__name__}; pass Sampling(temperature=...)."
            )
        self._count += 1
        request = _Request(
            self._count - 1, tokens, len(tokens) + max_new_tokens, sampling, ends, ready=len(tokens)
        )
        self._waiting.append(request)
        return request.number

    def _check_length(self, tokens: int, new: int) -> None:
        """Refuses a request that has no room, whatever its tokens are."""
        if tokens + new > self.max_length:
            raise RequestError(
                f"prompt: expected at most {self.max_length} tokens including new ones, received {tokens} + {new}; "
                "shorten it, request fewer, or serve with more pages or a larger max_length."
            )
        if (pages := self._most_pages(tokens + new)) > self.num_pages:
            raise RequestError(
                f"prompt: expected to need at most {self.num_pages} pages, received {tokens} tokens and {new} new ones, "
                f"which need {pages}; shorten it, request fewer, or serve with more pages."
            )

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
        """Starts one call of the model and returns the tokens of the one before."""
        self._step()
        events = list(self._events)
        self._events.clear()
        return events

    def _step(self) -> None:
        plan: dict[_Request, int] = {}
        try:
            plan = self._schedule()
            if plan:
                self._start(plan)
        except BaseException:  # including Ctrl-C
            self._undo()
            raise
        self._finish(1 if plan and self.overlap else 0)

    def _start(self, plan: dict[_Request, int]) -> None:
        """Starts the step of a plan."""
        name = self._program(plan)
        data = self.programs[name][0].pack(self._batch(plan), self._sampling)
        writing: list[tuple[int, _Request]] = []
        self._flights.append(_Flight(self._launch(name, data), writing))
        try:
            for place, (request, count) in enumerate(plan.items()):
                request.computed += count
                if request.computed == request.ready:  # not in the middle of its prompt
                    request.wait()
                    writing.append((place, request))
            self.steps += 1
            self.peak_pages = max(self.peak_pages, self.pages_used)
            if self.window is not None:
                self._free_behind(plan, self.window)
            self._new_pages = []
        except BaseException:  # an interruption: it is not known how far this came
            self._put_all_back()
            raise

    def _launch(self, name: str, data: np.ndarray) -> "concurrent.futures.Future[Array]":
        """Starts a program in the thread that does so; the first time here, where it is traced with the settings of this thread."""
        if self.compiled[name]:
            return self._starter.submit(self._compute, name, data)
        self._wait()
        done: concurrent.futures.Future[Array] = concurrent.futures.Future()
        done.set_result(self._compute(name, data))
        return done

    def _wait(self) -> None:
        """Until all steps have started; the device may still run them."""
        concurrent.futures.wait([flight.chosen for flight in self._flights])

    def _finish(self, most: int) -> None:
        """Waits for the oldest steps until at most so many are under way, and takes their tokens."""
        while len(self._flights) > most:
            chosen, requests = self._flights[0]
            concurrent.futures.wait([chosen])  # Ctrl-C meanwhile loses nothing
            try:
                tokens = np.asarray(chosen.result()).tolist()
            except BaseException:  # those after it were given its caches
                self._put_all_back()
                raise
            self._flights.popleft()
            for place, request in requests:
                if request.slot >= 0:  # else it was cancelled, or had ended when this step started
                    self._take(request, tokens[place])

    def _take(self, request: _Request, token: int) -> None:
        """Appends a token to the request, and ends it if it is the last."""
        request.awaited -= 1
        finish = None
        if token < 0:
            finish = "error"
        else:
            request.tokens.append(token)
            self.tokens_written += 1
            if token in request.stop:
                finish = "stop"
            elif len(request.tokens) == request.last_length:
                finish = "length"
        self._events.append(Event(request.number, token, finish))
        if finish is not None:
            self._release(request)

    def _program(self, plan: dict[_Request, int]) -> str:
        if not self.programs["decode"][0].holds(list(plan.values())):
            return "prompts"
        return "decode and draw" if any(r.sampling.temperature > 0 for r in plan) else "decode"

    def _batch(self, plan: dict[_Request, int]) -> Batch:
        tokens: list[int] = []
        lengths: list[int] = []
        slots: list[int] = []
        for request, count in plan.items():
            first, slot = request.computed, request.slot
            if request.awaited:
                tokens.append(last_of(slot))
            elif count == 1:
                tokens.append(request.tokens[first])
            else:
                tokens += request.tokens[first : first + count]
            lengths.append(first + count)
            slots.append(slot)
        return Batch(tokens, list(plan.values()), lengths, slots, self._new_pages)

    def _compute(self, name: str, data: np.ndarray) -> Array:
        """Calls a program, which takes the state and gives the next one; returns, without waiting for them, the tokens it chooses."""
        chosen, self._state = self.programs[name][1](self._weights, self._state, data)
        chosen.copy_to_host_async()
        return chosen

    def _undo(self) -> None:
        """Restores the state before a step that was not started, or restarts all requests if the caches are lost."""
        self._wait()
        if any(array.is_deleted() for array in self._state):
            self._put_all_back()
            return
        self._take_back()
        for request in self._running[::-1]:
            if request.computed == 0:  # admitted in this step
                self._put_back(request)

    def _put_all_back(self) -> None:
        """All requests start again, with empty caches, once nothing is under way."""
        self._wait()
        for request in self._running[::-1]:
            self._put_back(request)
        self._restart()

    def _take_back(self) -> None:
        """Frees the pages that were allocated for a step that does not start."""
        self._new_pages = []
        if self.table is not None:
            for request in self._running:
                request.room = -(-request.computed // self.page_size) * self.page_size
                self.table.truncate(request.number, request.room)

    def _schedule(self) -> dict[_Request, int]:
        """The number of tokens of each request in the next step. Allocates their pages."""
        while (plan := self._plan()) is None:
            # Before a request is put back, its tokens must be known; and requests that have ended may have enough pages.
            self._take_back()
            self._finish(0)
        return plan

    def _plan(self) -> dict[_Request, int] | None:
        """As `_schedule`; `None` if pages run out while steps are under way."""
        plan: dict[_Request, int] = {}
        before = self.preemptions
        for request in [request for request in self._running if request.remaining == 1]:
            if not self._grant(request, 1, plan):
                return None
        while self._slots and self._waiting and self.preemptions == before and self._fits(self._waiting[0]):
            self._admit()
        # Shorter prompts first: what they leave of their shares is for the longer ones.
        reading = [request for request in self._running if request.remaining and request not in plan]
        reading.sort(key=lambda request: request.remaining)
        for place, request in enumerate(reading):
            left = self.step_tokens - sum(plan.values())
            share = -(-left // (len(reading) - place))
            if share > 0 and not self._grant(request, min(request.remaining, share), plan):
                return None
        return plan

    def _grant(self, request: _Request, count: int, plan: dict[_Request, int]) -> bool:
        """Enters so many tokens of a request in the plan, unless it was put back; False as `_plan`."""
        if request.slot < 0:
            return True
        if request.computed + count > request.room:
            if (fits := self._allocate(request, count, plan)) is None:
                return False
            if not fits:
                return True
        plan[request] = count
        return True

    def _admit(self) -> None:
        """Gives the next request a slot, and no pages yet."""
        request = self._waiting[0]
        if self.table is None:
            request.room = self.page_size
        else:
            self.table.allocate(request.number, 0)
        request.slot = self._slots.pop()
        self._running.append(self._waiting.popleft())
        for column, (value,) in zip(self._sampling, SamplingArrays.of([(request.sampling, 0)], 1)):
            column[request.slot] = value

    def _give_pages(self, request: _Request, count: int) -> None:
        """Pages for more tokens. Whole ones, so that most steps of a request need none."""
        if self.table is None:
            return
        held, pages = (-(-length // self.page_size) for length in (request.room, request.computed + count))
        self.table.allocate(request.number, pages * self.page_size - request.room)
        row = self.table.row(request.number)
        self._new_pages += [(request.slot, place, int(row[place])) for place in range(held, pages)]
        request.room = pages * self.page_size

    def _allocate(self, request: _Request, count: int, plan: dict[_Request, int]) -> bool | None:
        """Allocates pages for more tokens, preempting the newest requests if necessary; False if it preempted this one, and `None` if pages
        run out while steps are under way."""
        while True:
            try:
                self._give_pages(request, count)
                return True
            except ejx.OutOfPagesError:
                if self._flights:
                    return None
                youngest = self._running[-1]
                plan.pop(youngest, None)
                self._put_back(youngest)
                self.preemptions += 1
                if youngest is request:
                    return False

    def _fits(self, request: _Request) -> bool:
        """Whether there are pages for all its tokens, besides those that other prompts still need and one more for each of them."""
        if self.table is None:
            return True
        wanted = self._most_pages(len(request.tokens))
        for other in self._running:
            held = other.room // self.page_size
            if self.window is not None:
                held = int((self.table.row(other.number) >= 0).sum())
            wanted += max(1, self._most_pages(len(other.tokens) + other.awaited) - held)
        return wanted <= self.table.num_free

    def _free_behind(self, plan: dict[_Request, int], window: int) -> None:
        """Frees pages that no later step reads. One under way still reads them, before a later one writes them."""
        for request in plan:
            if self.table is not None:
                self.table.free_behind(request.number, max(0, request.computed - window + 1))

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
        request.computed, request.awaited, request.ready = 0, 0, len(request.tokens)

    def _release(self, request: _Request) -> None:
        """Removes the request from queue and batch, and frees its pages and slot."""
        if request.slot < 0:
            self._waiting.remove(request)
            return
        self._running.remove(request)
        self._slots.append(request.slot)
        self._new_pages = [page for page in self._new_pages if page[0] != request.slot]
        request.slot = -1
        if self.table is not None:
            self.table.free(request.number)
        request.room = 0


def _window(attention: list[Any]) -> int | None:
    """The number of keys that a query may see, including its own; `None` if a layer sees all."""
    windows = [getattr(mixer.attention, "window", None) for mixer in attention]
    lefts = [None if window is None else window[0] for window in windows]
    known = [left for left in lefts if left is not None]
    return max(known) + 1 if known and len(known) == len(lefts) else None
