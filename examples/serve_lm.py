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
import codecs
import concurrent.futures
import contextlib
import io
import json
import os
import pathlib
import queue
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

# A closed standard error would be the number of the next file that is opened.
if __name__ == "__main__" and sys.stderr is None:
    sys.stderr = open(os.devnull, "w", encoding="utf-8")

import jax

# The device starts in a thread while Python imports the rest, which takes about as long.
if __name__ == "__main__":
    concurrent.futures.ThreadPoolExecutor(1).submit(jax.devices)

import numpy as np
from architectures import cast
from console import drop_output, interruptible, UsageError
from lora import merge_lora
from tqdm import tqdm
from train_lm import make_state
from train_lm import parse as parse_train
from train_options import QUANTISED, SIZES
from vocabulary import Bytes, Vocabulary, vocabulary_of

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Sampling, Speculation
from ejkernel_eqx.serving import Engine, RequestError

KV_DTYPES = ["auto", "float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2"]
ESCAPES = {"\\n": 10, "\\r": 13, "\\t": 9, "\\0": 0, "\\\\": 92}
MOST_BYTES = 2**20  # of a line; no model that is served here reads so many tokens
MOST_LINES = 64  # read and not yet admitted
NOT_FINITE = "the model's logits are not finite; check the checkpoint, or use --dtype float32"


# Prompts and texts


class TooLong(bytes):
    """The beginning of a line that is too long to be a prompt."""


def split_lines(pieces: Iterable[bytes], most: int = MOST_BYTES) -> Iterator[bytes]:
    """The lines, without \\n or \\r\\n; text after the last line break counts as a line. One of more than `most` bytes is given as `TooLong` as soon
    as that is known, and the rest of it is dropped."""
    line, dropped = bytearray(), False
    for piece in pieces:
        parts = piece.split(b"\n")
        for place, part in enumerate(parts):
            line += b"" if dropped else part
            if len(line) > most:
                yield TooLong(line[:80])
                line, dropped = bytearray(), True
            if place + 1 < len(parts):
                if not dropped:
                    yield bytes(line.removesuffix(b"\r"))
                line, dropped = bytearray(), False
    if line:
        yield bytes(line.removesuffix(b"\r"))


class Prompts:
    """The lines of a file or of standard input, as they arrive. Nothing more is read while `MOST_LINES` of them wait here."""

    def __init__(self, path: str):
        self._lines: queue.Queue[bytes | None] = queue.Queue(MOST_LINES)
        self.ended = False
        self.failure: str | None = None  # the error if the input ended early
        if path == "-" and sys.stdin is None:
            raise UsageError("--prompts: standard input is closed; pass a file with one prompt per line.")
        # Avoid sys.stdin, whose lock a waiting thread would still hold when the process ends.
        try:
            file = open(0 if path == "-" else path, "rb", buffering=0, closefd=path != "-")
        except OSError as error:
            raise UsageError(
                f"--prompts: cannot read {path!r} ({error.strerror}); pass a file with one prompt per line, or - for standard input."
            ) from error
        name = "standard input" if path == "-" else repr(path)
        threading.Thread(target=self._follow, args=(file, name), daemon=True).start()

    def _follow(self, file: io.RawIOBase, name: str) -> None:
        try:
            for line in split_lines(iter(lambda: file.read(2**16) or b"", b"")):
                self._lines.put(line)
        except OSError as error:
            self.failure = (
                f"--prompts: cannot read {name} ({error.strerror}); pass a file with one prompt per line."
            )
        finally:
            file.close()
            self._lines.put(None)

    def take(self, most: int, wait: bool) -> list[bytes]:
        """At most so many of the lines received so far; with `wait`, waits briefly for one."""
        lines = []
        try:
            while len(lines) < most and not self.ended:
                line = self._lines.get(wait and not lines, 0.2)
                self.ended = line is None
                lines += [] if line is None else [line]
        except queue.Empty:
            pass
        return lines


class OutputError(Exception):
    """Texts cannot be written."""


