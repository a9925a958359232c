"""The ASGI application: `/v1/models`, `/v1/completions` and `/v1/chat/completions`."""

import asyncio
import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from ..._errors import require
from ...models import Sampling
from ..engine import Engine
from ..requests import read_integer, RequestError
from ..text import ByteTokenizer, ChatTemplate, TextStream, Tokenizer
from .worker import Worker

_WHO = "ejkernel_eqx.serving.server"
requests, responses = (require(f"starlette.{name}", _WHO, "server") for name in ("requests", "responses"))
applications, routing = (require(f"starlette.{name}", _WHO, "server") for name in ("applications", "routing"))

_MOST_BODY, _MOST_STOPS, _MOST_STOP = 2**22, 16, 256
_ONLY: dict[str, Any] = {"n": 1, "best_of": 1, "echo": False, "logprobs": False, "suffix": "", "tools": []}
_ONLY |= {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
}
"""The values of parameters that have no others here, and null stands for."""


class _Error(Exception):
    """An error, as an answer in OpenAI's form."""

    def __init__(self, message: str, status: int = 400, code: str | None = None):
        kind = "invalid_request_error" if status < 500 else "server_error"
        param = message.partition(":")[0] if status == 400 and ":" in message else None
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        super().__init__(message)


@dataclasses.dataclass
class _Call:
    """A request of a client, and the text that was generated for it."""

    chat: bool
    model: str
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop: list[str]
    stream: bool
    include_usage: bool
    generated: int = 0
    identity: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16))
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def body(self, *choices: dict[str, Any], usage: bool = False, chunk: bool = False) -> dict[str, Any]:
        kind = "chat.completion" + ".chunk" * chunk if self.chat else "text_completion"
        body: dict[str, Any] = {"id": ("chatcmpl-" if self.chat else "cmpl-") + self.identity, "object": kind}
        body |= {"created": self.created, "model": self.model, "choices": list(choices)}
        if usage:
            prompt, new = len(self.prompt), self.generated
            body["usage"] = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return body

    def choice(self, text: str, finish: str | None, chunk: bool, first: bool = True) -> dict[str, Any]:
        message = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
        content = {"delta" if chunk else "message": message} if self.chat else {"text": text}
        return {"index": 0, **content, "finish_reason": finish, "logprobs": None}


class _Server:
    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | ByteTokenizer,
        template: ChatTemplate | None,
        name: str,
        most: int,
    ):
        self.worker, self.tokenizer, self.template, self.name = Worker(engine), tokenizer, template, name
        self.engine, self.most_requests, self.started = engine, most, int(time.time())

    async def models(self, request: Any) -> Any:
        model = {"id": self.name, "object": "model", "created": self.started, "owned_by": "ejkernel_eqx"}
        return responses.JSONResponse({"object": "list", "data": [model]})

    async def completions(self, request: Any) -> Any:
        body, chat = await _json_of(request), "chat" in request.url.path
        try:
            call = await asyncio.to_thread(self.read, body, chat)
        except ValueError as error:
            raise _Error(str(error)) from error
        if self.worker.active >= self.most_requests:
            raise _Error("too many requests wait; try again later", 429)
        pieces = self.pieces(call)
        if not call.stream:
            texts, ends = zip(*await _unless_gone(request, _collect(pieces)))
            return responses.JSONResponse(call.body(call.choice("".join(texts), ends[-1], False), usage=True))
        first = await _unless_gone(request, anext(pieces))  # an error up to here has a status of its own
        return responses.StreamingResponse(_events(call, first, pieces), media_type="text/event-stream")

    def read(self, body: dict[str, Any], chat: bool) -> _Call:
        """Checks a request, and converts its prompt to tokens."""
        if body.setdefault("model", self.name) != self.name:
            raise _Error(f"model: expected {self.name!r}, received {body['model']!r}", 404, "model_not_found")
        for name, known in _ONLY.items():
            if body.get(name) not in (None, known):
                raise _Error(f"{name}: expected {known!r}, received {body[name]!r}; omit it.")
        get = lambda name, default: default if body.get(name) is None else body[name]
        defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        numbers = {name: get(name, default) for name, default in defaults.items()}
        seed = read_integer("seed", get("seed", secrets.randbits(32)), -(2**63), 2**64) % 2**32
        stop = [get("stop", [])] if isinstance(get("stop", []), str) else get("stop", [])
        short = isinstance(stop, list) and all(isinstance(s, str) and 0 < len(s) <= _MOST_STOP for s in stop)
        if not short or len(stop) > _MOST_STOPS:
            raise _Error(f"stop: expected up to {_MOST_STOPS} texts of 1 to {_MOST_STOP} characters.")
        options = get("stream_options", {})
        usage = isinstance(options, dict) and bool(options.get("include_usage"))
        prompt = self.chat_prompt(body.get("messages")) if chat else self.prompt(body.get("prompt"))
        limit = get("max_completion_tokens", get("max_tokens", None))
        if limit is None:
            limit = max(1, self.engine.max_length - len(prompt)) if chat else 16
        limit, sampling = read_integer("max_tokens", limit, 1), Sampling(**numbers, seed=seed)
        return _Call(chat, self.name, prompt, limit, sampling, stop, get("stream", False) is True, usage)

    def prompt(self, prompt: Any) -> list[int]:
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            (prompt,) = prompt
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        is_token = lambda token: (
            isinstance(token, int) and 0 <= token < 2**31
        )  # the engine knows the vocabulary
        if not isinstance(prompt, list) or not all(map(is_token, prompt)):
            raise _Error("prompt: expected one text or one list of tokens, received something else.")
        return prompt

    def chat_prompt(self, messages: Any) -> list[int]:
        if self.template is None:
            raise _Error("messages: this model has no chat template; use /v1/completions.")
        if not isinstance(messages, list) or not messages:
            raise _Error("messages: expected a list of at least one message with role and content.")
        return self.tokenizer.encode(self.template.render([*map(_message, messages)]), special=False)

    async def pieces(self, call: _Call) -> AsyncIterator[tuple[str, str | None]]:
        """Text as it comes, and with the last piece why it ends."""
        text: TextStream = self.tokenizer.stream(call.prompt, call.stop)
        events = self.worker.generate(call.prompt, call.max_tokens, sampling=call.sampling)
        try:
            async with contextlib.aclosing(events):  # pyright: ignore[reportArgumentType]
                async for event in events:
                    if event.finish == "error":
                        raise _Error("the model's logits are not finite; check its weights", 500)
                    call.generated += 1
                    piece = "" if event.finish == "stop" else text.push(event.token)
                    finish = "stop" if text.stopped else event.finish
                    if finish is not None:
                        yield piece + text.end(), finish
                        return
                    if piece:
                        yield piece, None
        except (RequestError, RuntimeError) as error:
            raise _Error(str(error), 400 if isinstance(error, RequestError) else 500) from error


