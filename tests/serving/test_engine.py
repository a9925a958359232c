"""The engine: continuous batching over pages and slots, on small untrained models."""

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from ejkernel_eqx.models import Sampling
from ejkernel_eqx.serving import RequestError
from tests.compilations import compilations

from .engines import alone, check, check_empty, check_whole, HYBRID, make_engine, requests_of, serve


@pytest.fixture(scope="module")
def engine():
    """One for many tests, so that its programs are compiled once. Every test leaves it empty."""
    engine = make_engine(HYBRID)
    yield engine
    check_empty(engine)


@functools.cache
def _small():
    """One with few pages, for several tests as well."""
    return make_engine("attention", 1, num_pages=8)


@pytest.mark.slow
def test_together_is_as_alone(engine):
    requests = requests_of(0, 9)
    before = engine.preemptions
    texts = serve(engine, requests)
    assert [len(text) for text in texts] == [count for _, count in requests]
    assert engine.preemptions > before  # 14 pages are not enough for four of these
    assert texts == alone(engine, requests)
    check_whole(HYBRID, list(zip(requests, texts))[:4])
    check_empty(engine)


@pytest.mark.slow
def test_nothing_is_compiled_once_the_engine_is_warm(engine):
    """Not for a token, a request or a step; neither in the model's call nor around it."""
    requests = requests_of(3, 6)
    serve(engine, requests)
    with compilations() as found:
        texts = serve(engine, [(prompt[::-1], count) for prompt, count in requests])
    assert sum(map(len, texts)) > 20 and not found


@pytest.mark.slow
def test_samples_do_not_depend_on_neighbours(engine):
    requests = requests_of(1, 6)
    options = {"sampling": Sampling(1.0, 50, 0.95, seed=7)}
    texts = serve(engine, requests, seed=1, **options)
    assert texts == serve(engine, requests, seed=2, **options) == alone(engine, requests, **options)
    other = {"sampling": Sampling(1.0, 50, 0.95, seed=8)}
    assert alone(engine, requests[:1], **other) != texts[:1]
    check_empty(engine)


def test_starting_early_changes_nothing(engine, monkeypatch):
    """Stop tokens and pages that run out are known a step late."""
    requests = requests_of(9, 7, longest=20, most=14)
    texts = serve(engine, requests, seed=3)
    monkeypatch.setattr(engine, "overlap", False)
    assert serve(engine, requests, seed=3) == texts and not engine._flights


def test_the_next_step_starts_before_the_tokens_are_known(engine):
    """And the result of a step too many is dropped."""
    first = alone(engine, [(b"abc", 6)])[0]
    number = engine.submit(b"abc", 6, stop=first[2])
    assert engine.step() == [] and len(engine._flights) == 1
    found = [engine.step() for _ in range(3)]
    assert [event.token for (event,) in found] == first[:3] and found[-1][0] == (number, first[2], "stop")
    assert engine.num_running == engine.pages_used == 0 and len(engine._flights) == 1
    assert engine.step() == [] and not engine._flights
    check_empty(engine)


def test_a_step_that_fails_on_the_device(engine, monkeypatch):
    """All requests start again, with the tokens that they have."""
    requests = requests_of(8, 3, longest=6, most=6)
    expected, compute = alone(engine, requests), engine._compute
    texts = {engine.submit(*request): [] for request in requests}

    class Failed:
        def __array__(self, *_, **__):
            raise jax.errors.JaxRuntimeError("out of memory")

    for event in (*engine.step(), *engine.step()):
        texts[event.request].append(event.token)
    monkeypatch.setattr(engine, "_compute", lambda *given: (compute(*given), Failed())[1])
    for event in engine.step():
        texts[event.request].append(event.token)
    monkeypatch.setattr(engine, "_compute", compute)
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        engine.step()
    assert not engine.num_running and not engine._flights and engine.pages_used == 0
    for event in engine.run():
        texts[event.request].append(event.token)
    assert list(texts.values()) == expected
    check_empty(engine)


def test_programs_are_compiled_before_they_are_needed():
    engine = make_engine("attention", 1, max_batch=2, step_tokens=4)
    engine.warm_up("prompts", "decode")
    assert engine.compiled == {"prompts": 1, "decode": 1}
    assert len(alone(engine, [(b"abc", 3)])[0]) == 3 and engine.compiled == {"prompts": 1, "decode": 1}
    check_empty(engine)


