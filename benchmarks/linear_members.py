"""The linear-time family and its peers in one run: a process for each member, as `linear.py` for it alone. They compile at once and take turns on the
device.

    python benchmarks/linear_members.py --json linear.json
    python benchmarks/linear_members.py --problems 'B4 T4096|T65536' --time-limit 120 --json linear.json

Peers tune themselves briefly (`peers_tuning.tune_briefly`). Other options are those of `linear.py`, which also shows the result (`--render`).
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks import linear, report, turns
from benchmarks import linear_problems as problems

_EVERY = 1.0  # seconds


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", default="", metavar="REGEX", help="only problems whose name matches")
    parser.add_argument("--json", metavar="PATH", required=True)
    return parser.parse_known_args(arguments)


def chosen(member: str, problems: str) -> str:
    """A pattern of the problems with many tokens of a member whose name also matches this one."""
    return f"(?=.*({problems}))^{re.escape(member)} B"


def joined(parts: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The results of all members as those of one run, in the order of the problems."""
    order = {problem.name: n for n, problem in enumerate(problems.ANCHORS + problems.LONG)}
    rows = [row for part in parts for row in part["rows"]]
    rows.sort(key=lambda row: order.get(row["problem"], len(order)))
    summary = linear.summarise([linear.Row(**row) for row in rows])
    return {**parts[0], "rows": rows, "summary": summary, "seconds": seconds}


def _written(folder: pathlib.Path) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return [part for part in found if part.get("rows")]


def main(arguments: Sequence[str] | None = None) -> int:
    options, others = parse(arguments)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        environment = {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            turns.VARIABLE: str(folder / "turn"),
            **os.environ,
        }
        script = str(pathlib.Path(linear.__file__))
        workers = []
        for n, member in enumerate(problems.MEMBERS):
            given = ["--problems", chosen(member, options.problems), "--json", str(folder / f"{n}.json")]
            workers.append(subprocess.Popen([sys.executable, script, *given, *others], env=environment))
        running = True
        while running:
            time.sleep(_EVERY)
            running = any(worker.poll() is None for worker in workers)
            if parts := _written(folder):
                report.write_json(options.json, joined(parts, time.monotonic() - start))
    # A member of which no problem was chosen has measured nothing, which is no failure.
    codes = [worker.returncode for worker in workers]
    return 1 if any(code not in (0, 2) for code in codes) or set(codes) == {2} else 0


if __name__ == "__main__":
    raise SystemExit(main())
