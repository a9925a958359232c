"""Serving: what `examples/serve_lm.py` reads and writes, and how much of it at a time."""

import os
import subprocess
import sys

import pytest

from ejkernel_eqx.serving.text import ByteTokenizer
from tests.serving.engines import check_empty, make_engine

from .test_examples import environment, programs, ROOT
from .test_serve import SIZES


@pytest.fixture(scope="module")
def engine():
    return make_engine("attention", 1)


def all_of(prompts):
    lines = []
    while not prompts.ended:
        lines += prompts.take(100, wait=True)
    return lines


def test_a_file_and_a_pipe_give_the_same_lines(examples, tmp_path):
    content = "one\r\ntwo é\n\nlast".encode()
    (tmp_path / "prompts.txt").write_bytes(content)
    expected = ["one", "two é", "", "last"]
    assert all_of(examples.serve_lm.Prompts(str(tmp_path / "prompts.txt"))) == expected
    reading, writing = os.pipe()
    prompts = examples.serve_lm.Prompts(f"/dev/fd/{reading}")
    os.write(writing, content)
    assert prompts.take(1, wait=True) == ["one"] and not prompts.ended
    os.close(writing)
    os.close(reading)
    assert all_of(prompts) == expected[1:] and prompts.failure is None


@pytest.mark.skipif(
    not os.path.exists("/proc/self/mem"), reason="Linux has this file, whose first byte nobody can read"
)
def test_an_input_that_ends_early_is_reported(examples):
    prompts = examples.serve_lm.Prompts("/proc/self/mem")
    assert all_of(prompts) == []
    assert prompts.failure is not None
    assert prompts.failure.startswith("--prompts: cannot read '/proc/self/mem' (Input/output error); pass")


def test_no_more_is_read_than_is_served(examples):
    """What waits is bounded, however much comes."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    prompts = examples.serve_lm.Prompts(f"/dev/fd/{reading}")
    line, written = b"x" * 1023 + b"\n", 0
    # Waiting lines, what is read ahead of them, the pipe.
    held = (examples.serve_lm.MOST_LINES * 2**10, 2**18, 2**16)
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
        lines = ["ab"] * min(most, self.left)
        self.left -= len(lines)
        self.ended = not self.left
        return lines


def server_of(examples, engine, *options):
    args = examples.serve_lm.parse(["--max-new-tokens", "3", *options])
    return examples.serve_lm.Server(args, engine, ByteTokenizer(), None)


def test_endless_prompts_are_admitted_as_they_are_served(examples, engine, capsys):
    prompts = Endless(engine, 40)
    assert examples.serve_lm.serve(server_of(examples, engine), prompts)
    assert max(prompts.waiting) <= engine.max_batch
    texts = capsys.readouterr()
    assert texts.out.count("--- request") == 40
    # Without a terminal there is no progress, which would stand among the texts.
    assert "\r" not in texts.err and texts.err.startswith("40 requests, 0 refused, 120 tokens")
    check_empty(engine)


def test_texts_that_wait_for_an_earlier_one_are_bounded(examples, engine):
    server = server_of(examples, engine)
    assert server.room == engine.max_batch
    for index in range(1, examples.serve_lm.MOST_LINES * engine.max_batch):
        server.screen.write(index, "a")
    assert server.room == 1


def test_a_line_that_is_too_long_is_refused(examples, engine, tmp_path, capsys):
    """It is read in parts, so that it takes no more memory than a part."""
    (tmp_path / "prompts.txt").write_bytes(b"x" * (2**20 + 2**17) + b"\nab\n")
    prompts = examples.serve_lm.Prompts(str(tmp_path / "prompts.txt"))
    assert examples.serve_lm.serve(server_of(examples, engine), prompts)
    out = capsys.readouterr().out
    assert out.startswith("--- request 0 ---\n[prompt: expected at most")
    assert "--- request 2 ---\nab" in out
    check_empty(engine)


def test_a_text_ends_before_its_stop_string(examples, engine, capsys):
    """Even if a token holds its end alone, and the next requests get the pages at once."""
    whole = server_of(examples, engine)
    whole.admit("ab")
    while whole.requests:
        whole.step()
    new = capsys.readouterr().out.removeprefix("--- request 0 ---\nab").removesuffix("\n")
    server = server_of(examples, engine, "--stop", new[1:].encode("unicode_escape").decode())
    server.admit("ab")
    while server.requests:
        server.step()
    assert capsys.readouterr().out == f"--- request 0 ---\nab{new[0]}\n" and len(new) == 3
    check_empty(engine)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has this file")
@pytest.mark.parametrize(
    ("redirected", "message"),
    [
        (">/dev/full", "serve_lm: [Errno 28] No space left on device; make room"),
        ("2>&-", None),
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
