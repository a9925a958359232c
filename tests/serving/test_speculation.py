"""Speculative decoding in the engine: no token changes, and repetitive texts take fewer steps."""

import collections
import functools
import itertools
import math
import random
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.models import Sampling, Speculation
from ejkernel_eqx.models.speculative import looked_up
from ejkernel_eqx.serving.drafts import Drafter

from .engines import alone, check, check_empty, HYBRID, make_engine, model_of, serve

SIZES: dict[str, Any] = {"num_pages": 16, "page_size": 4, "max_batch": 4, "step_tokens": 12}
SPECULATE = Speculation(num_draft_tokens=3)
slow = pytest.mark.slow


def engines(mixer, **options):
    """One with speculation and a prefix cache, and one with neither."""
    layers = 1 + mixer.count(",")
    plain = make_engine(mixer, layers, **(SIZES | options), prefix_cache=False)
    return make_engine(mixer, layers, **(SIZES | options), speculate=SPECULATE), plain


@pytest.fixture(scope="module", params=[HYBRID, pytest.param("gla", marks=slow)])
def pair(request):
    pair = engines(request.param)
    yield pair
    for engine in pair:
        check_empty(engine)


def repetitive(seed, count=12, longest=18, most=24):
    """Prompts that share their beginnings, of texts that repeat themselves."""
    rng = random.Random(seed)
    starts = [bytes(rng.choices(range(256), k=6)) * 3 for _ in range(2)]
    prompt = lambda: rng.choice(starts)[: rng.randint(3, longest)] + bytes(rng.choices(range(3), k=3))
    return [(prompt(), rng.randint(1, most)) for _ in range(count)]


def _turning(model):
    """A model that continues bytes 10, 11, 12, 13, 14, 10, 11 and so on; its other weights have hardly a say."""
    rows = model.head.weight[jnp.arange(256).at[10:15].set(jnp.array([11, 12, 13, 14, 10]))]
    return eqx.tree_at(lambda model: model.embedding, model, 100 * rows)


@pytest.fixture
def turning(pair, monkeypatch):
    """The pair with such a model."""
    model = _turning(pair[0].model)
    for engine in pair:
        monkeypatch.setattr(engine, "model", model)
    return pair


def test_no_token_changes(pair):
    """Whoever joins or leaves, whatever is cancelled and preempted."""
    engine, plain = pair
    requests = repetitive(5)
    expected = serve(plain, requests)
    for seed, cancel in ((1, {}), (2, {1: 0, 4: 2, 7: 5, 11: 1}), (3, {0: 6, 5: 9})):
        for index, text in enumerate(serve(engine, requests, seed, cancel)):
            assert text == expected[index][: len(text)]
            assert len(text) == len(expected[index]) or index in cancel
        check_empty(engine)
    assert engine.pages is None or engine.preemptions > 0
    assert 0 < engine.drafts_accepted < engine.drafts_offered


def test_repetitive_texts_take_fewer_steps(turning):
    """Up to all pages; the drafts end where the text does."""
    engine, plain = turning
    prompt = bytes([10, 11, 12, 13, 14] * 2 + [10])
    before = engine.steps, engine.drafts_offered, engine.drafts_accepted
    (text,) = alone(engine, [(prompt, 53)])
    assert [text] == alone(plain, [(prompt, 53)]) and text[:6] == [11, 12, 13, 14, 10, 11]
    steps, offered, accepted = (
        now - then for now, then in zip((engine.steps, engine.drafts_offered, engine.drafts_accepted), before)
    )
    # Two steps for the prompt, whose last one is behind a checkpoint, and then one for every four tokens.
    assert (steps, offered, accepted) == (2 + 13, 39, 39)
    for most in range(1, 10):
        before = engine.drafts_offered
        assert alone(engine, [(prompt, most)])[0] == text[:most]
        assert engine.drafts_offered - before == sum(min(3, most - 1 - n) for n in range(1, most, 4))


def test_a_stop_token_among_drafts(turning):
    """It is the last token of the text, although drafts behind it were right."""
    engine, _ = turning
    for stop, text in {13: [11, 12, 13], 14: [11, 12, 13, 14], 10: [11, 12, 13, 14, 10]}.items():
        written, accepted = engine.tokens_written, engine.drafts_accepted
        number = engine.submit(bytes([10, 11, 12, 13, 14, 10]), 20, stop=stop)
        events = list(engine.run())
        assert [event.token for event in events] == text and events[-1] == (number, stop, "stop")
        assert all(event.finish is None for event in events[:-1])
        assert engine.tokens_written - written == len(text) and engine.drafts_accepted - accepted == 3
        assert engine.pages_used == 0
    check_empty(engine)


