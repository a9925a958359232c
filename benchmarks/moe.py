"""Grouped matmuls compared with PyTorch's `_grouped_mm`, if installed, and `lax.ragged_dot`.

    python benchmarks/moe.py --json moe.json --plot moe.png
    python benchmarks/moe.py --problems 'E64' --time-limit 300
    python benchmarks/moe.py --quick                                # tiny problems
    python benchmarks/moe.py --render moe.json --plot moe.png --markdown moe.md

Every result of ours is first compared with the float32 reference on this device and at full size; speeds are reported only if the results
agree. The output and the gradient of each side are measured apart. Peers receive the same data in the same run; PyTorch is timed as CUDA
graphs, without Python's launch overhead. Gates, gathered rows and right sides in 8 bits have no peer.
"""

import argparse
import dataclasses
import functools
import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax

from benchmarks import command
from benchmarks import moe_problems as problems
from benchmarks.linear_plot import plot as plot_bars
from benchmarks.measure import launch_floor, torch_work
from benchmarks.moe_problems import Arrays, DIRECTIONS, Inputs, LEFT, MoeProblem
from benchmarks.prepare import (
    Attempt,
    fastest,
    finite,
    input_sets,
    measure_rows,
    nbytes,
    PeerRow,
    prepare,
    Prepared,
    ratio,
    worst,
)

OURS = ("default", "triton", "xla")


@dataclasses.dataclass
class Row(PeerRow):
    """One implementation of one problem in one direction. `reason` is set if there is no time; `ratio` is the time of the fastest peer
    divided by this one's. `bytes`: the minimum that must be read and written."""

    bytes: int | None = None
    flops: float | None = None
    tflop_per_s: float | None = None
    tb_per_s: float | None = None

    @property
    def speed(self) -> str:
        return f"{self.ms:.3f} ms, {self.tflop_per_s:.1f} TFLOP/s{self.over_peer}"


Implementation = Callable[[Sequence[Inputs], str], Prepared]


def in_jax(forward: problems.Forward) -> Implementation:
    return lambda sets, direction: prepare(problems.direction_of(forward, direction), sets)


def in_torch(sets: Sequence[Inputs], direction: str) -> Prepared:
    """PyTorch's grouped product, of the transposed sides for the gradients."""
    import torch

    jax.block_until_ready(sets)

    def tensors(inputs: Inputs) -> tuple[Any, ...]:
        given = (inputs.learned["lhs"], inputs.learned["rhs"], inputs.cotangent)
        ends = torch.from_dlpack(inputs.constants["group_sizes"]).cumsum(0).to(torch.int32)
        return (*(torch.from_dlpack(x).clone() for x in given), ends)

    def run(lhs: Any, rhs: Any, dout: Any, ends: Any) -> Any:
        if direction == "forward":
            return torch._grouped_mm(lhs, rhs, offs=ends)
        if direction == LEFT:
            return torch._grouped_mm(dout, rhs.transpose(-2, -1), offs=ends)
        return torch._grouped_mm(lhs.transpose(-2, -1), dout, offs=ends)

    torch_sets = [tensors(inputs) for inputs in sets]
    found = run(*torch_sets[0])
    torch.cuda.synchronize()
    name = {"forward": "out", LEFT: "lhs"}.get(direction, "rhs")
    results = {name: jax.numpy.from_dlpack(found.contiguous())}
    return Prepared(results, lambda runs: torch_work(run, torch_sets, runs))


def implementations(
    problem: MoeProblem, options: argparse.Namespace
) -> Iterator[tuple[str, bool, Implementation]]:
    """The name of each implementation, whether it is a peer, and how to prepare it."""
    for platform in options.platforms:
        yield platform, False, in_jax(problems.ours(problem, None if platform == "default" else platform))
    if problem.is_plain:
        yield "lax.ragged_dot", True, in_jax(problems.ragged_dot)
        if options.torch:
            yield "torch._grouped_mm", True, in_torch


# Measuring


def least_bytes(problem: MoeProblem, inputs: Inputs, direction: str) -> int:
    """The bytes of reading every input once and writing every result once."""
    left, out = nbytes(inputs.learned["lhs"]), nbytes(inputs.cotangent)
    right = nbytes([x for name, x in inputs.learned.items() if name != "lhs"])
    right += nbytes([x for name, x in inputs.constants.items() if name.startswith(("rhs", "up"))])
    # A gradient of a gated product reads the other sides too.
    again = 0 if direction == "forward" or not problem.gated else {LEFT: left}.get(direction, right)
    return left + right + out + again