class Output:
    """A stream for texts: each is written at once, and an error says which stream it is."""

    def __init__(self, name: str, stream: TextIO):
        self.name, self.stream = name, stream

    def write(self, text: str) -> None:
        with self.writing():
            self.stream.write(text)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around what writes to the stream."""
        try:
            yield
            self.stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(
                f"{self.name}: cannot write ({error.strerror}); make room, or write elsewhere."
            ) from error

    def flush(self) -> None:
        """Everything is written already."""


class Notes(Output):
    """Standard error: what is said there ends nothing, even if nobody can read it."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self.stream.write(text)
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Texts:
    """Writes each prompt with its continuation, in the order of the prompts. The first one is streamed; the next ones follow when it ends."""

    def __init__(self, out: Output | None, vocabulary: Vocabulary | None = None):
        self._out, self._vocabulary = out, vocabulary or Bytes()
        self._screen = Output("standard output", sys.stdout)
        self._entries: dict[int, dict[str, Any]] = {}
        self._first = 0
        self._shown = 0  # the number of bytes written of the first one
        self._decoder = _decoder()
        # A progress bar would overwrite the beginning of a line, so only whole lines are written next to one.
        self._whole_lines = sys.stdout.isatty() and sys.stderr.isatty()
        self._line = ""

    def begin(self, index: int, prompt: bytes) -> None:
        tokens = [] if isinstance(prompt, TooLong) else self._vocabulary.encode(prompt)
        entry = {"prompt": prompt, "begin": tokens, "tokens": [], "finish": None}
        self._entries[index] = entry | {"message": None}

    @property
    def open(self) -> int:
        """The number of texts that are not yet written to the end."""
        return len(self._entries)

    def tokens_of(self, index: int) -> list[int]:
        """The tokens of a prompt."""
        return self._entries[index]["begin"]

    def extend(self, index: int, *tokens: int) -> None:
        self._entries[index]["tokens"] += tokens
        if index == self._first:
            self._show()

    def end(self, index: int, finish: str, message: str | None = None) -> None:
        entry = self._entries[index]
        entry |= {"finish": finish, "message": message}
        if self._out is not None:
            parts = {"prompt": entry["prompt"], "text": self._text(entry)}
            texts = {name: part.decode(errors="replace") for name, part in parts.items()}
            record = {"request": index, **texts, "tokens": len(entry["tokens"]), "finish": finish}
            self._out.write(json.dumps(record | ({} if message is None else {"message": message})) + "\n")
        self._show()

    def _text(self, entry: dict[str, Any]) -> bytes:
        """The text after the prompt. A tokenizer may merge the first token with the text before it, so both are decoded together."""
        before = len(self._vocabulary.decode(entry["begin"]))
        return self._vocabulary.decode([*entry["begin"], *entry["tokens"]])[before:]

    def _show(self) -> None:
        while (entry := self._entries.get(self._first)) is not None:
            if self._shown == 0:
                self._write(f"--- request {self._first} ---\n")
            refused = entry["finish"] == "refused"
            content = f"[{entry['message']}]".encode() if refused else entry["prompt"] + self._text(entry)
            self._write(self._decoder.decode(content[self._shown :]))
            self._shown = max(len(content), 1)
            if entry["finish"] is None:
                return
            self._write(self._decoder.decode(b"", final=True) + "\n")
            if entry["finish"] in ("cancelled", "error"):
                self._write(f"[{entry['message'] or entry['finish']}]\n")
            del self._entries[self._first]
            self._first, self._shown, self._decoder = self._first + 1, 0, _decoder()

    def _write(self, text: str) -> None:
        if self._whole_lines:
            *lines, self._line = (self._line + text).split("\n")
            for line in lines:
                with self._screen.writing():
                    tqdm.write(line, file=sys.stdout)
        else:
            self._screen.write(text)


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


# Serving


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
    train_args = parse_train([] if args.platform is None else ["--platform", args.platform])
    try:
        state = ejx.load(args.checkpoint, lambda architecture: make_state(train_args, architecture))
    except (ValueError, TypeError) as error:
        raise UsageError(f"--checkpoint: {error}") from error
    return cast(merge_lora(state.model), args.dtype)


def make_engine(args: argparse.Namespace, model: Any) -> Engine:
    if args.quantise is not None:
        try:
            model = ejx.quantise(model, args.quantise)
        except ValueError as error:
            raise UsageError(f"--quantise: {error}") from error
    names = ("num_pages", "page_size", "max_batch", "step_tokens", "max_length")
    kv_dtype = None if args.kv_dtype == "auto" else args.kv_dtype
    speculate = Speculation(num_draft_tokens=args.num_draft_tokens) if args.num_draft_tokens else None
    sizes = {name: getattr(args, name) for name in names}
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
        args = self.args
        for prompt in prompts:
            index, self.received = self.received, self.received + 1
            self.bar.total = self.received
            self.texts.begin(index, prompt)
            # Each request has its own seed, so that equal prompts can have different continuations.
            seed = int(np.random.SeedSequence((args.seed, index)).generate_state(1)[0])
            sampling = Sampling(args.temperature, args.top_k, args.top_p, seed)
            try:
                if isinstance(prompt, TooLong):
                    raise RequestError(
                        f"prompt: expected a line of at most {MOST_BYTES:,} bytes, received a longer one; shorten it."
                    )
                number = self.engine.submit(
                    self.texts.tokens_of(index), args.max_new_tokens, sampling=sampling, stop=args.stop
                )
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
            if event.finish == "error":
                self.failed += 1
                self.texts.end(self.indices.pop(event.request), "error", NOT_FINITE)
                continue
            self.texts.extend(self.indices[event.request], event.token)
            if event.finish is not None:
                self.texts.end(self.indices.pop(event.request), event.finish)
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
            f"{self.speed} tokens/s"
        ]
        if engine.speculate is not None:
            lines += [f"{engine.drafts_accepted:,} of {engine.drafts_offered:,} drafts accepted"]
        if self.failed:
            lines += [f"{self.failed} ended with an error"]
        if engine.num_pages:
            lines += [
                f"pages: at most {engine.peak_pages} of {engine.num_pages} in use, {engine.pages_used} now"
            ]
        if engine.preemptions:
            lines += [f"{engine.preemptions} preemptions: requests waited for pages and were recomputed"]
        return "; ".join(lines) + "."


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