def test_steps_that_raise(pair, monkeypatch):
    """While scheduled, while waited for, and after the caches were given away."""
    engine, plain = pair
    requests = repetitive(9, 6)
    expected, raised = alone(plain, requests), collections.Counter()
    compute, finish = engine._compute, engine._finish
    computed, finished = itertools.count(1), itertools.count(1)
    root = lambda number: math.isqrt(number) if math.isqrt(number) ** 2 == number else 0

    def fail(moment):
        raised[moment] += 1
        raise KeyboardInterrupt

    def computing(name, data):
        number = root(next(computed))  # ever more seldom, so that it ends
        if number % 2 == 1:
            fail("scheduled")
        tokens = compute(name, data)
        if number:
            fail("computed")
        return tokens

    def finishing(most):
        if root(next(finished)):
            fail("waited for")
        finish(most)

    monkeypatch.setattr(engine, "_compute", computing)
    monkeypatch.setattr(engine, "_finish", finishing)
    texts = {engine.submit(*request): [] for request in requests}
    while engine.num_running or engine.num_waiting or engine._events:
        try:
            for event in engine.step():
                texts[event.request].append(event.token)
        except KeyboardInterrupt:
            pass
        check(engine)
    assert min(raised[moment] for moment in ("scheduled", "computed", "waited for")) > 1
    assert list(texts.values()) == expected
    check_empty(engine)


@functools.cache
def _attention():
    """Engines of one layer, for several tests, with a model that turns."""
    pair = engines("attention")
    for engine in pair:
        engine.model = _turning(engine.model)
    return pair


def test_pages_with_rejected_drafts_are_not_kept():
    """Where a text ends beside them."""
    engine, _ = _attention()
    offered = engine.drafts_offered
    # After 10, 11 comes 99 in the prompt, and 12 in the text: the stop token, at the end of the second page.
    engine.submit(bytes([10, 11, 99, 7, 14]), 9, stop=12)
    text = [event.token for event in engine.run()]
    assert text == [10, 11, 12] and engine.drafts_offered - offered == 3
    before = engine.tokens_computed
    assert alone(engine, [(bytes([10, 11, 99, 7, 14, 10, 11, 12, 13]), 1)]) == [[14]]
    assert engine.tokens_computed - before == 9 - 4
    check_empty(engine)


def test_drawn_texts_beside_others():
    """They have no drafts, and the tokens of both are those without speculation."""
    engine, plain = _attention()
    samplings = [Sampling(), Sampling(2.0, 50, 0.95, seed=7)]
    texts: list[list[list[int]]] = []
    for each in (engine, plain):
        prompts = [bytes([10, 11, 12, 13, 14] * 2 + [10 + n // 2]) for n in range(8)]
        numbers = [each.submit(prompt, 12 + n, sampling=samplings[n % 2]) for n, prompt in enumerate(prompts)]
        tokens = {number: [] for number in numbers}
        for event in each.run():
            tokens[event.request].append(event.token)
        texts.append(list(tokens.values()))
        check_empty(each)
    assert texts[0] == texts[1] and engine.drafts_accepted > 20 and len(set(texts[0][1])) > 5
    assert engine.compiled["verify and draw"] == 1


OTHERS = (
    "attention",
    "windowed",
    "delta,attention",
    "beside",
    "short,attention",
    "mamba1,attention",
    "kda",
    "mla",
    "nsa",
    "attention moe",
    "attention int8",
    "attention triton",
)


@slow
@pytest.mark.parametrize("mixer", OTHERS)
def test_every_mixer_verifies_drafts(mixer):
    mixer, quantised, _ = mixer.partition(" int8")
    mixer, interpreted, _ = mixer.partition(" triton")
    sizes: dict[str, Any] = {"kv_dtype": "int8"} if quantised else {}
    if interpreted:
        pytest.importorskip("triton")
        sizes |= {"platform": "triton-interpret", "page_size": 8}
    sizes |= {"page_size": 16} if mixer == "nsa" else {}
    sizes |= {"num_pages": 12, "max_length": 64} if mixer == "windowed" else {}
    engine, plain = engines(mixer, **sizes)
    requests = repetitive(6, 4 if interpreted else 12, most=30)
    expected = serve(plain, requests)
    assert serve(engine, requests, 1) == serve(engine, requests, 2) == expected
    assert engine.drafts_accepted > 0
    more = [(bytes([*prompt, *text]), 10) for (prompt, _), text in zip(requests, expected)]
    assert serve(engine, more, 3) == serve(plain, more)
    check_empty(engine)


def test_drafts_are_what_followed_the_last_place_with_the_same_end():
    """As on the device, for texts that grow; no drafts where even the last token is new."""
    rng = random.Random(0)
    for most in (1, 3):
        drafter, text = Drafter(most), [9]
        assert drafter.propose(text, 4) == []
        for _ in range(40):
            text.append(rng.randrange(4))
            drafts = drafter.propose(text, 4)
            if text[-1] not in text[:-1]:
                assert drafts == []
                continue
            padded = np.array(text + [0] * (50 - len(text)), np.int32)[None]
            length = jnp.array([len(text)], jnp.int32)
            assert drafts == looked_up(jnp.array(padded), length, 4, most)[0].tolist()


def test_drafts_that_are_wrong_pause():
    drafter = Drafter(3)
    for pause in (1, 3, 7, 15, 31, 31):
        drafter.learn(100, 0)
        assert not drafter.propose([5] * (99 + pause), 2) and drafter.propose([5] * (100 + pause), 2) == [
            5,
            5,
        ]
    drafter.learn(200, 1)
    assert drafter.propose([5] * 200, 2) == [5, 5]


def test_draft_models_are_refused():
    model = model_of("attention", 1)
    with pytest.raises(
        ValueError, match="speculate: expected a Speculation that looks drafts up in the text"
    ):
        make_engine("attention", 1, speculate=Speculation(model))