def measure(problem: MoeProblem, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of a problem, by direction."""
    sets = input_sets(functools.partial(problems.make_inputs, problem))
    expected, floor = problems.expected_results(problem, sets[0]), launch_floor(sets[0])
    for direction in problem.directions:
        least = least_bytes(problem, sets[0], direction)
        attempts = (
            Attempt(
                Row(problem.name, direction, name, is_peer, bytes=least, flops=problem.flops),
                functools.partial(make_ready, sets, direction),
            )
            for name, is_peer, make_ready in implementations(problem, options)
        )
        rows = measure_rows(attempts, functools.partial(_check, problem, expected), options, floor)
        peer = fastest(row for row in rows if row.is_peer)
        for row in rows:
            row.tb_per_s = least / row.ms / 1e9 if row.ms else None
            row.tflop_per_s = problem.flops / row.ms / 1e9 if row.ms else None
            row.ratio = ratio(peer, row)
        yield rows


def _check(problem: MoeProblem, expected: Mapping[str, Arrays], row: Row, results: Arrays) -> str | None:
    """The error in the results, if any."""
    errors, wrong = problems.errors_of(problem, row.direction, results, expected)
    row.errors = finite(errors)
    return wrong


def unmeasured(problem: MoeProblem, reason: str) -> list[Row]:
    return [Row(problem.name, way, "default", False, reason=reason) for way in problem.directions]


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The lowest ratio of ours in each direction, the largest temporary memory over inputs and results, and what skewed groups cost."""
    summary: dict[str, dict[str, Any]] = {}
    for direction in DIRECTIONS:
        mine = [row for row in rows if row.direction == direction and not row.is_peer]
        if lowest := worst(mine):
            summary[f"lowest ratio, {direction}"] = lowest
        if known := [row for row in mine if row.temporary_bytes is not None and row.bytes]:
            most = max(known, key=_memory)
            summary[f"most temporary memory, {direction}"] = {"value": _memory(most), "problem": most.problem}
        even = {(row.problem, row.implementation): row.ms for row in mine if row.ms}
        for row in mine:
            other = even.get((row.problem.replace(" skewed", ""), row.implementation))
            if " skewed" in row.problem and row.ms and other:
                key = f"time over that of even groups, {direction}"
                found = {"value": row.ms / other, "problem": row.problem}
                summary[key] = max(summary.get(key, found), found, key=lambda entry: entry["value"])
    return summary


def _memory(row: Row) -> float:
    """Temporary memory divided by that of inputs and results."""
    return (row.temporary_bytes or 0) / (row.bytes or 1)


# Showing


HEADER = (
    "problem",
    "implementation",
    "platform",
    "ms",
    "spread",
    "TFLOP/s",
    "TB/s",
    "temporary",
    "ratio",
    "error",
)


TABLES = command.Tables(
    HEADER,
    DIRECTIONS,
    "temporary: memory over inputs and results; ratio: speed over the fastest peer's",
    "Speed of grouped matmuls over their peers",
)


# The command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser(__doc__)
    command.add_platforms(parser, OURS, "default")
    command.add_torch(parser)
    return command.parse(parser, arguments)


def choose(options: argparse.Namespace) -> list[MoeProblem]:
    """The problems in order of importance, so that a time limit omits the least important ones."""
    on_cpu = jax.default_backend() == "cpu"
    chosen = problems.TINY if options.quick else problems.CPU if on_cpu else problems.ANCHORS
    return command.matching(chosen, options)


def about(options: argparse.Namespace, chosen: Sequence[MoeProblem]) -> dict[str, Any]:
    on_gpu = jax.default_backend() != "cpu"
    missing = ["torch"] if on_gpu and importlib.util.find_spec("torch") is None else []
    for package in missing:
        print(f"peer omitted: {package} is not installed")
    return {"missing": missing}


def sum_up(rows: Sequence[Row], chosen: Sequence[MoeProblem]) -> dict[str, Any]:
    return {"summary": summarise(rows)}


def plot(content: Mapping[str, Any], path: str) -> None:
    plot_bars(content, path, "Grouped matmuls")


BENCHMARK = command.Benchmark("moe", about, measure, unmeasured, sum_up, TABLES.text, TABLES.markdown, plot)


def main(arguments: Sequence[str] | None = None) -> int:
    return command.main(BENCHMARK, parse(arguments), choose)


if __name__ == "__main__":
    # Leaves memory for PyTorch on the same GPU; a pool allocated at the start keeps allocations out of the times.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    raise SystemExit(main())
