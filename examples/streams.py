"""What `serve_lm.py` reads and writes: prompts as they arrive, and texts in the order of their prompts."""

import codecs
import contextlib
import io
import json
import pathlib
import queue
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from console import UsageError
from tqdm import tqdm
from vocabulary import Bytes, Vocabulary

MOST_BYTES = 2**20  # of a line; no model that is served here reads so many tokens
TOO_LONG = f"prompt: expected a line of at most {MOST_BYTES:,} bytes, received a longer one; shorten it."
MOST_LINES = 64  # read and not yet admitted


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