@pytest.mark.slow
def test_cancelling_changes_nothing_for_the_others(engine):
    """In the queue, within the prompt and while decoding."""
    requests = [(bytes(range(25)), 10), *requests_of(2, 7, most=12)]
    expected = alone(engine, requests)
    texts = serve(engine, requests, cancel={0: 0, 2: 1, 4: 3, 7: 0})
    for index, text in enumerate(texts):
        if index in (0, 2, 4, 7):
            assert text == expected[index][: len(text)]
        else:
            assert text == expected[index]
    assert texts[0] == []
    numbers = [engine.submit(*request) for request in requests]
    engine.step()
    assert engine.num_running and engine.num_waiting
    assert all(engine.cancel(number) for number in numbers)
    assert not engine.cancel(numbers[0]) and engine.step() == []
    with pytest.raises(ValueError, match="number: expected the number of a request, received 1000000"):
        engine.cancel(1000000)
    check_empty(engine)


def test_what_cannot_be_served_is_refused(engine):
    """With the reason and a remedy, at once, while another one is written."""
    expected = alone(engine, [(b"some", 5)])[0]
    number = engine.submit(b"some", 5)
    events = engine.step()
    wrong = [
        (b"", 5, "prompt: expected at least one token, received none"),
        (b"a" * 50, 20, r"expected at most 56 tokens .* received 50 \+ 20; shorten it"),
        ([5, 256], 5, r"prompt\[1\]: expected an integer from 0 to 255, received 256; encode it"),
        ([1.5], 5, r"prompt\[0\]: .* received 1.5"),
        ("a", 5, "prompt: expected bytes or token ids, received str"),
        (b"a", 0, "max_new_tokens: expected an integer of at least 1, received 0"),
        (b"a", 2.5, "max_new_tokens: expected an integer of at least 1, received 2.5"),
        (b"a", 5, "stop: expected an integer from 0 to 255, received 256", {"stop": 256}),
        (b"a", 5, "stop: .* received 'a'", {"stop": "a"}),
        (b"a", 5, "sampling: expected a Sampling, received float", {"sampling": 0.5}),
    ]
    for prompt, count, message, *options in wrong:
        with pytest.raises(RequestError, match=message):
            engine.submit(prompt, count, **dict(*options))
    events += list(engine.run())
    assert [event.token for event in events] == expected and {event.request for event in events} == {number}
    # As long as all pages together is not too long.
    assert len(alone(engine, [(b"a" * 46, 10)])[0]) == 10
    check_empty(engine)


@pytest.mark.few(1)
@pytest.mark.parametrize("lost", [False, True])
def test_a_step_that_raises_changes_nothing(engine, monkeypatch, lost):
    """Before the program starts, and after its caches were given away: all requests start again, with the tokens that they have."""
    requests = requests_of(7, 6, longest=12, most=8)
    expected = alone(engine, requests)
    compute, calls = engine._compute, []

    def failing(name, data):
        calls.append(None)
        if math.isqrt(len(calls)) ** 2 == len(calls):  # ever more seldom, so that it ends
            if lost:
                compute(name, data)
            raise KeyboardInterrupt
        return compute(name, data)

    monkeypatch.setattr(engine, "_compute", failing)
    texts, failures = {engine.submit(*request): [] for request in requests}, 0
    while engine.num_running or engine.num_waiting:
        try:
            for event in engine.step():
                texts[event.request].append(event.token)
        except KeyboardInterrupt:
            failures += 1
            waiting = [request.number for request in engine.scheduler.waiting]
            assert not engine.scheduler.running and waiting == sorted(waiting)
            check(engine)
            assert engine.pages_used == 0
    assert failures >= 3 and list(texts.values()) == expected
    check_empty(engine)


def test_logits_that_are_not_finite_end_a_request(engine, monkeypatch):
    """Without a token, and with what it had kept no harm to others."""
    requests = [(b"abc", 8), (b"a\xffc", 8), (bytes(range(20)), 8)]
    expected = alone(engine, requests)
    embedding = engine.model.embedding.at[255].set(jnp.nan)
    monkeypatch.setattr(engine, "model", eqx.tree_at(lambda model: model.embedding, engine.model, embedding))
    numbers = [engine.submit(*request) for request in requests]
    events = list(engine.run())
    assert [event for event in events if event.request == numbers[1]] == [(numbers[1], -1, "error")]
    for n in (0, 2):
        assert [event.token for event in events if event.request == numbers[n]] == expected[n]
    assert alone(engine, requests[2:]) == expected[2:]
    check_empty(engine)


def test_events_are_given_once_each(engine):
    """Also when `run` is left and entered again; those of a request that was cancelled are not given any more."""
    requests = [(b"ab", 6), (b"cd", 6), (b"ef", 1)]
    expected = alone(engine, requests)
    first, second, third = (engine.submit(*request) for request in requests)
    texts = {number: [] for number in (first, second, third)}
    while engine.num_running or engine.num_waiting or engine._events:
        for event in engine.run():
            texts[event.request].append(event.token)
            break
    assert list(texts.values()) == expected
    first, second, third = (engine.submit(*request) for request in requests)
    run = engine.run()
    assert next(run).request == first
    # The third one has ended, but nobody knows it yet.
    assert engine.cancel(second) and engine.cancel(third) and not engine.cancel(third)
    assert {event.request for event in run} == {first}
    check_empty(engine)


