"""`Engine`: continuous batching. Requests of different lengths join and leave a batch that keeps decoding."""

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
from ..paged.cache.pages import check_room
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
    """A step under way: the tokens that it chooses, and its requests with their places in the batch and their numbers of drafts."""

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

    **Steps.** A `step` is one call of the model on up to `step_tokens` tokens. It takes the newest token of each decoding sequence first. Chunks of
    prompts share the rest. So a long prompt delays neither running texts nor shorter prompts. A request is admitted when there are pages for all of
    its tokens. If pages run out while decoding, the newest request returns to the front of the queue. Its tokens are kept and recomputed later, which
    does not change its output. When a request ends or is cancelled, its pages and slots are free at once.

    **Overlap.** A step starts while the device still runs the one before. The tokens of that step stay on the device, and the host learns them one
    step late. So a text that ends with a stop token takes part in one more step, whose result is dropped.

    **Programs.** Batches are padded to the sizes of three `programs`: for steps with prompts, for decoding, and for decoding with drawn tokens. With
    `speculate` there are two more, for steps with drafts. Each is compiled once, on first use or by `warm_up`. `compiled` counts the compilations.

    **The prefix cache.** If a request begins with the tokens of an earlier one, these tokens are not computed again, up
    to the last full page. Free pages keep their content until they are needed. Those that were freed first are reused first. If
    another request is just computing the same first tokens, the request waits for them. Recurrent layers need the state at the end of a prefix. Such
    a state is kept in a checkpoint at three kinds of places: where a step ends with a page of a prompt, after the last full page of a prompt, and
    where two prompts begin to differ. Models whose attention layers all have sliding windows have no prefix cache.
    Engines share nothing. Setting `engine.model` empties the cache.

    **Speculative decoding.** With `speculate`, a step without prompts verifies drafts of each greedy request. The drafts are tokens that followed an
    earlier place in the request with the same tokens as its end. The request gets the drafts up to the first one that the model does not choose, and
    one token more. So its tokens are the same as without speculation. The drafts share the `step_tokens` that the decoding sequences leave, and take
    no pages from other requests. A step with drafts, or after one, does not overlap with the step before. `drafts_offered` and `drafts_accepted`
    count.

    **Errors.** If a step raises while it is scheduled, the engine keeps its previous state, and the next step retries. If a step fails on the device,
    the caches are lost, since they are donated. Then new ones are made, and the running requests are recomputed.

    **Arguments:**

    - `model`: an `ejx.models.Decoder`, in the dtype of the computation. If `place` put it over several devices, `tensor` also splits the pages of
        attention by their key heads. The first program is then compiled once more, after its first step.
    - `num_pages`: the number of pages of each attention layer.
    - `page_size`: the number of tokens in a page.
    - `max_batch`: the maximum number of concurrent sequences. Recurrent layers have as many slots for states.
    - `step_tokens`: the maximum number of tokens per step; at least `max_batch`.
    - `max_length`: the maximum number of tokens of a request, prompt included. The default and the maximum is the number that all pages hold,
        and at most the learned positions of the model. If all
        layers have sliding windows, it may be larger, up to 2**20 pages.
    - `kv_dtype`: the dtype of the pages; default that of the model. int8, float8_e4m3fn and float8_e5m2 have a scale for each token and head.
    - `overlap`: whether a step starts before the tokens of the one before are known.
    - `prefix_cache`: whether prefixes are shared.
    - `num_checkpoints`: for models with recurrent layers, the number of states that are kept for prefixes. Each is as large as a slot.
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
        if attention:
            check_room(num_pages, page_size)  # before each page has an entry here
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
        # A model without attention has no pages. The table then has one page, of any length.
        self.page_size = page_size if attention else 2**30
        held = self.num_pages * self.page_size if attention else 2**30
        # A row of the page table has an entry for every page of a text, also for freed ones before a window.
        room = held if self.window is None else max(held, min(2**20 * self.page_size, 2**30))
        most = held if max_length is None else read_integer("max_length", max_length, 1, error=ValueError)
        self.max_length = min(room, most, model.config.max_positions or room)
        self.compiled: collections.Counter[str] = collections.Counter()
        self.steps = self.tokens_computed = self.tokens_written = self.peak_pages = 0
        self.drafts_offered = self.drafts_accepted = 0
        self._events: collections.deque[Event] = collections.deque()  # not yet returned to the caller
        self._flights: collections.deque[_Flight] = collections.deque()
        # Starting a program takes as long as scheduling a step, and needs no Python. So a thread of its own does it.
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
        """The model. It may be set to another one with the same shapes. That empties the prefix cache."""
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
        """Makes empty caches, for the first step or after the device lost them."""
        pages = -(-self.max_length // self.page_size)
        leaves, self._structure = jax.tree.flatten(new_state(self._new_caches(), self.max_batch, pages))
        self._state: tuple[Array, ...] = tuple(leaves)
        self._flights.clear()
        if self.prefixes is not None:
            self.prefixes.clear()

    def _programs(self) -> dict[str, tuple[Sizes, Program]]:
        most, tokens = self.max_batch, self.step_tokens
        # The new tokens of a sequence need at most one page for each full page of them, and one page more.
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
        """Compiles these programs side by side, before the first request; by default all."""
        nothing = {
            name: self.programs[name][0].pack(Batch([], [], [], [], []), self.scheduler.sampling)
            for name in names or self.programs
        }
        if any(len(x.sharding.device_set) > 1 for x in self._weights):
            # The first step puts the caches where the layers of a model on several devices split them.
            self._compute(*next(iter(nothing.items())))
        # All programs are traced first, since lowering one waits for its kernels. The calls below find what is compiled here.
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
        """How many times a request was put back into the queue because pages ran out."""
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
        """Queues a request.

        **Arguments:**

        - `prompt`: the tokens of the prompt, at least one.
        - `max_new_tokens`: the maximum number of new tokens.
        - `sampling`: an `ejx.models.Sampling`; default greedy.
        - `stop`: a token or several that end the text; default the stop tokens of the model.

        **Returns:** the number of the request. Its events have it.

        **Raises:** `RequestError` for a request that can never be served: an empty or too long prompt, or tokens outside of the vocabulary.
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
        """Refuses a request that is too long to be served, whatever its tokens are."""
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
        """Ends a request and frees its pages. It has no further events.

        **Returns:** False if the last event of the request was returned before, else True.
        """
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
        """Runs steps until all requests have ended, and yields the events. Events that were not consumed, for example after a `break`, come first in
        the next call."""
        while self._events or self.num_running or self.num_waiting:
            if self._events:
                yield self._events.popleft()
            else:
                self._step()

    def step(self) -> list[Event]:
        """Starts one call of the model.

        **Returns:** the events of the steps that have ended since the last call; with `overlap`, those of the step before.
        """
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
        """The plan of the next step. It waits until enough tokens are known."""
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
        """Starts a program in the thread for that. The first time it is started here, since tracing depends on the settings of this thread."""
        if self.compiled[name]:
            return self._starter.submit(self._compute, name, data)
        self._wait()
        done: concurrent.futures.Future[Array] = concurrent.futures.Future()
        done.set_result(self._compute(name, data))
        return done

    def _wait(self) -> None:
        """Waits until all steps have started. The device may still run them."""
        concurrent.futures.wait([flight.chosen for flight in self._flights])

    def _finish(self, most: int) -> None:
        """Waits for the oldest steps until at most this many are under way, and takes their tokens."""
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
        """The number of drafts of a request that were right. The new tokens are padded with -1."""
        accepted = sum(token >= 0 for token in tokens[1:])
        self.drafts_offered += drafts
        self.drafts_accepted += accepted
        request.accept(accepted, drafts)
        return accepted

    def _take(self, request: Request, token: int) -> None:
        """Appends a token to the request. The last token ends the request."""
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
        """Calls a program, which replaces the state. Returns the tokens that it chooses, without waiting for them."""
        chosen, self._state = self.programs[name][1](self._weights, self._state, data)
        chosen.copy_to_host_async()
        return chosen

    def _undo(self) -> None:
        """Restores the state before a step that did not start. If the caches are lost, all requests start again."""
        self._wait()
        if any(array.is_deleted() for array in self._state):
            self._put_all_back()
            return
        self.scheduler.take_back()
        for request in self.scheduler.running[::-1]:
            if request.computed == 0:  # admitted in this step
                self.scheduler.put_back(request)

    def _put_all_back(self) -> None:
        """Starts all requests again with empty caches, after all steps under way have ended."""
        self._wait()
        for request in self.scheduler.running[::-1]:
            self.scheduler.put_back(request)
        self._restart()


def _read(name: str, value: Any, least: int = 1) -> int:
    return read_integer(name, value, least, 2**30, error=ValueError)


def _window(attention: list[Any]) -> int | None:
    """The number of keys that a query may see, its own included. `None` if a layer sees all."""
    windows = [getattr(mixer.attention, "window", None) for mixer in attention]
    lefts = [None if window is None else window[0] for window in windows]
    known = [left for left in lefts if left is not None]
    return max(known) + 1 if known and len(known) == len(lefts) else None
