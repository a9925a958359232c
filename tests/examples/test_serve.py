"""Serving: the engine of `examples/serving.py` on small untrained models, and the command line on a checkpoint."""

import functools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.models import Sampling
from tests.compilations import compilations

from .conftest import SMALL
from .test_examples import run, start

HYBRID = "mamba2,attention"
SIZES = "--max-new-tokens 12 --num-pages 24 --page-size 4 --max-batch 4 --step-tokens 16".split()


@functools.cache
def _model(examples, mixer, layers=None, platform=None):
    """`mixer` may end in " moe": with experts."""
    mixer, _, mlp = mixer.partition(" ")
    count = layers or 2 * (mixer.count(",") + 1)
    arch = examples.train_lm.Architecture(32, count, 4, 2, mixer, mlp or "dense")
    return examples.train_lm.make_model(arch, platform, key=jax.random.key(0))


def _engine(examples, mixer, layers=None, platform=None, **options):
    sizes = {"num_pages": 14, "page_size": 4, "max_batch": 4, "step_tokens": 8}
    return examples.serving.Engine(_model(examples, mixer, layers, platform), **(sizes | options))


@pytest.fixture(scope="module")
def engine(examples):
    """One for many tests, so that its programs are compiled once. Every test leaves it empty."""
    engine = _engine(examples, HYBRID)
    yield engine
    _check_empty(engine)


@functools.cache
def _small(examples):
    """One with few pages, for several tests as well."""
    return _engine(examples, "attention", 1, num_pages=8)


def _check_empty(engine):
    assert engine.num_running == engine.num_waiting == engine.pages_used == 0
    assert sorted(engine._slots) == list(range(engine.max_batch))
    if engine.table is not None:
        engine.table.check()
        assert engine.table.sequences == ()
    assert set(engine.compiled.values()) <= {1}
    assert set(engine.compiled) <= set(engine.programs)


def _requests(seed, count, longest=30, most=20):
    rng = random.Random(seed)
    prompt = lambda: bytes(rng.randrange(256) for _ in range(rng.randint(1, longest)))
    return [(prompt(), rng.randint(1, most)) for _ in range(count)]


def _serve(engine, requests, seed=0, cancel=(), **options):
    """What each writes when they come at random moments; those in `cancel` end after some tokens."""
    rng, waiting, texts, index_of = random.Random(seed), list(range(len(requests))), {}, {}
    while waiting or engine.num_running or engine.num_waiting:
        for _ in range(rng.choice((0, 0, 1, 3))):
            if waiting:
                index = waiting.pop(0)
                number = engine.submit(*requests[index], **options)
                index_of[number], texts[index] = index, []
        for event in engine.step():
            index = index_of[event.request]
            texts[index].append(event.token)
            assert (event.finish is not None) == (len(texts[index]) == requests[index][1])
        for number, index in index_of.items():
            if index in cancel and len(texts[index]) >= cancel[index]:
                engine.cancel(number)
        if engine.table is not None:
            engine.table.check()
    return [texts[index] for index in range(len(requests))]


def _alone(engine, requests, **options):
    return [_serve(engine, [request], **options)[0] for request in requests]


def _whole(examples, mixer, requests, layers=None):
    """Greedy tokens from the whole sequence at once, without any cache, given the tokens that were written."""
    model = _model(examples, mixer, layers)
    call = jax.jit(lambda tokens: jnp.argmax(model(tokens), axis=-1))
    for (prompt, _), text in requests:
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(prompt) + len(text)] = [*prompt, *text]
        best = np.asarray(call(tokens))[0]
        assert best[len(prompt) - 1 :][: len(text)].tolist() == text


@pytest.mark.slow
def test_together_is_as_alone(examples, engine):
    requests = _requests(0, 9)
    before = engine.preemptions
    texts = _serve(engine, requests)
    assert [len(text) for text in texts] == [count for _, count in requests]
    assert engine.preemptions > before  # 14 pages are not enough for four of these
    assert texts == _alone(engine, requests)
    _whole(examples, HYBRID, list(zip(requests, texts))[:4])
    _check_empty(engine)


@pytest.mark.slow
def test_nothing_is_compiled_once_the_engine_is_warm(engine):
    """Not for a token, a request or a step; neither in the model's call nor around it."""
    requests = _requests(3, 6)
    _serve(engine, requests)
    with compilations() as found:
        texts = _serve(engine, [(prompt[::-1], count) for prompt, count in requests])
    assert sum(map(len, texts)) > 20 and not found


