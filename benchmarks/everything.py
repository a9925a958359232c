"""Reproduces every number of the documentation with one command on a machine with a GPU: tests, benchmarks and tuned tables.

    python -m benchmarks everything --output out                        # hours
    python -m benchmarks everything --output out --parts decode,linear --time-limit 1500
    python -m benchmarks everything --output out --quick                # tiny problems; also without a GPU

Each part runs in its own process. The remaining time is shared among the parts still to run. A part that exceeds its share is stopped, and
keeps what it has written. `OUT/everything.log` holds the output, `OUT/everything.json` how the parts ended, and `OUT/PART.json` the
measurements of a benchmark, for its `--render`; `OUT/tune-FAMILY.json` is the report of a tuning run and `OUT/table-FAMILY.json` its table.
With the same folder, tuning continues where it stopped. No part uses the tables in your cache folder.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.__main__ import FAMILIES as BENCHMARKS
from benchmarks.problems import FAMILIES
from ejkernel_eqx.dispatch.persistent import CACHE_DIR

HEAVY = "past_two or very_many or memory"
"""Tests that need tens of gigabytes of device memory; run one at a time."""

GRACE = 15.0
"""Seconds that a process has to end after each signal."""

_OWN_SHARE = 0.8  # fraction of a part's time after which a script starts no further problem
_NO_TESTS = 5  # pytest's exit code if no test is selected

STEPS = report.data("options")["steps"]
"""Other commands, by the name of their part."""


class Part(NamedTuple):
    """Commands that run in sequence. `skipped`: why they cannot run here; a command that `is_limited` receives its time limit."""

    commands: Sequence[Sequence[str]]
    files: Sequence[str] = ()
    skipped: str | None = None
    is_limited: bool = False
    ends_well: Sequence[int] = (0,)


# The parts


def parts(options: argparse.Namespace, gpu: bool) -> dict[str, Part]:
    """The parts by name, in the order in which they run; long ones come last."""
    skipped = None if gpu else "needs a GPU"
    small = None if options.quick else skipped
    entries = {"tests": Part(_tests(), skipped=skipped, ends_well=(0, _NO_TESTS))}
    for name in BENCHMARKS:
        entries[name] = _script(options, name, ("json", f"{name}.json"), is_limited=True)
    for name, (script, *more) in STEPS.items():
        entries[name] = _script(options, script, ("json", f"{name}.json"), more=more, skipped=small)
    for family in FAMILIES:
        more = ["--family", family]
        more += [] if gpu else ["--platform", "xla"]
        more += ["--candidates", "2", "--sample-ms", "1"] if options.quick else []
        written = ("json", f"tune-{family}.json"), ("output", f"table-{family}.json")
        entries[f"tune-{family}"] = _script(
            options, "tune", *written, more=more, skipped=small, is_limited=True
        )
    return entries


def _tests() -> list[list[str]]:
    """Each file of tests that need a GPU, in several processes; then the heavy tests, in one."""
    files = sorted((report.ROOT / "tests" / "gpu").glob("test_*_gpu.py"))
    # A plugin in some images warns about several processes, and warnings are errors.
    usual = [sys.executable, "-m", "pytest", "--tb=short", "-p", "no:cacheprovider", "-p", "no:benchmark"]

    def run(file: pathlib.Path, count: int, chosen: str) -> list[str]:
        return [*usual, "-n", str(count), "-k", chosen, str(file.relative_to(report.ROOT))]

    return [run(file, 6, f"not ({HEAVY})") for file in files] + [run(file, 1, HEAVY) for file in files]


def _script(
    options: argparse.Namespace, script: str, *written: tuple[str, str], more: Sequence[str] = (), **how: Any
) -> Part:
    """A command of this package, and what it writes; `how`: fields of the part."""
    command = [sys.executable, "-m", "benchmarks", script, *more]
    for option, name in written:
        command += [f"--{option}", str(options.output / name)]
    command += ["--commit", options.commit] if options.commit else []
    command += ["--quick"] if options.quick else []
    return Part([command], [name for _, name in written], **how)


# Running


class Ended(NamedTuple):
    """End of a command; `was_stopped`: it exceeded its time."""

    exit_code: int
    was_stopped: bool
    last_line: str


def run_command(command: Sequence[str], log: pathlib.Path, seconds: float, env: Mapping[str, str]) -> Ended:
    """Runs a command in its own process group, which is stopped as a whole; its output is appended to the log."""
    with log.open("ab") as output:
        output.write(f"\n$ {' '.join(command)}\n".encode())
        output.flush()
        start = output.tell()
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=report.ROOT, env=env, **pipes, start_new_session=True)
        stopped = False
        try:
            process.wait(None if math.isinf(seconds) else seconds)
        except subprocess.TimeoutExpired:
            stopped = True
        finally:
            stop(process)
    lines = _since(log, start).split("\n")
    return Ended(process.returncode, stopped, next((x for x in reversed(lines) if x.strip()), "")[:300])


def stop(process: subprocess.Popen) -> None:
    """Stops a running process and its children, first as from a keyboard, so that pytest can still report."""
    if process.poll() is not None:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(GRACE)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # remaining children


def _since(log: pathlib.Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def run_part(part: Part, log: pathlib.Path, seconds: float, env: Mapping[str, str]) -> dict[str, Any]:
    """Runs a part and says how it ended: the first unsuccessful exit code, or the reason if there is none."""
    start, ended = time.monotonic(), []
    for n, command in enumerate(part.commands):
        left = seconds - (time.monotonic() - start)
        if left <= 0:
            reason = f"no time left for {len(part.commands) - n} of {len(part.commands)} commands"
            break
        limit = ["--time-limit", f"{_OWN_SHARE * left:.0f}"] if part.is_limited and left < math.inf else []
        ended.append(run_command([*command, *limit], log, left, env))
        # A command that still ended successfully had finished its work.
        if ended[-1].was_stopped and ended[-1].exit_code not in part.ends_well:
            reason = f"stopped after {time.monotonic() - start:.0f} s"
            break
    else:
        reason = None
    codes = [one.exit_code for one in ended]
    failed = [code for code in codes if code not in part.ends_well]
    return {
        "exit_code": failed[0] if failed else 0 if codes else None,
        "failed": bool(failed) or reason is not None,
        "reason": reason,
        "seconds": time.monotonic() - start,
        "said": [one.last_line for one in ended],
    }


def environment(commit: str | None) -> dict[str, Any]:
    """Runs in a separate process, because a process that has used a GPU holds its memory."""
    code = "import json, sys; from benchmarks.report import environment; print(json.dumps(environment(sys.argv[1])))"
    command, env = [sys.executable, "-c", code, commit or ""], {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    result = subprocess.run(command, cwd=report.ROOT, env=os.environ | env, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"the device cannot be queried:\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


# The command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = report.parser("everything", __doc__)
    names = ", ".join(("tests", *BENCHMARKS, *STEPS, "tune-FAMILY"))
    parser.add_argument("--parts", help=f"comma-separated, of {names} (default: all)")
    options = parser.parse_args(arguments)
    options.output = options.output.resolve()
    known = list(parts(options, gpu=True))
    options.parts = known if options.parts is None else options.parts.split(",")
    if unknown := sorted(set(options.parts) - set(known)):
        parser.error(f"--parts: expected some of {', '.join(known)}, received {', '.join(unknown)}")
    return options


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        {"part": name} | result | {"files": " ".join(result["files"])} for name, result in results.items()
    ]
    return report.table_of("everything", rows)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if arguments is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)  # so that the running part is stopped too
    start = time.monotonic()
    options.output.mkdir(parents=True, exist_ok=True)
    log, summary = options.output / "everything.log", options.output / "everything.json"
    about = environment(options.commit)
    print(report.environment_line(about), flush=True)
    every = parts(options, about["platform"] == "gpu")
    chosen = {name: part for name, part in every.items() if name in options.parts}
    waiting = [name for name, part in chosen.items() if part.skipped is None]
    earlier = json.loads(summary.read_text(encoding="utf-8"))["parts"] if summary.is_file() else {}
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="ejkernel_eqx-everything-") as cache:
        env = os.environ | {CACHE_DIR.name: cache, "PYTHONUNBUFFERED": "1"}
        for n, (name, part) in enumerate(chosen.items()):
            began = time.monotonic() - start
            head = f"[{began:5.0f} s, {n + 1}/{len(chosen)}] {name}"
            if part.skipped is not None:
                reason = f"skipped: {part.skipped}"
                result = {"exit_code": None, "failed": False, "reason": reason, "seconds": 0.0, "said": []}
            else:
                share = (options.time_limit - began) / (len(waiting) - waiting.index(name))
                print(head if math.isinf(share) else f"{head}, {max(share, 0):.0f} s at most", flush=True)
                printed = log.stat().st_size if log.is_file() else 0
                result = run_part(part, log, share, env)
                if result["failed"] and log.is_file():
                    print("\n".join(_since(log, printed).splitlines()[-20:]), flush=True)
            result["files"] = [x for x in part.files if (options.output / x).is_file()]
            result |= {"device": about["device"], "commit": about["commit"], "date": report.now()}
            results[name] = result
            print(f"{head}: {_in_words(result)}", flush=True)
            content = {"schema": 1, "environment": about, "seconds": time.monotonic() - start}
            report.write_json(summary, content | {"parts": earlier | results})
    print(f"\n{table(results)}\nwrote {summary}")
    return 1 if any(result["failed"] for result in results.values()) else 0


def _in_words(result: Mapping[str, Any]) -> str:
    if result["reason"] is not None:
        return result["reason"]
    ended = f"exit code {result['exit_code']}" if result["failed"] else "done"
    return f"{ended} after {result['seconds']:.0f} s"


def _interrupt(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)