def test_a_stop_token_ends_a_text(engine):
    text = alone(engine, [(b"once upon", 20)])[0]
    stop = text[7]
    number = engine.submit(b"once upon", 20, stop=stop)
    events = list(engine.run())
    assert [event.token for event in events] == text[: text.index(stop) + 1]
    assert events[-1] == (number, stop, "stop") and all(event.finish is None for event in events[:-1])
    check_empty(engine)


@pytest.mark.slow
def test_pages_are_given_to_the_oldest_first():
    """Four grow at once where there is room for little more than one: all end, in the order in which they came."""
    engine = _small()
    before, engine.peak_pages = engine.preemptions, 0
    requests = [(bytes([65 + n] * 5), 25) for n in range(4)]
    numbers = [engine.submit(*request) for request in requests]
    texts, ended = {number: [] for number in numbers}, []
    for event in engine.run():
        texts[event.request].append(event.token)
        ended += [event.request] if event.finish else []
        check(engine)
    assert ended == numbers and engine.preemptions >= before + 3 and engine.peak_pages == 8
    assert list(texts.values()) == alone(engine, requests)
    check_empty(engine)


@pytest.mark.slow
def test_pages_behind_a_window_are_freed():
    """So a text may be longer than all pages."""
    engine = make_engine("windowed", num_pages=6, max_length=64, max_batch=2)
    assert engine.window == 6
    requests = [(bytes(range(30)), 30), (bytes(range(50, 70)), 40)]
    texts = serve(engine, requests)
    check_whole("windowed", zip(requests, texts))
    assert engine.peak_pages <= 6
    with pytest.raises(RequestError, match="at most 64 tokens"):
        engine.submit(b"a" * 60, 5)
    check_empty(engine)


INTERPRETED = {"platform": "triton-interpret", "page_size": 8, "max_batch": 2}
SERVED = [
    ("gla", {"max_batch": 2, "step_tokens": 4}),
    ("mamba1,kda,attention", {}),
    ("mla", INTERPRETED),
    ("attention moe", {}),
    # Texts of more tokens than a compressed key and a page have.
    ("nsa", {"page_size": 16, "num_pages": 10, "step_tokens": 16}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mixer", "options"), SERVED, ids=str)
def test_every_mixer_is_served(mixer, options):
    """The pages of all layers are one pool, to kernels of another platform as well; without attention there are none."""
    if "platform" in options:
        pytest.importorskip("triton")
    layers = mixer.count(",") + 1
    engine = make_engine(mixer, layers, **options)
    requests = [(bytes(range(20)), 4), (b"abc", 8), *requests_of(6, 3, longest=12, most=8)]
    texts = serve(engine, requests)
    assert texts == alone(engine, requests)
    check_whole(mixer, list(zip(requests, texts)), layers)
    assert (engine.peak_pages == engine.num_pages == 0) == (mixer == "gla")
    check_empty(engine)


@pytest.mark.slow
def test_quantised_pages():
    """The same together as alone."""
    engine = make_engine("attention", 1, kv_dtype="int8", num_pages=64, step_tokens=4)
    requests = requests_of(4, 4, most=8)
    texts = serve(engine, requests)
    assert texts == alone(engine, requests)
    assert engine.state.caches.stacks[0].layers[0].k.dtype == jnp.int8
    check_empty(engine)


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="step_tokens: expected at least max_batch=4, received 3"):
        make_engine("attention", step_tokens=3)
    for name in ("max_batch", "max_length", "page_size", "num_pages", "step_tokens"):
        for wrong in (0, 2.0, True):
            with pytest.raises(ValueError, match=f"{name}: expected an integer .*1.*, received {wrong}"):
                options: Any = {name: wrong}
                make_engine("attention", **options)
    assert make_engine("attention", max_length=10**15).max_length == 14 * 4
    assert make_engine("gla", max_length=10**15).max_length == 2**30


def test_a_long_prompt_shares_the_steps():
    """A running text has a token in every step, and a short prompt that came later is read first."""
    engine = make_engine("attention", 1)
    running = engine.submit(b"a", 20)
    engine.step()
    long, short = engine.submit(bytes(range(30)), 2), engine.submit(b"bcd", 2)
    steps = []
    while engine.num_running:
        steps.append([event.request for event in engine.step()])
    first = lambda number: next(place for place, step in enumerate(steps) if number in step)
    assert first(short) < first(long)
    assert all(running in step for step in steps[: first(long)])
    # Of 8 tokens of a step, the long prompt has those that the others leave: 4, 4 and then 7, 6 and 6.
    assert first(long) == first(short) + 4
    check_empty(engine)
