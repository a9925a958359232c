"""Arguments, help, exit codes; one real process."""

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import jax
import pytest

import ejkernel_eqx
from tests.cli.kernels import OPERATION
from tests.cli.parts import main, output

SOURCE = str(pathlib.Path(ejkernel_eqx.__file__).parents[1])


@pytest.mark.slow
def test_a_real_process_prints_one_document(folder):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": SOURCE, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "ejkernel_eqx", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["problems"] == []
    assert document["device"]["backend"] == "cpu" and document["device"]["kind"] == "cpu"
    assert document["versions"]["jax"] == jax.__version__
    assert document["cache"]["folder"] == str(folder) and not folder.exists()


@pytest.mark.parametrize("command", [(), ("tune",), ("cache",), ("cache", "import"), ("bench",)])
def test_help_shows_what_to_type(run, command):
    code, out, _ = run(*command, "--help")
    assert code == output.OK
    assert f"usage: python -m ejkernel_eqx {' '.join(command)}".rstrip() in out
    assert command == ("cache",) or "example" in out


MISTAKES = {
    "": "COMMAND",
    "tun": "invalid choice: 'tun'",
    "tune @": "--shape",
    "tune @ --shape N": "received 'N'",
    "tune @ --shape N=0": "received 'N=0'",
    "tune @ --shape N=1,N=2": "received N twice",
    "tune @ --shape ,": "received ','",
    "tune @ --shape M=4": "--shape M=4: dims: expected N, received ['M']",
    "tune @ --shape N=4 --flag =1": "received '=1'",
    "tune @ --shape N=4 --flag a --flag a=1": "received a twice",
    "tune @ --shape N=4 --dtype float64": "JAX_ENABLE_X64=1",
    "tune @ --shape N=4 --dtype int8": "invalid choice: 'int8'",
    "tune @ --shape N=4 --budget -1": "received '-1'",
    "tune @ --shape N=4 --max-candidates many": "invalid positive int value: 'many'",
    "tune @ --shape N=4 --platform cobol": "received 'cobol'",
    "tune @ --shape N=4 --platform triton": "received 'triton'",
    "tune @ --shape N=4 --import no_such_kernels": "received 'no_such_kernels'",
    "tune no_such_operation --shape N=4": "received 'no_such_operation'",
    "bench no_such_operation --shape N=4": "received 'no_such_operation'",
    "cache show 0123": "received '0123', which matches none of 0",
    "cache import no_such_file.json": "received 'no_such_file.json'",
    "report page.txt": "received 'page.txt'",
    "cache export no_such_folder/all.json": "no_such_folder/all.json",
}
"""What is typed, with `@` for the operation, and what is said about it."""


@pytest.mark.parametrize("typed", MISTAKES)
def test_mistakes_are_told_and_end_with_two(run, typed):
    code, out, err = run(*typed.replace("@", OPERATION).split())
    assert (code, out) == (output.USAGE, "")
    assert err.startswith("error: ") and MISTAKES[typed] in err and "Traceback" not in err


def test_a_mistake_is_a_document_too(run_json):
    code, document = run_json("tune", OPERATION, "--shape", "N")
    assert code == document["exit_code"] == output.USAGE
    assert "--shape: expected sizes such as B=4,T=4096" in document["error"]


def test_what_cannot_run_does_not_stop_the_rest(run, run_json):
    shapes = ("--shape", "N=2000", "--shape", "N=3000", "--dtype", "float32")
    code, out, _ = run("tune", OPERATION, *shapes)
    assert code == output.FAILED and out.count("FAILED: ") == 2 and "takes N up to 1000" in out
    code, document = run_json("tune", OPERATION, *shapes)
    assert code == output.FAILED and [r["problem"]["dims"]["N"] for r in document["results"]] == [2000, 3000]
    assert all("takes N up to 1000" in r["error"] for r in document["results"])


def test_tables_fit_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "42")
    rows = [("one", "1.5", "word " * 20), ("two", "10.25", "")]
    text = output.section("title", output.table(("name", "ms", "why"), rows, right=("ms",)))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 42
    assert lines[0] == "title" and lines[1].startswith("  name     ms  why")
    assert lines[3].startswith("  one     1.5  word") and lines[-1] == "  two   10.25"
    assert text.count("word") == 20
    # A word is broken only where nothing else helps.
    long = "a_name_of_thirty_characters_or"
    assert long in output.table(("name", "why"), [(long, "some words that can be broken")])
    monkeypatch.setenv("COLUMNS", "30")
    text = output.table(("name", "why"), [(long, "some words that can be broken")])
    assert long not in text and max(map(len, text.splitlines())) <= 28
    dashes, *body = text.splitlines()[1:]
    assert "".join(line[: dashes.index(" ")].strip() for line in body) == long


NUMBERS = {0.0123456: "0.01235", 1.5: "1.500", 123.456: "123.5", 123456.0: "123456", 0.0: "0.000"}


@pytest.mark.parametrize(("value", "shown"), [*NUMBERS.items(), (None, "-"), (float("inf"), "-")])
def test_numbers_have_four_digits(value, shown):
    assert output.number(value) == shown


def test_json_holds_no_infinity():
    text = output.write_json({"a": [float("inf"), 1.5], 2: (True, pathlib.Path("x"))})
    assert json.loads(text) == {"a": [None, 1.5], "2": [True, "x"]}


def test_missing_sizes_are_named_with_an_example(run):
    code, _, err = run("tune", "flash_attention", "--shape", "B=1,T=2")
    assert code == output.USAGE
    assert "--shape B=1,T=2: dims: expected sizes for T, H, D" in err and "missing ['H', 'D']" in err
    assert "for example T=2,H=16,D=128,B=1" in err


@pytest.mark.parametrize("program", ["-m", "/somewhere/bin/ejkernel-eqx"])
def test_version(run, monkeypatch, program):
    monkeypatch.setattr(sys, "argv", [program])
    code, out, _ = run("--version")
    assert code == output.OK and out == f"ejkernel-eqx {ejkernel_eqx.__version__}\n"
    assert re.fullmatch(r"\d+(\.\d+)+\S*|0\+unknown", ejkernel_eqx.__version__)
    name = "ejkernel-eqx" if "/" in program else "python -m ejkernel_eqx"
    assert f"usage: {name} [-h]" in run("--help")[1]


def test_the_script_starts_the_command_line():
    text = (pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    target = tomllib.loads(text)["project"]["scripts"]["ejkernel-eqx"]
    module, _, name = target.partition(":")
    assert getattr(importlib.import_module(module), name) is main
