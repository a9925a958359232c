"""The HTTP server, asked by OpenAI's client over a socket."""

import contextlib
import http.client
import json
import socket
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

for name, extra in {
    "tokenizers": "text",
    "jinja2": "text",
    "starlette": "server",
    "uvicorn": "server",
}.items():
    pytest.importorskip(name, reason=f"needs the extra {extra}")
openai = pytest.importorskip("openai", reason="needs the extra test")

from ejkernel_eqx.serving.server import make_app  # noqa: E402
from ejkernel_eqx.serving.text import ChatTemplate, Tokenizer  # noqa: E402

from .byte_tokenizer import byte_tokenizer  # noqa: E402
from .engines import check_empty, make_engine  # noqa: E402

TEMPLATE = "{% for m in messages %}{% if m.role == 'x' %}{{ raise_exception('no x') }}{% endif %}{{ m.content }}{% endfor %}"
SIZES: dict[str, Any] = {"num_pages": 64, "page_size": 4, "max_batch": 2, "step_tokens": 16}


@contextlib.contextmanager
def serving(app):
    """The port of a server that runs meanwhile."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="on", ws="none"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def engine():
    engine = make_engine("attention", 1, **SIZES)
    yield engine
    check_empty(engine)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(byte_tokenizer(tmp_path_factory.mktemp("server") / "tokenizer.json"))


@pytest.fixture(scope="module")
def port(engine, tokenizer):
    with serving(make_app(engine, tokenizer, ChatTemplate(TEMPLATE), name="tiny", max_requests=4)) as port:
        yield port


@pytest.fixture(scope="module")
def client(port):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(tokenizer):
    """The tokens of a prompt's greedy continuation."""
    alone = make_engine("attention", 1, **SIZES)

    def tokens(prompt, count):
        alone.submit(tokenizer.encode(prompt), count)
        return [event.token for event in alone.run()]

    return tokens


def _idle(engine):
    for _ in range(500):
        if not engine.num_running and not engine.num_waiting:
            return True
        time.sleep(0.01)
    return False


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_completion(client, tokenizer, expected):
    tokens = expected("once", 12)
    answer = client.completions.create(model="tiny", prompt="once", max_tokens=12, temperature=0)
    assert answer.choices[0].text == tokenizer.decode(tokens) and answer.choices[0].finish_reason == "length"
    assert answer.usage.to_dict() == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}
    by_tokens = client.completions.create(
        model="tiny", prompt=tokenizer.encode("once"), max_tokens=12, temperature=0
    )
    assert by_tokens.choices[0].text == answer.choices[0].text and by_tokens.id != answer.id


