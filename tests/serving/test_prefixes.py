"""The prefix cache: shared first tokens are computed once, and no token changes."""

import random
from typing import Any

import equinox as eqx
import jax
import pytest

from ejkernel_eqx.models import Sampling
from ejkernel_eqx.serving.pages import Pages

from .engines import alone, check, check_empty, check_pages, check_whole, HYBRID, make_engine, serve

MIXERS = (HYBRID, *(pytest.param(mixer, marks=pytest.mark.slow) for mixer in ("attention", "gla")))
SIZES: dict[str, Any] = {"num_pages": 64, "page_size": 4, "max_batch": 4, "step_tokens": 16}
SYSTEM = bytes(range(100, 122))  # five pages and two tokens


def _layers(mixer):
    return 1 + mixer.count(",")


def engines(mixer, layers=None, **options):
    """One with and one without a prefix cache."""
    return [make_engine(mixer, layers, **(SIZES | options), prefix_cache=cache) for cache in (True, False)]


def computed(engine, requests, together=False):
    """The number of tokens computed for requests, one after the other or at once, and the texts."""
    before = engine.tokens_computed
    if together:
        texts = {engine.submit(*request): [] for request in requests}
        for event in engine.run():
            texts[event.request].append(event.token)
        return engine.tokens_computed - before, list(texts.values())
    texts = alone(engine, requests)
    return engine.tokens_computed - before, texts


@pytest.fixture(scope="module", params=MIXERS)
def mixer(request):
    return request.param


@pytest.fixture(scope="module")
def pair(mixer):
    pair = engines(mixer, _layers(mixer))
    yield pair
    for engine in pair:
        check_empty(engine)


def _forget(*engines):
    for engine in engines:
        engine.model = engine.model


def test_a_shared_prefix_is_computed_once(mixer, pair):
    """By requests that come one after the other."""
    cached, plain = pair
    _forget(cached)
    requests = [(SYSTEM + bytes([n, n + 1, n + 2]), 3) for n in (1, 30, 60)]
    total, expected = computed(plain, requests)
    assert total == 3 * (25 + 2)  # the last token of a text is not processed
    some, texts = computed(cached, requests)
    assert texts == expected
    # Prompts part in the page behind 20 tokens. States were kept behind the first step, of 16 tokens, and where the second request parted.
    assert some == total - (16 + 20 if cached.prefixes.stateful else 2 * 20)
    # A prompt that was read before is known up to its last page.
    again, texts = computed(cached, requests)
    assert texts == expected and again == total - 3 * 24
    check_whole(mixer, zip(requests, texts), _layers(mixer))


def test_requests_at_once_share_what_one_computes(pair):
    cached, plain = pair
    _forget(cached)
    requests = [(SYSTEM + bytes([n, n + 1, n + 2]), 3) for n in (1, 30, 60, 90)]
    total, expected = computed(plain, requests, together=True)
    some, texts = computed(cached, requests, together=True)
    assert texts == expected and some == total - 3 * 20


def test_a_prompt_that_is_known_whole(pair):
    """At least its last token is computed, as it chooses the next; also if the prompt ends with a page."""
    cached, plain = pair
    _forget(cached)
    for length in (16, 17, 18):
        request = (bytes(range(length)), 4)
        expected = alone(plain, [request])
        assert alone(cached, [request]) == expected
        some, texts = computed(cached, [request])
        assert texts == expected and some == (length + 3) - (length - 1) // 4 * 4


def test_equal_pages_behind_other_tokens_are_not_shared(pair):
    cached, plain = pair
    _forget(cached)
    first, second, page = bytes([1] * 4), bytes([2] * 4), bytes([3, 4, 5, 6])
    requests = [(first + page + b"xyz", 6), (second + second + b"xyz", 6), (second + page + b"xyz", 6)]
    expected = alone(plain, requests)
    assert alone(cached, requests[:2]) == expected[:2]
    count, texts = computed(cached, requests[2:])
    assert texts == expected[2:] and count >= 11 + 5 - 4


