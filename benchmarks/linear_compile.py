"""Compiles what the linear-time family's peers tune, in several processes; `linear.py` after it finds it in Triton's cache on disk and only times.

    python benchmarks/linear_compile.py --problems 'SSD|lightning' --directions forward && python benchmarks/linear.py --problems 'SSD|lightning'

Nothing is launched: in each process the peers run on memory without contents, and every kernel that they would tune or launch is compiled where
it is that process's turn.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax

from benchmarks import linear_peers as peers
from benchmarks import linear_problems as problems
from benchmarks import peers_tuning, turns
from benchmarks.linear_problems import LinearProblem
from benchmarks.prepare import DIRECTIONS


def run_peers(problem: LinearProblem, direction: str) -> None:
    """Calls every peer of the problem on memory without contents."""
    import torch

    inputs = jax.eval_shape(lambda: problems.make_inputs(problem))

    def empty(x: Any) -> Any:
        return torch.empty(x.shape, dtype=getattr(torch, str(x.dtype)), device="cuda")

    for peer in peers.peers_of(problem):
        if not peer.is_triton:
            continue
        backward = direction != "forward"
        learned = {name: empty(x).requires_grad_(backward) for name, x in inputs.learned.items()}
        out = peer.run(learned)
        if backward:
            torch.autograd.grad(out, list(learned.values()), empty(inputs.cotangent))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--problems", default="", metavar="REGEX", help="only problems whose name matches")
    add("--directions", default=",".join(DIRECTIONS), help="comma-separated (default: %(default)s)")
    add("--processes", type=int, default=os.cpu_count(), help="how many (default: one for each core)")
    add("--process", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if absent := peers.missing():
        print(f"nothing to compile for: {', '.join(absent)} not installed")
    if options.process is None:
        given = sys.argv[1:] if arguments is None else list(arguments)
        command = [sys.executable, __file__, *given, f"--processes={options.processes}"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        workers = [
            subprocess.Popen([*command, f"--process={i}"], env=environment) for i in range(options.processes)
        ]
        return max(worker.wait() for worker in workers)
    if turns.are_shared():
        peers_tuning.tune_briefly()
    peers_tuning.compile_only(options.process, options.processes)
    for direction in options.directions.split(","):
        for problem in problems.ANCHORS + problems.LONG:
            if re.search(options.problems, problem.name):
                start = time.monotonic()
                run_peers(problem, direction)
                if options.process == 0:
                    print(f"{problem.name}, {direction}: {time.monotonic() - start:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