async def _json_of(request: Any) -> dict[str, Any]:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BODY:
            raise _Error(f"expected a body of at most {_MOST_BODY:,} bytes, received a longer one", 413)
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _Error("expected a body of JSON, received none that can be read") from error
    if not isinstance(content, dict):
        raise _Error("expected a JSON object")
    return content


def _message(message: Any) -> dict[str, Any]:
    """A message whose content is one string."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _Error("messages: expected objects with a role and a content.")
    content = message.get("content")
    if isinstance(content, list):
        parts: Any = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else content
    if not isinstance(content, str | None):
        raise _Error("messages: expected a content of text; other parts are not supported.")
    return message | {"content": content or ""}


async def _collect(pieces: AsyncIterator[Any]) -> list[Any]:
    return [piece async for piece in pieces]


async def _unless_gone(request: Any, work: Awaitable[Any]) -> Any:
    """The result of the work, which is cancelled if the client leaves."""

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(leave())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _Error("the client has left", 499)
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _events(call: _Call, first: tuple[str, str | None], pieces: Any) -> AsyncIterator[str]:
    """Server-sent events."""
    line = lambda body: f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
    async with contextlib.aclosing(pieces):
        yield line(call.body(call.choice(*first, chunk=True), chunk=True))
        try:
            async for text, finish in pieces:
                yield line(call.body(call.choice(text, finish, chunk=True, first=False), chunk=True))
        except _Error as error:
            yield line(error.body)
        else:
            if call.include_usage:
                yield line(call.body(usage=True, chunk=True))
            yield "data: [DONE]\n\n"


def _refuse(request: Any, error: Any) -> Any:
    return responses.JSONResponse(error.body, error.status)


def make_app(
    engine: Engine,
    tokenizer: Tokenizer | ByteTokenizer,
    template: ChatTemplate | None = None,
    *,
    name: str = "model",
    max_requests: int = 1024,
) -> Any:
    """Makes an ASGI application that serves an engine. Nothing else may call the engine while it runs.

    **Arguments:**

    - `engine`: an `ejx.serving.Engine`.
    - `tokenizer`: the tokenizer of its model.
    - `template`: the chat template of its model. Without one, `/v1/chat/completions` is refused.
    - `name`: the name of the model in requests and answers.
    - `max_requests`: the maximum number of requests at once, waiting ones included. Further ones are refused with status 429.
    """
    server = _Server(engine, tokenizer, template, name, max_requests)
    post = lambda path: routing.Route(f"/v1/{path}", server.completions, methods=["POST"])
    routes = [routing.Route("/v1/models", server.models), post("completions"), post("chat/completions")]
    return applications.Starlette(
        routes=routes, exception_handlers={_Error: _refuse}, lifespan=server.worker.running
    )


def run(app: Any, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serves an application with uvicorn until it is interrupted."""
    require("uvicorn", _WHO, "server").run(app, host=host, port=port, log_level="warning")
