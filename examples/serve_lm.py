"""Serve a language model, saved by `train_lm.py` or published, with continuous batching: prompts of different lengths join at any time.

    python examples/train_lm.py                                  # once: writes runs/train_lm/checkpoint.ejx
    printf 'def \\nimport \\nclass ' | python examples/serve_lm.py --temperature 0.7  # one prompt per line, from standard input
    python examples/serve_lm.py --prompts prompts.txt --out texts.jsonl
    python examples/serve_lm.py --kv-dtype int8                  # keys and values take half the memory of bfloat16
    python examples/serve_lm.py --quantise int8                  # weights of linear layers and experts take half the memory of bfloat16
    python examples/serve_lm.py --temperature 0.7 --top-p 0.9 --seed 1
    python examples/serve_lm.py --model Qwen3-0.6B               # the published model in this folder

Texts are streamed to standard output in the order of their prompts; statistics go to standard error, and progress too if it is a terminal. Input
is read as fast as it is served. The engine is `ejkernel_eqx.serving.Engine`; `python -m ejkernel_eqx serve` is an HTTP server around it.
"""

import argparse
import concurrent.futures
import contextlib
import io
import os
import pathlib
import sys
import time
from typing import Any

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
from lora import merge_lora
from streams import MOST_LINES, Notes, open_out, OutputError, Prompts, Texts, TOO_LONG, TooLong
from tqdm import tqdm
from vocabulary import Vocabulary, vocabulary_of

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Sampling, Speculation
from ejkernel_eqx.serving import Engine, RequestError

NOT_FINITE = "the model's logits are not finite; check the checkpoint, or use --dtype float32"


def read_vocabulary(args: argparse.Namespace) -> Vocabulary:
    """The vocabulary of the model; converts `--stop` to a token."""
    try:
        vocabulary = vocabulary_of(args.checkpoint.parent if args.model is None else args.model)
    except ValueError as error:
        raise UsageError(f"--model: {error}") from error
    if args.stop is not None:
        tokens = vocabulary.encode(bytes([args.stop]), special=False)
        if len(tokens) != 1:
            raise UsageError(
                f"--stop: expected a byte that is one token of this model, received one that is {len(tokens)} tokens; omit it."
            )
        args.stop = tokens[0]
    return vocabulary


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


def make_engine(args: argparse.Namespace, model: Any) -> Engine:
    if args.quantise is not None:
        try:
            model = ejx.quantise(model, args.quantise)
        except ValueError as error:
            raise UsageError(f"--quantise: {error}") from error
    kv_dtype = None if args.kv_dtype == "auto" else args.kv_dtype
    speculate = Speculation(num_draft_tokens=args.num_draft_tokens) if args.num_draft_tokens else None
    sizes = {name: getattr(args, name) for name in serve_options.ENGINE_SIZES}
    try:
        return Engine(model, kv_dtype=kv_dtype, speculate=speculate, **sizes)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except jax.errors.JaxRuntimeError as error:
        raise UsageError(
            f"--num-pages: {args.num_pages} pages do not fit in memory; use fewer, or --kv-dtype int8. ({str(error).splitlines()[0]})"
        ) from error