@pytest.mark.slow
def test_samples_do_not_depend_on_neighbours(examples, engine):
    requests = _requests(1, 6)
    options = {"sampling": Sampling(1.0, 50, 0.95, seed=7)}
    texts = _serve(engine, requests, seed=1, **options)
    assert texts == _serve(engine, requests, seed=2, **options) == _alone(engine, requests, **options)
    other = {"sampling": Sampling(1.0, 50, 0.95, seed=8)}
    assert _alone(engine, requests[:1], **other) != texts[:1]
    _check_empty(engine)


def test_starting_early_changes_nothing(engine, monkeypatch):
    """Stop tokens and pages that run out are known a step late."""
    requests = _requests(9, 7, longest=20, most=14)
    texts = _serve(engine, requests, seed=3)
    monkeypatch.setattr(engine, "overlap", False)
    assert _serve(engine, requests, seed=3) == texts and not engine._flights


def test_the_next_step_starts_before_the_tokens_are_known(engine):
    """And the result of a step too many is dropped."""
    first = _alone(engine, [(b"abc", 6)])[0]
    number = engine.submit(b"abc", 6, stop=first[2])
    assert engine.step() == [] and len(engine._flights) == 1
    found = [engine.step() for _ in range(3)]
    assert [event.token for (event,) in found] == first[:3] and found[-1][0] == (number, first[2], "stop")
    assert engine.num_running == engine.pages_used == 0 and len(engine._flights) == 1
    assert engine.step() == [] and not engine._flights
    _check_empty(engine)


def test_a_step_that_fails_on_the_device(engine, monkeypatch):
    """All requests start again, with the tokens that they have."""
    requests = _requests(8, 3, longest=6, most=6)
    expected, compute = _alone(engine, requests), engine._compute
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
    _check_empty(engine)


def test_programs_are_compiled_before_they_are_needed(examples):
    engine = _engine(examples, "attention", 1, max_batch=2, step_tokens=4)
    engine.warm_up("prompts", "decode")
    assert engine.compiled == {"prompts": 1, "decode": 1}
    assert len(_alone(engine, [(b"abc", 3)])[0]) == 3 and engine.compiled == {"prompts": 1, "decode": 1}
    _check_empty(engine)


@pytest.mark.slow
def test_cancelling_changes_nothing_for_the_others(engine):
    """In the queue, within the prompt and while decoding."""
    requests = [(bytes(range(25)), 10), *_requests(2, 7, most=12)]
    expected = _alone(engine, requests)
    texts = _serve(engine, requests, cancel={0: 0, 2: 1, 4: 3, 7: 0})
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
    _check_empty(engine)


def test_what_cannot_be_served_is_refused(examples, engine):
    """With the reason and a remedy, at once, while another one is written."""
    expected = _alone(engine, [(b"some", 5)])[0]
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
        with pytest.raises(examples.serving.RequestError, match=message):
            engine.submit(prompt, count, **dict(*options))
    events += list(engine.run())
    assert [event.token for event in events] == expected and {event.request for event in events} == {number}
    # As long as all pages together is not too long.
    assert len(_alone(engine, [(b"a" * 46, 10)])[0]) == 10
    _check_empty(engine)


@pytest.mark.few(1)
@pytest.mark.parametrize("lost", [False, True])
def test_a_step_that_raises_changes_nothing(engine, monkeypatch, lost):
    """Before the program starts, and after its caches were given away: all requests start again, with the tokens that they have."""
    requests = _requests(7, 6, longest=12, most=8)
    expected = _alone(engine, requests)
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
            waiting = [request.number for request in engine._waiting]
            assert not engine._running and waiting == sorted(waiting)
            engine.table.check()
            assert engine.pages_used == 0
    assert failures >= 3 and list(texts.values()) == expected
    _check_empty(engine)


def test_logits_that_are_not_finite_end_a_request(engine, monkeypatch):
    """Without a token, and with what it had kept no harm to others."""
    requests = [(b"abc", 8), (b"a\xffc", 8), (bytes(range(20)), 8)]
    expected = _alone(engine, requests)
    embedding = engine.model.embedding.at[255].set(jnp.nan)
    monkeypatch.setattr(engine, "model", eqx.tree_at(lambda model: model.embedding, engine.model, embedding))
    numbers = [engine.submit(*request) for request in requests]
    events = list(engine.run())
    assert [event for event in events if event.request == numbers[1]] == [(numbers[1], -1, "error")]
    for n in (0, 2):
        assert [event.token for event in events if event.request == numbers[n]] == expected[n]
    assert _alone(engine, requests[2:]) == expected[2:]
    _check_empty(engine)


def test_events_are_given_once_each(engine):
    """Also when `run` is left and entered again; those of a request that was cancelled are not given any more."""
    requests = [(b"ab", 6), (b"cd", 6), (b"ef", 1)]
    expected = _alone(engine, requests)
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
    _check_empty(engine)