# The command line


def one_byte(text: str) -> int:
    """Parses `--stop`: a character, or an escape such as \\n."""
    if text in ESCAPES:
        return ESCAPES[text]
    if match := re.fullmatch(r"\\x([0-9a-fA-F]{2})", text):
        return int(match[1], 16)
    data = os.fsencode(text)
    if len(data) != 1 or text == "\\":
        raise argparse.ArgumentTypeError(
            f"expected one byte, such as . or one of {' '.join(ESCAPES)} \\x7f, received {text}"
        )
    return data[0]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--checkpoint", type=pathlib.Path, default=pathlib.Path("runs/train_lm/checkpoint.ejx"))
    add(
        "--model",
        type=pathlib.Path,
        metavar="FOLDER",
        help="folder of a published model to serve instead (config.json, safetensors, tokenizer.json)",
    )
    add("--prompts", default="-", help="a file with one prompt per line; - is standard input (the default)")
    add(
        "--out",
        type=pathlib.Path,
        help="also write JSON lines to this file, one for each request when it ends",
    )
    add(
        "--max-new-tokens",
        type=int,
        default=100,
        help="tokens to generate for each prompt (bytes for a byte-level model)",
    )
    add(
        "--stop",
        type=one_byte,
        help="end a text at this byte, e.g. '\\n', or its token; default: the model's stop tokens",
    )
    add("--temperature", type=float, default=0.0, help="0 (the default) takes the most likely token")
    add("--top-k", type=int, default=0, help="sample from this many most likely tokens; 0 for all")
    add(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the most likely tokens whose probabilities sum to this",
    )
    add("--seed", type=int, default=0)
    add("--max-batch", type=int, default=8, help="maximum number of concurrent sequences")
    add("--step-tokens", type=int, default=128, help="tokens per step, of decodes and prompts together")
    add("--page-size", type=int, default=16, help="tokens per page")
    add("--num-pages", type=int, default=512)
    add(
        "--max-length",
        type=int,
        help="maximum tokens of a request with its prompt (default: what all pages hold)",
    )
    add(
        "--num-draft-tokens",
        type=int,
        default=0,
        help="tokens looked up in each text and verified in a step; 0 (the default) for none",
    )
    add(
        "--kv-dtype", choices=KV_DTYPES, default="auto", help="of keys and values; 8-bit dtypes are quantised"
    )
    add(
        "--quantise",
        choices=QUANTISED,
        help="round the weights of linear layers and of experts to 8 or 4 bits",
    )
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the computation")
    add("--platform", help="kernel platform, e.g. triton or xla (default: chosen by device)")
    args = parser.parse_args(argv)
    platforms = [platform.value for platform in ejx.Platform]
    if args.platform not in (None, *platforms):
        raise UsageError(f"--platform: expected one of {', '.join(platforms)}, received {args.platform!r}.")
    if args.dtype == "auto":
        args.dtype = SIZES["cpu" if jax.default_backend() == "cpu" else "accelerator"]["dtype"]
    names = ("max_new_tokens", "max_batch", "step_tokens", "page_size", "num_pages", "max_length")
    for name in names:
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')}: expected a positive number, received {value}.")
    for name in ("seed", "num_draft_tokens"):
        if (value := getattr(args, name)) < 0:
            raise UsageError(f"--{name.replace('_', '-')}: expected at least 0, received {value}.")
    try:
        Sampling(args.temperature, args.top_k, args.top_p)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return args


@contextlib.contextmanager
def open_out(path: pathlib.Path, *inputs: pathlib.Path) -> Iterator[Output]:
    if any(path.exists() and other.exists() and path.samefile(other) for other in inputs):
        raise UsageError(
            f"--out: expected a file other than the inputs, received {str(path)!r}; pass another."
        )
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out: cannot write {str(path)!r} ({error.strerror}); check the path.") from error
    try:
        yield Output(f"--out {str(path)!r}", file)
    finally:
        with contextlib.suppress(OSError):  # of a text that could not be written, which is known
            file.close()


def run(args: argparse.Namespace) -> int:
    if sys.stdout is None:
        raise UsageError("standard output is closed; redirect it to a file, or to /dev/null with --out.")
    if args.model is not None and not (args.model / "tokenizer.json").is_file():
        raise UsageError(
            f"--model: expected the folder of a published model, but {str(args.model)!r} has no tokenizer.json; download all files of the model."
        )
    if args.model is None and not args.checkpoint.is_file():
        raise UsageError(
            f"--checkpoint: there is no file {str(args.checkpoint)!r}; make one with examples/train_lm.py, or pass the path of an existing one."
        )
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
        except OutputError as error:
            print(f"serve_lm: {error}", file=sys.stderr)
            drop_output()
            return 1
        except BrokenPipeError:  # the reader of the texts has gone
            drop_output()
            return 1


if __name__ == "__main__":
    sys.exit(main())
