"""Serving by the example `serve_lm.py`: the command line on a checkpoint."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from .conftest import SMALL
from .test_examples import run, start

SIZES = "--max-new-tokens 12 --num-pages 24 --page-size 4 --max-batch 4 --step-tokens 16".split()


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
    options = ["--checkpoint", checkpoint, *SIZES, *"--temperature 0.8 --top-p 0.9".split()]
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


def test_texts_appear_in_the_order_of_their_requests(examples, capsys):
    screen = examples.serve_lm.InOrder()
    screen.write(0, "a")
    screen.write(1, "b")
    screen.write(2, "c", ends=True)
    screen.write(0, "A")
    assert capsys.readouterr().out == "aA" and screen.open == 3
    screen.write(0, ".", ends=True)
    assert capsys.readouterr().out == ".b"
    screen.write(1, "B", ends=True)
    assert capsys.readouterr().out == "Bc" and screen.open == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--checkpoint /no/such/file", "--checkpoint: there is no file '/no/such/file'; make one with"),
        ("--checkpoint FILE", "--checkpoint: "),
        ("--prompts /no/such/file", "--prompts: cannot read '/no/such/file' (No such file or directory)"),
        ("--max-batch 0", "--max-batch: expected a positive number, received 0"),
        ("--num-draft-tokens -1", "--num-draft-tokens: expected at least 0, received -1"),
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


def test_a_stop_string_may_be_escaped(examples, capsys):
    parse = lambda text: examples.serve_lm.parse(["--stop", text]).stop
    assert [parse(text) for text in ("\\n\\n", "ab", "\N{EURO SIGN}é")] == ["\n\n", "ab", "\N{EURO SIGN}é"]
    with pytest.raises(SystemExit):
        parse("\\x1")
    assert "expected a text or escapes" in capsys.readouterr().err


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


def test_requests_share_a_prefix(examples, capsys):
    """And the last one is cancelled."""
    examples.serving.main([])
    *texts, cancelled, summary = (lines := capsys.readouterr().out.splitlines())
    assert "request 4: cancelled" in lines and len(texts) == 4 and cancelled
    numbers = [int(word) for word in re.findall(r"\d+", summary)]
    assert numbers[0] >= 64 and numbers[2] < numbers[3]