def test_a_stop_token_ends_a_text(engine):
    text = _alone(engine, [(b"once upon", 20)])[0]
    stop = text[7]
    number = engine.submit(b"once upon", 20, stop=stop)
    events = list(engine.run())
    assert [event.token for event in events] == text[: text.index(stop) + 1]
    assert events[-1] == (number, stop, "stop") and all(event.finish is None for event in events[:-1])
    _check_empty(engine)


@pytest.mark.slow
def test_pages_are_given_to_the_oldest_first(examples):
    """Four grow at once where there is room for little more than one: all end, in the order in which they came."""
    engine = _small(examples)
    before, engine.peak_pages = engine.preemptions, 0
    requests = [(bytes([65 + n] * 5), 25) for n in range(4)]
    numbers = [engine.submit(*request) for request in requests]
    texts, ended = {number: [] for number in numbers}, []
    for event in engine.run():
        texts[event.request].append(event.token)
        ended += [event.request] if event.finish else []
        engine.table.check()
    assert ended == numbers and engine.preemptions >= before + 3 and engine.peak_pages == 8
    assert list(texts.values()) == _alone(engine, requests)
    _check_empty(engine)


@pytest.mark.slow
def test_pages_behind_a_window_are_freed(examples, monkeypatch):
    """So a text may be longer than all pages."""

    def windowed(arch):
        options = dict(examples.train_lm.attention(arch).options)
        return arch.layer("attention", sliding_window=6, **options)

    monkeypatch.setitem(examples.train_lm.MIXERS, "windowed", windowed)
    engine = _engine(examples, "windowed", num_pages=6, max_length=64, max_batch=2)
    assert engine.window == 6
    requests = [(bytes(range(30)), 30), (bytes(range(50, 70)), 40)]
    texts = _serve(engine, requests)
    _whole(examples, "windowed", zip(requests, texts))
    assert engine.peak_pages <= 6
    with pytest.raises(examples.serving.RequestError, match="at most 64 tokens"):
        engine.submit(b"a" * 60, 5)
    _check_empty(engine)


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
def test_every_mixer_is_served(examples, mixer, options):
    """The pages of all layers are one pool, to kernels of another platform as well; without attention there are none."""
    if "platform" in options:
        pytest.importorskip("triton")
    layers = mixer.count(",") + 1
    engine = _engine(examples, mixer, layers, **options)
    requests = [(bytes(range(20)), 4), (b"abc", 8), *_requests(6, 3, longest=12, most=8)]
    texts = _serve(engine, requests)
    assert texts == _alone(engine, requests)
    _whole(examples, mixer, list(zip(requests, texts)), layers)
    assert (engine.peak_pages == engine.num_pages == 0) == (mixer == "gla")
    _check_empty(engine)


@pytest.mark.slow
def test_quantised_pages(examples):
    """The same together as alone."""
    engine = _engine(examples, "attention", 1, kv_dtype="int8", num_pages=64, step_tokens=4)
    requests = _requests(4, 4, most=8)
    texts = _serve(engine, requests)
    assert texts == _alone(engine, requests)
    assert engine.state.caches.stacks[0].layers[0].k.dtype == jnp.int8
    _check_empty(engine)


def test_sizes_are_checked(examples):
    with pytest.raises(ValueError, match="step_tokens: expected at least max_batch=4, received 3"):
        _engine(examples, "attention", step_tokens=3)
    for name in ("max_batch", "max_length", "page_size", "num_pages", "step_tokens"):
        for wrong in (0, 2.0, True):
            with pytest.raises(ValueError, match=f"{name}: expected an integer .*1.*, received {wrong}"):
                _engine(examples, "attention", **{name: wrong})
    assert _engine(examples, "attention", max_length=10**15).max_length == 14 * 4
    assert _engine(examples, "gla", max_length=10**15).max_length == 2**30


# The command line


@pytest.mark.slow
def test_what_was_trained_is_served(examples, tmp_path):
    """And served in a process of its own."""
    text, folder, out = tmp_path / "text.txt", tmp_path / "run", tmp_path / "out.jsonl"
    text.write_text("the quick " * 1000)
    options = ["--data", text, "--out-dir", folder, *SMALL, "--steps", 30, "--sample-length", 1]
    assert examples.train(*options) == 0
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"the quick \n\n{'long ' * 40}\nk the\n")
    options = ["--checkpoint", folder / "checkpoint.ejx", "--prompts", prompts, "--out", out, *SIZES]
    texts, numbers = run("serve_lm.py", *options)
    first = "--- request 0 ---\nthe quick the quick th\n--- request 1 ---\n[prompt: expected at least one"
    assert first in texts
    assert "[prompt: expected at most 96 tokens" in texts and "\nk the quick the q\n" in texts
    assert "4 requests, 2 refused, 24 tokens" in numbers and "0 now" in numbers and "tokens/s" in numbers
    records = sorted(map(json.loads, out.read_text().splitlines()), key=lambda record: record["request"])
    assert [record["finish"] for record in records] == ["length", "refused", "refused", "length"]
    assert records[0]["text"] == "the quick th" and records[0]["tokens"] == 12
    assert "shorten it" in records[2]["message"]


