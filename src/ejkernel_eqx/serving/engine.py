"""Continuous batching: prompts of different lengths join and leave a batch that keeps decoding."""

import collections
import concurrent.futures
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax import Array

from .. import nn
from ..models import Decoder, Sampling, Speculation
from ..models.speculative import check_speculation
from .drafts import Drafter
from .pages import Pages
from .prefixes import Prefixes
from .requests import Event, read_integer, read_request, Request, RequestError
from .scheduler import Plan, Scheduler
from .step import Batch, last_of, make_program, new_state, Program, Sizes, State

_PAGED = (nn.MultiHeadAttention, nn.MultiHeadLatentAttention, nn.NativeSparseAttention)
_MOST_COPIES, _MOST_ENTRIES = 4, 4096
"""Bounds of what reused prefixes may add to a step: copies of states, and entries of the page table."""


class _Flight(NamedTuple):
    """A step under way: what it chooses, and the requests that it chooses for, by their places in the batch, with their numbers of drafts."""

    chosen: concurrent.futures.Future[Array]
    requests: list[tuple[int, Request, int]]


class Engine:
    """Serves requests with one model and one pool of pages.

    ```python
    engine = ejx.serving.Engine(model, num_pages=512, max_batch=8)
    engine.submit(prompt_tokens, max_new_tokens=50, sampling=Sampling(temperature=0.7, top_p=0.9, seed=1))
    for event in engine.run():
        print(event.request, event.token, event.finish)
    ```

    Every `step` processes one token of each decoding sequence, then chunks of prompts, `step_tokens` in total. The prompts share what the
    decoding sequences leave, so that a long one delays neither running texts nor shorter prompts. A request is admitted when there are
    pages for all of its tokens. If pages run out while decoding, the newest request returns to the
    front of the queue. Its tokens are kept and recomputed later, which does not change its output. When a request ends or is cancelled, its pages
    and slots are freed immediately.

    **The prefix cache.** If a request begins with the tokens of an earlier one, these tokens are not computed again, up
    to the last full page. Freed pages keep their content until they are needed. Those that were freed first go first. A
    request whose first tokens another one computes at the moment waits for these. For recurrent layers the state at the
    end of some pages is kept, as a checkpoint: where a step ends with a page of a prompt, after the prompt's last full
    page, and where two prompts part. Models whose attention layers all have sliding windows have no prefix cache.
    Nothing is shared between engines, or kept when `engine.model` is set.

    A step starts while the device still runs the one before, whose tokens stay on the device. The host learns them one step late: a text that ends
    with a stop token is in one more step, whose result is dropped.

    **Speculative decoding.** With `speculate`, a step without prompts verifies drafts of each request that is not
    drawn. A draft is what followed the last place in the request's own tokens with the same end. The request gets those
    that are what the model chooses, and one more token. They are the tokens without speculation. The drafts share what
    the decoding sequences leave of `step_tokens`, and take no pages from other requests. A step is not started early if
    its requests have drafts, or the one before had. `drafts_offered` and `drafts_accepted` count.

    Batches are padded to the sizes of three `programs`: prompts, and decoding with and without drawn tokens; with `speculate`, of two more, for steps
    with drafts. Each is compiled once, on first use or by `warm_up`; `compiled` counts the compilations.

    A step that raises while it is scheduled leaves the engine in its previous state, so that the next one retries it. If it raises later, the caches,
    which are donated, are replaced, and the running requests are recomputed.

    **Arguments:**

    - `model`: an `ejx.models.Decoder`, in the dtype to compute in.
    - `num_pages`, `page_size`: the pages of each attention layer, and tokens per page.
    - `max_batch`: the maximum number of concurrent sequences, and of slots for the states of recurrent layers.
    - `step_tokens`: the maximum number of tokens per step; at least `max_batch`.
    - `max_length`: the maximum number of tokens of a request, including the prompt; by default, and at most, what all pages hold and
        what a model that learned its positions has of them. If all
        layers have sliding windows, it may be larger, up to 2**20 pages.
    - `kv_dtype`: the dtype of the pages, by default that of the model; int8, float8_e4m3fn and float8_e5m2 are quantised by token and head.
    - `overlap`: whether a step starts before the tokens of the one before are known.
    - `prefix_cache`: whether prefixes are shared.
    - `num_checkpoints`: the number of states that are kept for prefixes, each as large as a slot; for models with recurrent layers only.
    - `speculate`: an `ejx.models.Speculation` without a draft model, for speculative decoding.

    **Raises:** `ValueError` for sizes that are not integers of at least 1, `step_tokens` below `max_batch`, or a draft model.
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
        prefix_cache: bool = True,
        num_checkpoints: int = 8,
        speculate: Speculation | None = None,
    ):
        num_pages, page_size = _read("num_pages", num_pages), _read("page_size", page_size)
        max_batch, step_tokens = _read("max_batch", max_batch), _read("step_tokens", step_tokens)
        if step_tokens < max_batch:
            raise ValueError(
                f"step_tokens: expected at least max_batch={max_batch}, received {step_tokens}; every sequence decodes in every step."
            )
        check_speculation(speculate, model.config.vocab_size)
        if speculate is not None and speculate.draft is not None:
            raise ValueError(
                "speculate: expected a Speculation that looks drafts up in the text, received one with a draft model; pass Speculation() here, "
                "or the draft model to ejx.models.generate."
            )
        self.max_batch, self.step_tokens, self.overlap = max_batch, step_tokens, overlap
        self.speculate, drafts = speculate, 0 if speculate is None else speculate.num_draft_tokens
        mixers = [mixer for stack in model.mixers for mixer in stack]
        attention = [mixer for mixer in mixers if isinstance(mixer, _PAGED)]
        self.pages = Pages(num_pages) if attention else None
        self.window, recurrent = _window(attention), len(attention) < len(mixers)
        keeps = prefix_cache and self.window is None
        checkpoints = _read("num_checkpoints", num_checkpoints, least=0) if keeps and recurrent else 0
        self.prefixes = None
        if keeps and (checkpoints or not recurrent):
            slots = range(max_batch, max_batch + checkpoints)
            self.prefixes = Prefixes(page_size, self.pages, slots)
        sizes = {"num_pages": num_pages, "page_size": page_size, "num_slots": max_batch + checkpoints}
        if drafts:
            sizes["num_draft_tokens"] = drafts + 1
        self._new_caches = functools.partial(model.init_serving_cache, **sizes, dtype=kv_dtype)
        self.num_pages = num_pages if attention else 0
        # Without attention there are no pages; a single missing page of any length stands for that.
        self.page_size = page_size if attention else 2**30
        held = self.num_pages * self.page_size if attention else 2**30
        # A row of the page table has an entry for every page, including freed ones behind a window.
        room = held if self.window is None else max(held, min(2**20 * self.page_size, 2**30))
        most = held if max_length is None else read_integer("max_length", max_length, 1, error=ValueError)
        self.max_length = min(room, most, model.config.max_positions or room)
        self.compiled: collections.Counter[str] = collections.Counter()
        self.steps = self.tokens_computed = self.tokens_written = self.peak_pages = 0
        self.drafts_offered = self.drafts_accepted = 0
        self._events: collections.deque[Event] = collections.deque()  # not yet returned to the caller
        self._flights: collections.deque[_Flight] = collections.deque()
        # To start a program takes as long as to schedule one, and needs no Python: it has a thread of its own.
        self._starter = concurrent.futures.ThreadPoolExecutor(1, "ejkernel_eqx.serving")
        self._count = 0
        self._max_copies = min(_MOST_COPIES, checkpoints, max_batch)
        longest = -(-self.max_length // page_size)
        self._max_entries = 0 if self.prefixes is None else min(_MOST_ENTRIES, longest)
        self.scheduler = Scheduler(
            max_batch=max_batch,
            step_tokens=step_tokens,
            page_size=self.page_size,
            pages=self.pages,
            window=self.window,
            prefixes=self.prefixes,
            max_copies=self._max_copies,
            max_entries=self._max_entries,
            max_drafts=drafts,
        )
        self.model = model
        self._restart()
        self.programs = self._programs()

    @property
    def model(self) -> Decoder:
        """The model. It may be set to another one of the same shapes, which forgets all prefixes."""
        return self._model

    @model.setter
    def model(self, model: Decoder) -> None:
        self._model, self._weights = model, tuple(jax.tree.leaves(eqx.filter(model, eqx.is_array)))
        if self.prefixes is not None:
            self.prefixes.clear()
            for request in self.scheduler.running:
                request.shares = not request.computed

    @property
    def state(self) -> State:
        """The caches and tables that the device keeps between steps."""
        return jax.tree.unflatten(self._structure, self._state)

    def _restart(self) -> None:
        """Empty caches, for the first step or after the device lost them."""
        pages = -(-self.max_length // self.page_size)
        leaves, self._structure = jax.tree.flatten(new_state(self._new_caches(), self.max_batch, pages))
        self._state: tuple[Array, ...] = tuple(leaves)
        self._flights.clear()
        if self.prefixes is not None:
            self.prefixes.clear()

    def _programs(self) -> dict[str, tuple[Sizes, Program]]:
        most, tokens = self.max_batch, self.step_tokens
        # A sequence has at most one new page for each full one of its new tokens, and one more.
        pages = lambda tokens: min(tokens, most + tokens // self.page_size)
        decoding = Sizes(most, most, 1, pages(most), most)
        sizes = {"decode": decoding, "decode and draw": decoding}
        entries = pages(tokens) + self._max_entries
        sizes["prompts"] = Sizes(tokens, most, tokens, entries, most, self._max_copies)
        if drafts := self.scheduler.max_drafts:
            count = min(tokens, most * (drafts + 1))
            verifying = Sizes(count, most, drafts + 1, pages(count), most, drafts=drafts)
            sizes |= {"verify": verifying, "verify and draw": verifying}

        def make(name: str, size: Sizes) -> Program:
            def traced() -> None:
                self.compiled[name] += 1

            draws = name not in ("decode", "verify")
            return make_program(self.model, size, self.page_size, draws, self._structure, traced)

        return {name: (size, make(name, size)) for name, size in sizes.items()}

    def warm_up(self, *names: str) -> None:
        """Compiles these programs, by default all, side by side before the first request."""
        nothing = {
            name: self.programs[name][0].pack(Batch([], [], [], [], []), self.scheduler.sampling)
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
        """The number of requests that have a slot."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """The number of requests in the queue."""
        return len(self.scheduler.waiting)

    @property
    def preemptions(self) -> int:
        """How often a request was put back into the queue because there were no pages."""
        return self.scheduler.preemptions

    @property
    def pages_used(self) -> int:
        """The number of pages that requests hold."""
        return 0 if self.pages is None else self.pages.num_used

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
        prompt, max_new_tokens = list(prompt), read_integer("max_new_tokens", max_new_tokens, 1)
        if not prompt:
            raise RequestError("prompt: expected at least one token, received none; pass some text.")
        self._check_length(len(prompt), max_new_tokens)
        config = self.model.config
        stops = config.stop_tokens if stop is None else stop if isinstance(stop, Sequence) else (stop,)
        request = read_request(self._count, prompt, max_new_tokens, sampling, stops, config.vocab_size)
        if self.speculate is not None and request.sampling.temperature == 0:
            request.drafter = Drafter(self.speculate.max_ngram)
        self._count += 1
        self.scheduler.waiting.append(request)
        return request.number

    def _check_length(self, tokens: int, new: int) -> None:
        """Refuses a request that has no room, whatever its tokens are."""
        if tokens + new > self.max_length:
            raise RequestError(
                f"prompt: expected at most {self.max_length} tokens including new ones, received {tokens} + {new}; "
                "shorten it, request fewer, or serve with more pages or a larger max_length."
            )
        if (pages := self.scheduler.most_pages(tokens + new)) > self.num_pages:
            raise RequestError(
                f"prompt: expected to need at most {self.num_pages} pages, received {tokens} tokens and {new} new ones, "
                f"which need {pages}; shorten it, request fewer, or serve with more pages."
            )

    def cancel(self, number: int) -> bool:
        """Ends a request and frees its pages; it has no further events. Returns False if its last event was already returned."""
        known = len(self._events)
        self._events = collections.deque(event for event in self._events if event.request != number)
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            if request.number == number:
                self.scheduler.release(request)
                return True
        if not 0 <= number < self._count:
            raise ValueError(
                f"number: expected the number of a request, received {number}; submit returns it."
            )
        return len(self._events) < known

    def run(self) -> Iterator[Event]:
        """Runs steps until all requests have ended. Events not consumed, for instance after a `break`, come first in the next call."""
        while self._events or self.num_running or self.num_waiting:
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
        plan: Plan = {}
        try:
            plan = self._schedule()
            if plan:
                self._start(plan)
        except BaseException:  # including Ctrl-C
            self._undo()
            raise
        self._finish(1 if plan and self.overlap else 0)

    def _schedule(self) -> Plan:
        """The next step, once enough is known for it."""
        if self._flights and self.speculate is not None:
            verifying = any(drafts for *_, drafts in self._flights[-1].requests)
            if verifying or self.scheduler.may_draft():
                self._finish(0)
        while (plan := self.scheduler.plan(bool(self._flights))) is None:
            self.scheduler.take_back()
            self._finish(0)
        return plan

    def _start(self, plan: Plan) -> None:
        """Starts the step of a plan."""
        name = self._program(plan)
        data = self.programs[name][0].pack(self._batch(plan), self.scheduler.sampling)
        writing: list[tuple[int, Request, int]] = []
        self._flights.append(_Flight(self._launch(name, data), writing))
        try:
            writing += self.scheduler.started(plan)
            self.steps += 1
            self.tokens_computed += sum(plan.values())
            self.peak_pages = max(self.peak_pages, self.pages_used)
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
                tokens = np.asarray(chosen.result())
                tokens = tokens.reshape(len(tokens), -1).tolist()
            except BaseException:  # those after it were given its caches
                self._put_all_back()
                raise
            self._flights.popleft()
            for place, request, drafts in requests:
                if request.slot >= 0:  # else it was cancelled, or had ended when this step started
                    request.awaited -= 1
                    accepted = self._accept(request, tokens[place], drafts) if drafts else 0
                    for token in tokens[place][: 1 + accepted]:
                        if request.slot >= 0:  # a stop token may be in the middle
                            self._take(request, token)

    def _accept(self, request: Request, tokens: list[int], drafts: int) -> int:
        """The number of drafts of a request that were right. Each chose one more of its new tokens; -1 is behind them."""
        accepted = sum(token >= 0 for token in tokens[1:])
        self.drafts_offered += drafts
        self.drafts_accepted += accepted
        request.accept(accepted, drafts)
        return accepted

    def _take(self, request: Request, token: int) -> None:
        """Appends a token to the request, and ends it if it is the last."""
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
            self.scheduler.release(request, shares=finish != "error")

    def _program(self, plan: Plan) -> str:
        scheduler, counts = self.scheduler, list(plan.values())
        copies = max(len(scheduler.restores), len(scheduler.saves))
        name = "verify" if scheduler.drafts else "decode"
        if not self.programs[name][0].holds(counts, len(scheduler.entries), copies):
            return "prompts"
        return f"{name} and draw" if any(r.sampling.temperature > 0 for r in plan) else name

    def _batch(self, plan: Plan) -> Batch:
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
                tokens += self.scheduler.drafts.get(request, ())
            lengths.append(first + count)
            slots.append(slot)
        scheduler = self.scheduler
        saves = [(request.slot, slot) for request, _, slot in scheduler.saves]
        return Batch(
            tokens, list(plan.values()), lengths, slots, scheduler.entries, scheduler.restores, saves
        )

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
        self.scheduler.take_back()
        for request in self.scheduler.running[::-1]:
            if request.computed == 0:  # admitted in this step
                self.scheduler.put_back(request)

    def _put_all_back(self) -> None:
        """All requests start again, with empty caches, once nothing is under way."""
        self._wait()
        for request in self.scheduler.running[::-1]:
            self.scheduler.put_back(request)
        self._restart()


def _read(name: str, value: Any, least: int = 1) -> int:
    return read_integer(name, value, least, 2**30, error=ValueError)


def _window(attention: list[Any]) -> int | None:
    """The number of keys that a query may see, including its own; `None` if a layer sees all."""
    windows = [getattr(mixer.attention, "window", None) for mixer in attention]
    lefts = [None if window is None else window[0] for window in windows]
    known = [left for left in lefts if left is not None]
    return max(known) + 1 if known and len(known) == len(lefts) else None
