"""Serve a language model, saved by `train_lm.py` or published, with continuous batching: prompts of different lengths join at any time.

    python examples/train_lm.py                                  # once: writes runs/train_lm/checkpoint.ejx
    printf 'def \\nimport \\nclass ' | python examples/serve_lm.py --temperature 0.7  # one prompt per line, from standard input
    python examples/serve_lm.py --prompts prompts.txt --out texts.jsonl
    python examples/serve_lm.py --kv-dtype int8                  # keys and values take half the memory of bfloat16
    python examples/serve_lm.py --quantise int8                  # weights of linear layers and experts take half the memory of bfloat16
    python examples/serve_lm.py --temperature 0.7 --top-p 0.9 --seed 1
    python examples/serve_lm.py --model Qwen3-0.6B               # the published model in this folder

Texts are streamed to standard output in the order of their prompts. Statistics go to standard error. Input is read as fast as it is served. The
engine is `ejkernel_eqx.serving.Engine`; `python -m ejkernel_eqx serve` is an HTTP server around it.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import io
import json
import os
import queue
import sys
import threading
import time
from typing import Any, TextIO

# A closed standard error would be the number of the next file that is opened.
if __name__ == "__main__" and sys.stderr is None:
    sys.stderr = open(os.devnull, "w", encoding="utf-8")

import jax

# The device starts in a thread while Python imports the rest, which takes about as long.
if __name__ == "__main__":
    concurrent.futures.ThreadPoolExecutor(1).submit(jax.devices)

import numpy as np
import serve_options
import train_lm
from architectures import cast
from console import drop_output, interruptible, UsageError
from tqdm import tqdm
from training_text import tokenizer_of

import ejkernel_eqx as ejx
from ejkernel_eqx.models import merge_lora, Sampling, Speculation
from ejkernel_eqx.serving import Engine, RequestError
from ejkernel_eqx.serving.text import TextStream

NOT_FINITE = "the model's logits are not finite; check the checkpoint, or use --dtype float32"
MOST_BYTES = 2**20  # of a line; a longer one is read in parts of this size
MOST_LINES = 64  # read and not yet admitted


class Prompts:
    """The lines of a file or of standard input, as they arrive. Nothing more is read while `MOST_LINES` of them wait here."""

    def __init__(self, path: str):
        self._lines: queue.Queue[str | None] = queue.Queue(MOST_LINES)
        self.ended = False
        self.failure: str | None = None  # the error if the input ended early
        if path == "-" and sys.stdin is None:
            raise UsageError("--prompts: standard input is closed; pass a file with one prompt per line.")
        self._name = "standard input" if path == "-" else repr(path)
        try:  # not sys.stdin, whose lock a waiting thread would still hold when the process ends
            file = open(0 if path == "-" else path, "rb", closefd=path != "-")
        except OSError as error:
            raise UsageError(self._cannot_read(error)) from error
        threading.Thread(target=self._follow, args=(file,), daemon=True).start()

    def _cannot_read(self, error: OSError) -> str:
        reason = f"--prompts: cannot read {self._name} ({error.strerror})"
        return f"{reason}; pass a file with one prompt per line, or - for standard input."

    def _follow(self, file: io.BufferedReader) -> None:
        try:
            for line in iter(lambda: file.readline(MOST_BYTES), b""):
                self._lines.put(line.decode(errors="replace").rstrip("\r\n"))
        except OSError as error:
            self.failure = self._cannot_read(error)
        finally:
            file.close()
            self._lines.put(None)

    def take(self, most: int, wait: bool) -> list[str]:
        """At most this many of the lines received so far. With `wait`, it waits briefly for one."""
        lines = []
        with contextlib.suppress(queue.Empty):
            while len(lines) < most and not self.ended:
                line = self._lines.get(wait and not lines, 0.2)
                self.ended = line is None
                lines += [] if line is None else [line]
        return lines


class InOrder:
    """Writes texts to standard output in the order of their requests. The first one streams. The next follows when it ends."""

    def __init__(self):
        self._pieces: dict[int, str] = {}  # not yet written
        self._ended: set[int] = set()
        self._first = 0

    @property
    def open(self) -> int:
        """The number of texts that are not yet written to the end."""
        return len(self._pieces)

    def write(self, index: int, piece: str, *, ends: bool = False) -> None:
        self._pieces[index] = self._pieces.get(index, "") + piece
        self._ended |= {index} if ends else set()
        while self._first in self._pieces:
            print(self._pieces[self._first], end="", flush=True)
            self._pieces[self._first] = ""
            if self._first not in self._ended:
                return
            del self._pieces[self._first]
            self._ended.remove(self._first)
            self._first += 1


@dataclasses.dataclass
class Request:
    """A prompt and its text so far."""

    index: int
    prompt: str
    stream: TextStream
    text: str = ""
    tokens: int = 0


class Server:
    """Passes prompts to the engine and its tokens to the texts."""

    def __init__(self, args: argparse.Namespace, engine: Engine, tokenizer: Any, out: TextIO | None):
        self.args, self.engine, self.tokenizer, self.out = args, engine, tokenizer, out
        self.screen, self.requests = InOrder(), dict[int, Request]()  # by their number in the engine
        self.received = self.refused = self.failed = self.tokens = 0
        self.seconds = 0.0

    @property
    def room(self) -> int:
        """The number of prompts to take: as many as run at a time may wait, and texts that wait for an earlier one are bounded, too."""
        most = self.engine.max_batch
        return max(0, min(most - self.engine.num_waiting, MOST_LINES * most - self.screen.open))

    def admit(self, prompt: str) -> None:
        index, self.received = self.received, self.received + 1
        tokens, stop = self.tokenizer.encode(prompt), self.args.stop
        request = Request(index, prompt, self.tokenizer.stream(tokens, [] if stop is None else [stop]))
        # Each request has its own seed, so that equal prompts can have different continuations.
        seed = int(np.random.SeedSequence((self.args.seed, index)).generate_state(1)[0])
        sampling = Sampling(self.args.temperature, self.args.top_k, self.args.top_p, seed)
        self.screen.write(index, f"--- request {index} ---\n")
        try:
            number = self.engine.submit(tokens, self.args.max_new_tokens, sampling=sampling)
        except RequestError as error:
            self.refused += 1
            self.end(request, "refused", str(error))
        else:
            self.requests[number] = request
            self.screen.write(index, prompt)

    def step(self) -> None:
        start = time.perf_counter()
        events = self.engine.step()
        self.seconds += time.perf_counter() - start
        for event in events:
            if (request := self.requests.get(event.request)) is None:
                continue  # it has met its stop string
            if event.finish == "error":
                self.failed += 1
            else:
                self.tokens, request.tokens = self.tokens + 1, request.tokens + 1
                self.extend(request, request.stream.push(event.token))
            finish = "stop" if request.stream.stopped else event.finish
            if finish is not None:
                self.engine.cancel(event.request)  # which does not know the stop string
                self.end(self.requests.pop(event.request), finish, NOT_FINITE if finish == "error" else None)

    def extend(self, request: Request, piece: str) -> None:
        request.text += piece
        self.screen.write(request.index, piece)

    def end(self, request: Request, finish: str, message: str | None = None) -> None:
        self.extend(request, request.stream.end())
        shown = message or ("cancelled" if finish == "cancelled" else None)
        line = "" if shown is None else f"[{shown}]\n"
        self.screen.write(request.index, line if finish == "refused" else f"\n{line}", ends=True)
        if self.out is not None:
            record = {"request": request.index, "prompt": request.prompt, "text": request.text}
            record |= {"tokens": request.tokens, "finish": finish} | ({"message": message} if message else {})
            print(json.dumps(record), file=self.out, flush=True)

    def cancel_all(self) -> None:
        for number, request in self.requests.items():
            self.engine.cancel(number)
            self.end(request, "cancelled")
        self.requests.clear()

    @property
    def speed(self) -> str:
        return f"{self.tokens / self.seconds:,.0f} tokens/s" if self.seconds else "? tokens/s"

    def summary(self) -> str:
        engine = self.engine
        lines = [
            f"{self.received} requests, {self.refused} refused, {engine.tokens_written:,} tokens in {engine.steps:,} steps: {self.speed}",
            engine.speculate and f"{engine.drafts_accepted:,} of {engine.drafts_offered:,} drafts accepted",
            self.failed and f"{self.failed} ended with an error",
            engine.num_pages
            and f"pages: at most {engine.peak_pages} of {engine.num_pages} in use, {engine.pages_used} now",
            engine.preemptions
            and f"{engine.preemptions} preemptions: requests waited for pages and were recomputed",
        ]
        return "; ".join(filter(None, lines)) + "."


def serve(server: Server, prompts: Any) -> bool:
    """Serves all prompts; returns False if interrupted."""
    # Where the texts are in the same terminal, they are the progress.
    quiet = not sys.stderr.isatty() or sys.stdout.isatty()
    bar = tqdm(unit="request", desc="serving", dynamic_ncols=True, mininterval=0.2, disable=quiet)
    with interruptible() as interrupts, bar:
        while not interrupts:
            for prompt in prompts.take(server.room, wait=not server.requests):
                server.admit(prompt)
            if server.requests:
                server.step()
            elif prompts.ended:
                break
            bar.set_postfix_str(f"{server.speed}, {server.engine.num_running} running", refresh=False)
            bar.update(server.received - len(server.requests) - bar.n)
        server.cancel_all()
    print(server.summary(), file=sys.stderr)
    return not interrupts


def load_model(args: argparse.Namespace) -> Any:
    if args.model is not None:
        return ejx.models.from_pretrained(args.model, dtype=args.dtype, platform=args.platform)
    # The file contains the optimiser's state; its settings do not matter here.
    train_args = train_lm.parse([] if args.platform is None else ["--platform", args.platform])
    try:
        state = ejx.load(args.checkpoint, lambda architecture: train_lm.make_state(train_args, architecture))
    except (ValueError, TypeError) as error:
        raise UsageError(f"--checkpoint: {error}") from error
    return cast(merge_lora(state.model), args.dtype)


def make_engine(args: argparse.Namespace) -> Engine:
    model = load_model(args)
    kv_dtype = None if args.kv_dtype == "auto" else args.kv_dtype
    speculate = Speculation(num_draft_tokens=args.num_draft_tokens) if args.num_draft_tokens else None
    sizes = {name: getattr(args, name) for name in serve_options.ENGINE_SIZES}
    try:
        if args.quantise is not None:
            model = ejx.quantise(model, args.quantise)
        engine = Engine(model, kv_dtype=kv_dtype, speculate=speculate, **sizes)
        size = engine.state.caches.nbytes / 2**20
    except ValueError as error:
        raise UsageError(str(error)) from error
    except jax.errors.JaxRuntimeError as error:
        raise UsageError(
            f"--num-pages: {args.num_pages} pages do not fit in memory; use fewer, or --kv-dtype int8. ({str(error).splitlines()[0]})"
        ) from error
    start, verifying = time.perf_counter(), [] if speculate is None else ["verify"]
    engine.warm_up("prompts", *(["decode and draw"] if args.temperature > 0 else ["decode", *verifying]))
    print(
        f"{args.dtype} on {jax.devices()[0].device_kind}, {size:,.1f} MiB of pages and states, up to {args.max_batch} concurrent sequences; "
        f"{len(engine.compiled)} programs ready after {time.perf_counter() - start:.1f} s",
        file=sys.stderr,
    )
    return engine


def parse(argv: list[str] | None) -> argparse.Namespace:
    return serve_options.parse(argv, __doc__)


def run(args: argparse.Namespace) -> int:
    serve_options.check_files(args)
    prompts = Prompts(args.prompts)
    try:
        tokenizer = tokenizer_of(args.checkpoint.parent if args.model is None else args.model)
    except ValueError as error:
        raise UsageError(f"--model: {error}") from error
    if args.prompts == "-" and sys.stdin.isatty():
        print("Type one prompt per line; Ctrl-D ends.", file=sys.stderr)
    with contextlib.nullcontext() if args.out is None else args.out.open("w", encoding="utf-8") as out:
        interrupted = not serve(Server(args, make_engine(args), tokenizer, out), prompts)
    if prompts.failure is not None and not interrupted:
        raise UsageError(prompts.failure)
    return 130 if interrupted else 0


def main(argv: list[str] | None = None) -> int:
    # Characters that standard output cannot encode become question marks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        return run(parse(argv))
    except (UsageError, ejx.EjkernelError) as error:
        print(f"serve_lm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before serving started, or the second time
        return 130
    except OSError as error:  # a full disk, or a reader of the texts that has gone
        print(f"serve_lm: {error}; make room, or write elsewhere.", file=sys.stderr)
        drop_output()
        return 1


if __name__ == "__main__":
    sys.exit(main())