@pytest.mark.slow
def test_standard_input_is_served_as_it_comes(checkpoint, monkeypatch):
    """The first text is there while the input is still open; Ctrl-C ends with what there is."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    options = ["--checkpoint", checkpoint, *SIZES, *"--temperature 0.8 --top-p 0.9 --stop x".split()]
    process = start("serve_lm.py", *options, stdin=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("first \N{EURO SIGN}\nsecond\n".encode())
    process.stdin.flush()
    seen = b""
    while b"--- request 1 ---" not in seen:
        piece = os.read(process.stdout.fileno(), 4096)
        assert piece, process.communicate()[1]
        seen += piece
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err[-4000:]
    assert (seen + out).startswith(b"--- request 0 ---\nfirst ?") and b"2 requests, 0 refused" in err
    assert b"Traceback" not in err and b"0 now" in err


def test_texts_appear_in_the_order_of_their_prompts(examples, capsys):
    texts = examples.serve_lm.Texts(None)
    for index, prompt in enumerate((b"a", b"b", b"c", b"d")):
        texts.begin(index, prompt)
    texts.extend(0, *b"A")
    texts.extend(1, *b"B")
    texts.end(2, "refused", "prompt: no")
    texts.extend(0, *"\N{EURO SIGN}".encode()[:2])
    assert capsys.readouterr().out == "--- request 0 ---\naA"
    texts.extend(0, "\N{EURO SIGN}".encode()[2])
    texts.end(0, "length")
    assert capsys.readouterr().out == "\N{EURO SIGN}\n--- request 1 ---\nbB"
    texts.end(1, "cancelled")
    texts.end(3, "length")
    expected = "\n[cancelled]\n--- request 2 ---\n[prompt: no]\n--- request 3 ---\nd\n"
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--checkpoint /no/such/file", "--checkpoint: there is no file '/no/such/file'; make one with"),
        ("--checkpoint FILE", "--checkpoint: "),
        ("--prompts /no/such/file", "--prompts: cannot read '/no/such/file' (No such file or directory)"),
        ("--out /no/such/folder/file", "--out: cannot write '/no/such/folder/file' (No such file or"),
        ("--max-batch 0", "--max-batch: expected a positive number, received 0"),
        ("--step-tokens 2 --max-batch 4", "step_tokens: expected at least max_batch=4, received 2"),
        ("--temperature -1", "temperature: expected a number from 0 to 3.4e38, received -1.0"),
        ("--seed -1", "--seed: expected at least 0"),
        ("--num-pages 100000000 --page-size 128", "num_pages: expected at most 2**30 tokens"),
        ("--platform nothing", "--platform: expected one of cuda, triton"),
        ("--prompts -", "--prompts: standard input is closed"),
        ("--out FILE --prompts FILE", "--out: expected"),
    ],
)
def test_errors_are_one_sentence(examples, checkpoint, tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.setattr(sys, "stdin", None)
    (tmp_path / "prompts.txt").write_text("some\n")
    common = ["--checkpoint", str(checkpoint), "--prompts", str(tmp_path / "prompts.txt")]
    given = options.replace("FILE", __file__).split()
    assert examples.serve_lm.main([*common, *SIZES, *given]) == 2
    found = capsys.readouterr().err.splitlines()[-1]
    assert found.startswith("serve_lm: ") and message in found


def test_stop_is_one_byte(examples, capsys):
    parse = lambda text: examples.serve_lm.parse(["--stop", text]).stop
    assert [parse(text) for text in ("\\n", ".", "\\\\", "\\xe9")] == [10, 46, 92, 0xE9]
    for wrong in ("ab", "", "\\", "\\u2019", "\N{EURO SIGN}", "\\q"):
        with pytest.raises(SystemExit):
            parse(wrong)
        assert "expected one byte" in capsys.readouterr().err


def test_an_interrupt_before_serving_is_quiet(examples, checkpoint, tmp_path, capsys, monkeypatch):
    """And by then it is known that the texts can be written."""

    def load_model(args):
        assert args.out.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(examples.serve_lm, "load_model", load_model)
    (tmp_path / "prompts.txt").write_text("some\n")
    options = ["--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "out.jsonl")]
    assert examples.serve_lm.main(["--checkpoint", str(checkpoint), *options]) == 130
    assert capsys.readouterr() == ("", "")