class Server:
    """Passes prompts to the engine and its tokens to the texts."""

    def __init__(self, args: argparse.Namespace, engine: Engine, texts: Texts, bar: Any):
        self.args, self.engine, self.texts, self.bar = args, engine, texts, bar
        self.indices: dict[int, int] = {}  # of active requests, by their number in the engine
        self.received = self.refused = self.failed = 0
        self.computing = 0.0  # seconds
        self.computed = 0  # tokens

    @property
    def room(self) -> int:
        """How many prompts to take: as many as wait for a slot at a time, unless the texts wait for an earlier one."""
        most = self.engine.max_batch
        return max(0, min(most - self.engine.num_waiting, MOST_LINES * most - self.texts.open))

    def admit(self, prompts: list[bytes]) -> None:
        for prompt in prompts:
            index, self.received = self.received, self.received + 1
            self.bar.total = self.received
            self.texts.begin(index, prompt)
            # Each request has its own seed, so that equal prompts can have different continuations.
            seed = int(np.random.SeedSequence((self.args.seed, index)).generate_state(1)[0])
            sampling = Sampling(self.args.temperature, self.args.top_k, self.args.top_p, seed)
            try:
                if isinstance(prompt, TooLong):
                    raise RequestError(TOO_LONG)
                tokens, options = self.texts.tokens_of(index), {"sampling": sampling, "stop": self.args.stop}
                number = self.engine.submit(tokens, self.args.max_new_tokens, **options)
            except RequestError as error:
                self.refused += 1
                self.texts.end(index, "refused", str(error))
                self.bar.update()
            else:
                self.indices[number] = index
                self.texts.extend(index)

    def step(self) -> None:
        start = time.perf_counter()
        events = self.engine.step()
        self.computing += time.perf_counter() - start
        self.computed += sum(event.finish != "error" for event in events)
        for event in events:
            is_error = event.finish == "error"
            self.failed += is_error
            if not is_error:
                self.texts.extend(self.indices[event.request], event.token)
            if event.finish is not None:
                message = NOT_FINITE if is_error else None
                self.texts.end(self.indices.pop(event.request), event.finish, message)
        engine = self.engine
        numbers = {"tokens/s": self.speed, "running": engine.num_running, "waiting": engine.num_waiting}
        numbers |= {"pages": f"{engine.pages_used}/{engine.num_pages}"} if engine.num_pages else {}
        self.bar.set_postfix(numbers, refresh=False)
        self.bar.update(sum(event.finish is not None for event in events))

    def cancel_all(self) -> None:
        for number, index in self.indices.items():
            self.engine.cancel(number)
            self.texts.end(index, "cancelled")
        self.indices.clear()

    @property
    def speed(self) -> str:
        return f"{self.computed / self.computing:,.0f}" if self.computing else "?"

    def summary(self) -> str:
        engine = self.engine
        lines = [
            f"{self.received} requests, {self.refused} refused, {engine.tokens_written:,} tokens in {engine.steps:,} steps: "
            f"{self.speed} tokens/s",
            engine.speculate and f"{engine.drafts_accepted:,} of {engine.drafts_offered:,} drafts accepted",
            self.failed and f"{self.failed} ended with an error",
            engine.num_pages
            and f"pages: at most {engine.peak_pages} of {engine.num_pages} in use, {engine.pages_used} now",
            engine.preemptions
            and f"{engine.preemptions} preemptions: requests waited for pages and were recomputed",
        ]
        return "; ".join(filter(None, lines)) + "."


def serve(args: argparse.Namespace, engine: Engine, prompts: Prompts, texts: Texts) -> bool:
    """Serves all prompts; returns False if interrupted."""
    # On a terminal only: elsewhere it would stand among the texts.
    bar = tqdm(
        total=0, unit="request", desc="serving", dynamic_ncols=True, miniters=0, mininterval=0.2, disable=None
    )
    with interruptible() as interrupts, bar:
        server = Server(args, engine, texts, bar)
        while not interrupts:
            server.admit(prompts.take(server.room, wait=not server.indices))
            if server.indices:
                server.step()
            elif prompts.ended:
                break
        server.cancel_all()
    print(server.summary(), file=sys.stderr)
    return not interrupts


def parse(argv: list[str] | None) -> argparse.Namespace:
    return serve_options.parse(argv, __doc__)


def run(args: argparse.Namespace) -> int:
    serve_options.check_files(args)
    prompts = Prompts(args.prompts)
    inputs = (args.checkpoint, pathlib.Path(args.prompts))
    with contextlib.nullcontext() if args.out is None else open_out(args.out, *inputs) as out:
        texts = Texts(out, read_vocabulary(args))
        interrupted = not serve(args, start(args), prompts, texts)
    if prompts.failure is not None and not interrupted:
        raise UsageError(prompts.failure)
    return 130 if interrupted else 0


def start(args: argparse.Namespace) -> Engine:
    engine = make_engine(args, load_model(args))
    size, start = engine.state.caches.nbytes / 2**20, time.perf_counter()
    verifying = [] if engine.speculate is None else ["verify"]
    engine.warm_up("prompts", *(["decode and draw"] if args.temperature > 0 else ["decode", *verifying]))
    print(
        f"{args.dtype} on {jax.devices()[0].device_kind}, {size:,.1f} MiB of pages and states, up to {args.max_batch} concurrent sequences; "
        f"{len(engine.compiled)} programs ready after {time.perf_counter() - start:.1f} s",
        file=sys.stderr,
    )
    if args.prompts == "-" and sys.stdin.isatty():
        print("Type one prompt per line; Ctrl-D ends.", file=sys.stderr)
    return engine


def main(argv: list[str] | None = None) -> int:
    # Characters that standard output cannot encode become question marks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    with contextlib.redirect_stderr(Notes("standard error", sys.stderr)):  # pyright: ignore[reportArgumentType]
        try:
            return run(parse(argv))
        except (UsageError, ejx.EjkernelError) as error:
            print(f"serve_lm: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:  # before serving started, or the second time
            return 130
        except (OutputError, BrokenPipeError) as error:
            if isinstance(error, OutputError):  # else the reader of the texts has gone
                print(f"serve_lm: {error}", file=sys.stderr)
            drop_output()
            return 1


if __name__ == "__main__":
    sys.exit(main())