def test_a_conversation_continues():
    """Pages of an answer are kept, too."""
    cached, plain = engines("attention", 1)
    prompt = SYSTEM
    for turn in range(3):
        before = cached.tokens_computed
        (text,) = alone(cached, [(prompt, 10)])
        assert [text] == alone(plain, [(prompt, 10)])
        if turn:
            assert cached.tokens_computed - before < 10 + 4 + 8
        prompt = bytes([*prompt, *text, 7, 8, 9])
    check_empty(cached)


@pytest.mark.few(1)
@pytest.mark.parametrize("mixer", (HYBRID, "attention", "gla"))
def test_any_order_gives_the_same_tokens(mixer):
    """With few pages, so that requests are preempted, few checkpoints, and some cancelled."""
    sizes = {"num_pages": 16, "step_tokens": 8}
    cached, plain = engines(mixer, _layers(mixer), **sizes, num_checkpoints=2)
    rng = random.Random(5)
    starts = [bytes(rng.randrange(256) for _ in range(18)) for _ in range(2)]
    requests = [
        (rng.choice(starts)[: rng.randint(3, 18)] + bytes(rng.choices(range(3), k=3)), rng.randint(1, 18))
        for _ in range(12)
    ]
    expected = serve(plain, requests)
    for seed, cancel in ((1, {}), (2, {1: 0, 4: 2, 7: 5, 11: 1})):
        texts = serve(cached, requests, seed, cancel)
        for index, text in enumerate(texts):
            assert text == expected[index][: len(text)]
            assert len(text) == len(expected[index]) or index in cancel
        check_empty(cached)
    assert mixer == "gla" or cached.preemptions > 0
    assert cached.tokens_computed < 2 * plain.tokens_computed  # of one run


def test_draws_are_the_same(pair):
    cached, plain = pair
    request = (SYSTEM, 8)
    options = {"sampling": Sampling(1.0, 50, 0.95, seed=3)}
    assert alone(cached, [request] * 2, **options) == alone(plain, [request] * 2, **options)


def test_another_model_shares_nothing(pair):
    """Neither what was kept nor what running requests have computed, now or when they end."""
    cached, plain = pair
    old, new = cached.model, jax.tree.map(lambda x: -x if eqx.is_array(x) else x, cached.model)
    alone(cached, [(SYSTEM, 6)])
    cached.submit(SYSTEM, 16)
    mixed = [event.token for _ in range(9) for event in cached.step()]
    cached.model = plain.model = new
    mixed += [event.token for event in cached.run()]
    before = cached.tokens_computed
    assert alone(cached, [(SYSTEM, 6)]) == alone(plain, [(SYSTEM, 6)])
    assert cached.tokens_computed - before == 22 + 5
    prompt = bytes([*SYSTEM, *mixed])
    assert len(prompt) == 22 + 16
    count, texts = computed(cached, [(prompt, 6)])
    assert texts == alone(plain, [(prompt, 6)])
    assert count >= 22 + 16 + 5 - 24  # not more than the prompt, and a page of it
    cached.model = plain.model = old
    assert alone(cached, [(SYSTEM, 6)]) == alone(plain, [(SYSTEM, 6)])


def test_a_cancelled_request_lets_others_go_on(pair):
    """Those that wait for what it computes."""
    cached, plain = pair
    _forget(cached)
    requests = [(bytes(range(40)), 3), (bytes(range(38)) + b"ab", 3)]
    expected = alone(plain, requests)
    first, _ = (cached.submit(*request) for request in requests)
    cached.step()
    assert cached.num_running == 2 and cached.scheduler.running[1].awaits is not None
    assert cached.cancel(first)
    assert [event.token for event in cached.run()] == expected[1]
    check_empty(cached)


def test_a_step_that_is_taken_back_shares_nothing_twice(pair, monkeypatch):
    cached, plain = pair
    alone(cached, [(SYSTEM, 2)])
    expected = alone(plain, [(SYSTEM, 5)])
    with monkeypatch.context() as patch:
        patch.setattr(cached, "_batch", lambda plan: 1 / 0)
        cached.submit(SYSTEM, 5)
        with pytest.raises(ZeroDivisionError):
            cached.step()
    assert cached.num_waiting == 1 and cached.pages_used == 0
    check(cached)
    assert [event.token for event in cached.run()] == expected[0]
    check_empty(cached)


