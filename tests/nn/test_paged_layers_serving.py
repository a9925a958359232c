"""Requests that come, wait, start over and leave, over few pages and slots: each gets what it gets alone with a dense cache. What nobody
owns at a step holds NaN, also where somebody did the step before."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import Buckets, OutOfPagesError, PageTable
from tests.nn.paged_layers import dense_model, in_place, inputs, make_batch, new_caches, pack, PAGE, stacked
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

LENGTHS = (10, 1, 4, 0, 7, 2, 10, 1)
FEW_PAGES, FEW_SLOTS = 7, 3
BUCKETS = Buckets((8,), (4,), (5,), (1, 6))


@dataclasses.dataclass
class Request:
    number: int
    slot: int
    done: int = 0


class Server:
    """Draws what to do at each step: whom to let in, whom to send away, how many tokens of whom."""

    def __init__(self, seed, window, step, caches):
        self.random, self.window = np.random.default_rng(seed), window
        self.step, self.caches = step, caches
        self.table, self.free = PageTable(FEW_PAGES, PAGE), list(range(FEW_SLOTS))
        self.waiting, self.running = list(range(len(LENGTHS))), []
        self.seen, self.kinds = set(), set()

    def serve(self, x):
        y = np.full(x.shape, np.nan, np.float32)
        while self.waiting or self.running:
            while self.waiting and self.free and self.random.random() < 0.7:
                self.running.append(Request(self.waiting.pop(0), self.free.pop()))
            if len(self.running) > 1 and self.random.random() < 0.15:
                self.leave(self.running[-1], again=True)
            self.advance(x, y)
            for request in [r for r in self.running if r.done == LENGTHS[r.number]]:
                self.leave(request)
        assert self.table.num_used == 0 and len(self.free) == FEW_SLOTS
        return y

    def advance(self, x, y):
        chosen, left = [], BUCKETS.tokens[-1]
        decodes = self.random.random() < 0.5
        for request in self.random.permutation(np.array(self.running, object)):
            wanted = 1 if decodes else int(self.random.choice([0, 1, 1, 2, 4, 6]))
            count = min(wanted, left, LENGTHS[request.number] - request.done)
            try:
                self.table.allocate(request.number, count)
            except OutOfPagesError:
                if request is not self.running[0]:
                    self.leave(request, again=True)
                continue  # the first request goes on as soon as others have left
            left -= count
            chosen.append((request, count))
        chosen = [(r, count) for r, count in chosen if r in self.running]
        work = [(r.number, count) for r, count in chosen]
        batch = make_batch(self.table, work, {r.number: r.slot for r, _ in chosen}, BUCKETS)
        before = {r.number: r.done for r in self.running}
        packed = pack(x, work, before, batch.num_tokens)
        self.caches = jax.tree.map(jnp.asarray, self.poisoned())
        out, self.caches = self.step(packed, self.caches, batch)
        for (request, count), start in zip(chosen, np.asarray(batch.query_start_loc)):
            n = request.number
            y[n, request.done : request.done + count] = out[start : start + count]
            request.done += count
            self.seen.add(min(count, 2))
            if self.window is not None:
                self.table.free_behind(n, max(0, request.done - self.window + 1))
        self.kinds.add(batch.is_decode)
        self.table.check()

    def leave(self, request, again=False):
        self.running.remove(request)
        self.free.append(request.slot)
        if request.number in self.table.sequences:
            self.table.free(request.number)
        if again:
            self.waiting.insert(0, request.number)

    def poisoned(self):
        """NaN in the pages and slots of no request, and in the slots of those that have not begun."""
        rows = [self.table.row(n) for n in self.table.sequences]
        pages = np.setdiff1d(np.arange(FEW_PAGES), np.concatenate([[-1], *rows]))
        slots = np.setdiff1d(np.arange(FEW_SLOTS), [r.slot for r in self.running if r.done])
        lead = (slice(None),) * self.caches.batch_ndim

        def poison(layer):
            where = pages if hasattr(layer, "copy_pages") else slots
            full = lambda x: np.array(x)
            layer = jax.tree.map(full, layer)
            for x in jax.tree.leaves(layer):
                x[(*lead, where)] = np.nan
            return layer

        return eqx.tree_at(lambda c: c.layers, self.caches, tuple(map(poison, self.caches.layers)))


@pytest.mark.slow
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_a_hybrid_model_serves(window):
    """Attention and recurrent layers, stacked; with a window, pages behind it are freed while the request runs."""
    expected, _ = dense_model(len(LENGTHS), window)
    step = quick(lambda x, caches, batch: in_place(x, caches, batch, stacked(window)), donate_argnums=1)
    for seed in range(2):
        sizes: Any = {"num_pages": FEW_PAGES, "page_size": PAGE, "num_slots": FEW_SLOTS}
        server = Server(seed, window, step, new_caches(**sizes))
        y = server.serve(inputs(len(LENGTHS)))
        for n, length in enumerate(LENGTHS):
            assert np.isnan(y[n, length:]).all()
            assert_close(y[n, :length], expected[n, :length], name=f"seed {seed}, request {n}")
        assert server.seen == {0, 1, 2} and server.kinds == {True, False}
