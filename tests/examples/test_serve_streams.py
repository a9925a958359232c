"""Serving: what `examples/serve_lm.py` reads and writes, and how much of it at a time."""

import io
import os
import pathlib
import subprocess
import sys

import pytest

from tests.serving.engines import check_empty, make_engine

from .test_examples import environment, programs, ROOT
from .test_serve import SIZES


@pytest.fixture(scope="module")
def engine():
    return make_engine("attention", 1)


def lines_of(examples, pieces, most):
    too_long = examples.streams.TooLong
    return [(line, isinstance(line, too_long)) for line in examples.streams.split_lines(iter(pieces), most)]


def all_of(prompts):
    lines = []
    while not prompts.ended:
        lines += prompts.take(100, wait=True)
    return lines


@pytest.mark.parametrize("size", [1, 3, 100])
def test_lines_are_the_same_in_any_pieces(examples, size):
    content = b"one\r\ntwo\rstill two\n\n" + b"x" * 50 + b"\nnext\r\n" + b"y" * 17 + b"\nlast\r"
    pieces = [content[i : i + size] for i in range(0, len(content), size)]
    expected = [(b"one", False), (b"two\rstill two", False), (b"", False), (b"next", False), (b"last", False)]
    found = lines_of(examples, pieces, 16)
    assert [line for line in found if not line[1]] == expected
    too_long = [(line[:17], place) for place, (line, long) in enumerate(found) if long]
    assert too_long == [(b"x" * 17, 3), (b"y" * 17, 5)]


def test_a_line_that_is_too_long_is_known_before_it_ends(examples):
    pieces = iter([b"a\n" + b"x" * 20, b"x", *([b"y"] * 10), b"\nb"])
    lines = examples.streams.split_lines(pieces, 20)
    assert next(lines) == b"a" and next(lines) == b"x" * 21
    assert next(pieces) == b"y"  # nothing more was asked for
    assert list(lines) == [b"b"]


def test_a_file_and_a_pipe_give_the_same_lines(examples, tmp_path):
    content = b"one\r\ntwo\n\nlast"
    (tmp_path / "prompts.txt").write_bytes(content)
    expected = [b"one", b"two", b"", b"last"]
    assert all_of(examples.streams.Prompts(str(tmp_path / "prompts.txt"))) == expected
    reading, writing = os.pipe()
    prompts = examples.streams.Prompts(f"/dev/fd/{reading}")
    os.write(writing, content)
    assert prompts.take(1, wait=True) == [b"one"] and not prompts.ended
    os.close(writing)
    os.close(reading)
    assert all_of(prompts) == expected[1:] and prompts.failure is None


@pytest.mark.skipif(
    not os.path.exists("/proc/self/mem"), reason="Linux has this file, whose first byte nobody can read"
)
def test_an_input_that_ends_early_is_reported(examples):
    prompts = examples.streams.Prompts("/proc/self/mem")
    assert all_of(prompts) == []
    assert prompts.failure.startswith("--prompts: cannot read '/proc/self/mem' (Input/output error); pass")


def test_no_more_is_read_than_is_served(examples):
    """What waits is bounded, however much comes."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    prompts = examples.streams.Prompts(f"/dev/fd/{reading}")
    line, written = b"x" * 1023 + b"\n", 0
    # Waiting lines, the piece they are from, the pipe.
    held = (examples.streams.MOST_LINES * 2**10, 2**16, 2**16)
    # The pipe is full for good once the thread that reads it waits with a line in its hand.
    while not (prompts._lines.full() and written >= sum(held[:1])):
        try:
            written += os.write(writing, line)
        except BlockingIOError:
            pass
        assert written <= sum(held) + 2**16
    while written <= sum(held) + 2**16:
        try:
            written += os.write(writing, line)
        except BlockingIOError:
            break
    assert written <= sum(held)
    os.close(writing)
    os.close(reading)
    assert len(all_of(prompts)) == -(-written // 1024)


class Endless:
    """Prompts that always have one more, until enough have been taken."""

    ended, failure = False, None

    def __init__(self, engine, count):
        self.engine, self.left, self.waiting = engine, count, []

    def take(self, most, wait):
        self.waiting.append(self.engine.num_waiting + most)
        lines = [b"ab"] * min(most, self.left)
        self.left -= len(lines)
        self.ended = not self.left
        return lines


def serve(examples, engine, prompts, *options):
    args = examples.serve_lm.parse(["--max-new-tokens", "3", *options])
    return examples.serve_lm.serve(args, engine, prompts, examples.streams.Texts(None))


def test_endless_prompts_are_admitted_as_they_are_served(examples, engine, capsys):
    prompts = Endless(engine, 40)
    assert serve(examples, engine, prompts)
    assert max(prompts.waiting) <= engine.max_batch
    texts = capsys.readouterr()
    assert texts.out.count("--- request") == 40
    # Without a terminal there is no progress, which would stand among the texts.
    assert "\r" not in texts.err and texts.err.startswith("40 requests, 0 refused, 120 tokens")
    check_empty(engine)


def test_texts_that_wait_for_an_earlier_one_are_bounded(examples, engine):
    args = examples.serve_lm.parse([])
    texts = examples.streams.Texts(None)
    server = examples.serve_lm.Server(args, engine, texts, bar=None)
    assert server.room == engine.max_batch
    for index in range(examples.streams.MOST_LINES * engine.max_batch - 1):
        texts.begin(index, b"a")
    assert server.room == 1


def test_a_line_that_is_too_long_is_refused(examples, engine, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_bytes(b"x" * (2**20 + 2**17) + b"\nab\n")
    prompts = examples.streams.Prompts(str(tmp_path / "prompts.txt"))
    assert serve(examples, engine, prompts)
    out = capsys.readouterr().out
    assert out.startswith("--- request 0 ---\n[prompt: expected a line of at most 1,048,576 bytes, received")
    assert "--- request 1 ---\nab" in out
    check_empty(engine)


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has this file")
def test_texts_that_cannot_be_written(examples, monkeypatch):
    streams = examples.streams
    with pytest.raises(streams.OutputError, match=r"--out '/dev/full': cannot write \(No space left"):
        with streams.open_out(pathlib.Path("/dev/full")) as out:
            out.write("x")
    monkeypatch.setattr(sys, "stdout", Full())
    texts = streams.Texts(None)
    texts.begin(0, b"a")
    with pytest.raises(streams.OutputError, match="standard output: cannot write"):
        texts.extend(0, 65)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has this file")
@pytest.mark.parametrize(
    ("redirected", "message"),
    [
        (">/dev/full", "serve_lm: standard output: cannot write (No space left on device)"),
        ("2>&-", None),
        ("2>/dev/full", None),
    ],
)
def test_streams_of_a_process(checkpoint, redirected, message):
    example = ROOT / "examples" / "serve_lm.py"
    command = [sys.executable, "-W", "error", str(example), "--checkpoint", str(checkpoint), *SIZES]
    process = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirected}', "sh", *command],
        input=b"ab\ncd\n",
        capture_output=True,
        timeout=300,
        env=environment() | programs() | {"PYTHONPATH": str(ROOT / "src")},
    )
    assert process.returncode == (message is not None) and b"Traceback" not in process.stderr
    if message is not None:
        assert process.stderr.decode().splitlines()[-1].startswith(message)
    else:
        assert process.stdout.startswith(b"--- request 0 ---\nab") and not process.stderr
        assert b"--- request 1 ---\ncd" in process.stdout