def test_checkpoints_are_few():
    """The one that was used least recently makes room."""
    engine = make_engine("gla", 1, **SIZES, num_checkpoints=2)
    prompts = [bytes([n] * 9) for n in range(3)]
    count = lambda n: computed(engine, [(prompts[n], 1)])[0]
    assert [count(0), count(1)] == [9, 9] and count(0) == 1
    assert count(2) == 9 and count(0) == 1 and count(1) == 9
    check_empty(engine)


def test_without_checkpoints_or_with_windows_nothing_is_shared():
    assert make_engine("gla", 1, **SIZES, num_checkpoints=0).prefixes is None
    engine = make_engine("windowed", 1, **SIZES)
    assert engine.prefixes is None
    assert computed(engine, [(SYSTEM, 1)] * 2)[0] == 2 * len(SYSTEM)
    with pytest.raises(ValueError, match="num_checkpoints: expected an integer from 0 to"):
        make_engine("gla", 1, **SIZES, num_checkpoints=-1)


def test_a_decoding_request_never_waits_for_a_prompt():
    """Counted in steps: a token in each, however long the prompts are that come, and also when one waits for another's prefix."""
    sizes: dict[str, Any] = {**SIZES, "num_pages": 256, "max_batch": 8}
    engine = make_engine("attention", 1, **sizes)
    running = engine.submit(b"a", 60)
    while not engine.step():
        pass
    prompt = bytes(range(200)) + bytes(range(50))
    long = [engine.submit(prompt + bytes([n]), 1) for n in range(4)]
    short = engine.submit(b"bcd", 1)
    steps = []
    while engine.num_running:
        steps.append([event.request for event in engine.step()])
    first = {number: next(n for n, step in enumerate(steps) if number in step) for number in (short, *long)}
    assert all(running in step for step in steps[:-1][:58])
    assert first[short] <= 2
    # The prompts take 251 tokens and then 3 of the last page each, at 15 a step.
    assert max(first.values()) <= 251 // 15 + 4
    assert engine.tokens_computed == 60 + 251 + 3 * 3 + 3
    check_empty(engine)


def test_pages_that_were_left_first_go_first():
    pages = Pages(4)
    first, second = pages.take(0, 2), pages.take(1, 2)
    for page, digest in zip((*first, *second), (b"a", b"b", b"c", b"d")):
        pages.enter(page, digest)
    pages.release(second)
    pages.release(first)
    assert pages.num_free == 4 and [pages.find(x) for x in (b"a", b"b")] == first
    pages.share([second[0]])
    assert pages.take(2, 1) == [second[1]] and pages.find(b"d") is None
    assert pages.take(3, 1) == [first[1]] and pages.find(b"a") == first[0] and pages.find(b"b") is None
    check_pages(pages, [[second[0]], [second[1]], [first[1]]])
    pages.clear()
    assert pages.find(b"a") is None and pages.num_free == 1
    check_pages(pages, [[second[0]], [second[1]], [first[1]]])


OTHERS = ("nsa", "mla", "attention moe", "kda,attention", "mamba1", "attention int8")


@pytest.mark.slow
@pytest.mark.parametrize("mixer", OTHERS)
def test_every_mixer_shares_prefixes(mixer):
    mixer, quantised, _ = mixer.partition(" int8")
    sizes: dict[str, Any] = {"kv_dtype": "int8" if quantised else None} | (
        {"page_size": 16} if mixer == "nsa" else {}
    )
    cached, plain = engines(mixer, 2, **sizes)
    start = bytes(range(100, 137))
    requests = [(start[: 18 + 3 * n % 19] + bytes([n, n, 7]), 8) for n in range(8)]
    expected = serve(plain, requests)
    assert serve(cached, requests, 1) == serve(cached, requests, 2) == expected
    assert cached.tokens_computed < 2 * plain.tokens_computed  # of one run
    check_empty(cached)