def test_a_streamed_completion(client, tokenizer, expected):
    text = tokenizer.decode(expected("once", 12))
    options = {"model": "tiny", "prompt": "once", "max_tokens": 12, "temperature": 0, "stream": True}
    chunks = list(client.completions.create(**options, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text
    assert chunks[-2].choices[0].finish_reason == "length" and chunks[-1].usage.completion_tokens == 12
    assert len(chunks) > 3 and len({chunk.id for chunk in chunks}) == 1
    assert not list(client.completions.create(**options))[-1].usage


def test_a_chat(client, tokenizer, expected):
    text = tokenizer.decode(expected("be once", 8))
    messages = [
        {"role": "system", "content": "be "},
        {"role": "user", "content": [{"type": "text", "text": "once"}]},
    ]
    options = {"model": "tiny", "messages": messages, "max_completion_tokens": 8, "temperature": 0}
    answer = client.chat.completions.create(**options)
    assert answer.choices[0].message.content == text and answer.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
    # Without a limit, as much as there is room for.
    everything = client.chat.completions.create(model="tiny", messages=messages[:1], temperature=0)
    assert everything.usage.total_tokens == 64 * 4


def test_draws_repeat_with_their_seed(client):
    def draw(**options):
        answer = client.completions.create(model="tiny", prompt="once", max_tokens=12, top_p=0.95, **options)
        return answer.choices[0].text

    assert draw(seed=3) == draw(seed=3) != draw(seed=-4)
    assert len({draw() for _ in range(3)}) > 1


def test_stop_strings(client, engine, tokenizer, expected):
    """The text ends before one, and its request is cancelled."""
    text = tokenizer.decode(expected("once", 100))
    place = next(n for n in range(4, 90) if text[n : n + 2].isascii() and text.find(text[n : n + 2]) == n)
    options = {"model": "tiny", "prompt": "once", "max_tokens": 100, "temperature": 0}
    for stop in (text[place : place + 2], ["never", text[place : place + 2]]):
        answer = client.completions.create(**options, stop=stop)
        assert answer.choices[0].text == text[:place] and answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens < 100
        chunks = list(client.completions.create(**options, stop=stop, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == text[:place]
        assert chunks[-1].choices[0].finish_reason == "stop"
    assert _idle(engine)


WRONG = {
    "n": ({"n": 2}, "n: expected 1, received 2"),
    "logprobs": ({"logprobs": 3}, "logprobs: expected False, received 3"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens: expected an integer of at least 1, received 0"),
    "temperature": (
        {"temperature": "hot"},
        "temperature: expected a number from 0 to 3.4e38, received 'hot'",
    ),
    "top_p": ({"top_p": 2}, "top_p: expected a number above 0"),
    "vast": ({"temperature": 10**400}, "temperature: expected a number from 0 to 3.4e38"),
    "seed": ({"seed": 1.5}, "seed: expected an integer"),
    "stop": ({"stop": ["a"] * 17}, "stop: expected up to 16 texts"),
    "prompt": ({"prompt": ["a", "b"]}, "prompt: expected"),
    "nothing": ({"prompt": ""}, "prompt: expected at least one token"),
    "long": ({"prompt": "a" * 300}, "prompt: expected at most 256 tokens"),
    "token": ({"prompt": [1, 400]}, r"prompt\[1\]: expected an integer from 0 to 255, received 400"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_refused(client, name):
    options, message = WRONG[name]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            client.completions.create(**{"model": "tiny", "prompt": "a", "stream": stream} | options)
        assert caught.value.type == "invalid_request_error" and caught.value.param in message.replace(
            "\\", ""
        )


def test_wrong_chats_models_and_bodies(client, port):
    with pytest.raises(openai.NotFoundError, match="model: expected 'tiny', received 'other'") as caught:
        client.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found"
    ask = lambda messages: client.chat.completions.create(model="tiny", messages=messages)
    for messages, message in {
        "": "messages: expected a list",
        "x": "messages: the model's chat template refuses them: no x",
    }.items():
        with pytest.raises(openai.BadRequestError, match=message):
            ask([{"role": messages, "content": "a"}] if messages else [])
    with pytest.raises(openai.BadRequestError, match="messages: expected a content of text"):
        ask([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    for body, status in ((b"{", 400), (b"[]", 400), (b"[" * 10**5, 400), (b" " * (2**22 + 1), 413)):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/v1/completions", body)
        answer = connection.getresponse()
        assert answer.status == status and "message" in json.loads(answer.read())["error"]
        connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(client, port, engine, stream):
    before = engine.tokens_written
    body = {"prompt": "a", "max_tokens": 250, "temperature": 0, "stream": stream}
    slow = engine._compute

    def compute(*step):
        time.sleep(0.02)
        return slow(*step)

    engine._compute = compute
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/v1/completions", json.dumps(body))
        if stream:
            assert connection.getresponse().read(10).startswith(b"data: {")
        while engine.tokens_written < before + 3:
            time.sleep(0.01)
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        assert _idle(engine) and engine.tokens_written < before + 200
    finally:
        engine._compute = slow
    assert client.completions.create(model="tiny", prompt="a", max_tokens=2).usage.completion_tokens == 2


def test_more_requests_than_slots_wait_and_too_many_are_refused(client, engine, expected, tokenizer):
    texts, refusals = {}, []

    def ask(n):
        try:
            answer = client.completions.create(model="tiny", prompt=f"{n}", max_tokens=40, temperature=0)
            texts[n] = answer.choices[0].text
        except openai.RateLimitError as error:
            refusals.append(error)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) + len(refusals) == 9 and len(texts) >= 4
    assert all(text == tokenizer.decode(expected(f"{n}", 40)) for n, text in texts.items())
    assert all("too many requests" in str(error) for error in refusals)
    assert _idle(engine)


def test_failures_are_answers(engine, client, monkeypatch):
    """A step that fails ends the requests in it with status 500, and later ones are served."""

    def failing(*step):
        raise jax.errors.JaxRuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_compute", failing)
        with pytest.raises(openai.InternalServerError, match="out of memory") as caught:
            client.completions.create(model="tiny", prompt="a", max_tokens=3)
        assert caught.value.status_code == 500
    good = engine.model
    engine.model = type(good).__call__ and jax.tree.map(
        lambda x: x * np.float32(np.nan) if getattr(x, "dtype", None) == jnp.float32 else x, good
    )
    with pytest.raises(openai.InternalServerError, match="logits are not finite"):
        client.completions.create(model="tiny", prompt="a", max_tokens=3)
    engine.model = good
    assert client.completions.create(model="tiny", prompt="a", max_tokens=3).usage.completion_tokens == 3


def test_an_engine_that_ends_leaves_nobody_waiting(tokenizer, monkeypatch):
    engine = make_engine("attention", 1, **SIZES)
    monkeypatch.setattr(engine, "step", lambda: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with serving(make_app(engine, tokenizer)) as port:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            for _ in range(2):
                with pytest.raises(openai.InternalServerError, match="the engine ended: division by zero"):
                    client.completions.create(model="model", prompt="a")
            with pytest.raises(openai.BadRequestError, match="no chat template"):
                client.chat.completions.create(model="model", messages=[{"role": "user", "content": "a"}])
