"""Compares the configurations of a kernel: checks every candidate of the tuner, then times them in turn in one run.

    python benchmarks/sweep.py --problems 'prefill N1|selective scan B4' --json sweep.json
    python benchmarks/sweep.py --problems 'latent H128' --candidates 6 --time-limit 120
    python benchmarks/sweep.py --quick                              # tiny problems, anywhere
    python benchmarks/sweep.py --render sweep.json

Problems are those of `decode.py` and `linear.py`. The tuner times most candidates only briefly and reports the best one; this shows how all
of them compare with each other, and with the baselines of `decode.py`. Several candidates are compiled at a time.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax

import ejkernel_eqx as ejx
from benchmarks import command, decode, decode_peers, report
from benchmarks import decode_problems as paged
from benchmarks import linear_problems as recurrent
from benchmarks.measure import launch_floor
from benchmarks.prepare import Attempt, DIRECTIONS, input_sets, measure_rows, Measured, prepare, Prepared
from ejkernel_eqx.dispatch import device_facts, on_selection, Selection, to_dict

Problem = paged.DecodeProblem | recurrent.LinearProblem
_AT_ONCE = max(1, (os.cpu_count() or 2) - 1)


@dataclasses.dataclass
class Row(Measured):
    """One candidate or baseline of one problem; `implementation` has the fields that differ between candidates. `ratio`: speed relative to
    the heuristic."""

    problem: str
    direction: str
    implementation: str
    is_candidate: bool
    errors: dict[str, float | None] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.problem}, {self.direction}, {self.implementation}"

    @property
    def is_ours(self) -> bool:
        return self.is_candidate

    @property
    def speed(self) -> str:
        return f"{self.ms:.4f} ms"


# The candidates


def candidates(call: Callable[[Any], Any], inputs: Any) -> tuple[str, list[Any]]:
    """The operation that a function calls, and the candidates of its tuner for such inputs."""
    found: list[Selection] = []
    with on_selection(found.append):
        jax.eval_shape(call, inputs)
    chosen = found[0]
    target = chosen.implementation.load()
    return chosen.problem.operation, list(target.candidates(chosen.problem, device_facts()))


def names(configs: Sequence[Any]) -> list[str]:
    """Labels with the fields that differ; the first is the heuristic."""
    flat = [_flat(to_dict(config)) for config in configs]
    differ = [key for key in flat[0] if len({str(fields.get(key)) for fields in flat}) > 1]
    said = [" ".join(f"{key}={fields.get(key)}" for key in differ) for fields in flat]
    return [f"heuristic {said[0]}".strip(), *said[1:]]


def _flat(fields: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in fields.items():
        inner = isinstance(value, Mapping)
        found |= _flat(value, f"{before}{name}.") if inner else {f"{before}{name}": value}
    return found


def with_config(call: Callable[[Any], Any], operation: str, config: Any) -> Callable[[Any], Any]:
    """The function with its operation built with a configuration."""

    def run(inputs: Any) -> Any:
        with ejx.overlay_cache({operation: config}):
            return call(inputs)

    return run


# The two kinds of problems: inputs, the function of each direction, and the check of results


def _parts(problem: Problem, platform: str) -> tuple[list[Any], dict[str, Any], Callable[..., str | None]]:
    if isinstance(problem, paged.DecodeProblem):
        sets = input_sets(functools.partial(paged.make_inputs, problem))
        call = paged.ours(problem, platform)
        expected = paged.expected_results(problem, sets[0])

        def check(row: Row, results: Mapping[str, Any]) -> str | None:
            error, wrong = paged.error_of(problem, results["out"], dict(expected))
            row.errors = {"out": error}
            return wrong

        return sets, {"forward": lambda inputs: {"out": call(inputs)}}, check
    sets = input_sets(functools.partial(recurrent.make_inputs, problem))
    forward = lambda learned: recurrent.ours(problem, platform)(learned)
    expected = recurrent.expected_results(problem, sets[0])

    def check_both(row: Row, results: Mapping[str, Any]) -> str | None:
        errors, wrong = recurrent.errors_of(problem, row.direction, dict(results), expected)
        row.errors = dict(errors)
        return wrong

    calls = {way: recurrent.direction_of(forward, way != "forward") for way in DIRECTIONS}
    return sets, calls, check_both


def baselines(problem: Problem) -> Iterator[tuple[str, Callable[[list[Any]], Prepared]]]:
    """The baselines of `decode.py`, with their own inputs."""
    if isinstance(problem, paged.DecodeProblem):
        for peer in decode_peers.baselines_of(problem, jax.default_backend() == "gpu"):
            yield peer.name, functools.partial(_prepare_peer, peer)


def _prepare_peer(peer: decode_peers.Peer, sets: list[Any]) -> Prepared:
    convert = jax.jit(peer.convert)
    return decode.prepare(peer.run, [jax.block_until_ready(convert(inputs)) for inputs in sets])


# Measuring


def measure(problem: Problem, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of a problem, by direction. All candidates are compiled before any is timed."""
    sets, calls, check = _parts(problem, options.platform)
    floor = launch_floor(sets[0])
    for direction, call in calls.items():
        operation, configs = candidates(call, sets[0])
        configs = configs[: options.candidates]
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            ready = [pool.submit(prepare, with_config(call, operation, config), sets) for config in configs]
        attempts = [
            Attempt(Row(problem.name, direction, name, True), future.result)
            for name, config, future in zip(names(configs), configs, ready, strict=True)
        ]
        attempts += [
            Attempt(Row(problem.name, direction, name, False), functools.partial(make, sets))
            for name, make in baselines(problem)
        ]
        rows = measure_rows(attempts, check, options, floor)
        for row in rows:
            row.ratio = rows[0].ms / row.ms if rows[0].ms and row.ms else None
        yield rows


def unmeasured(problem: Problem, reason: str) -> list[Row]:
    return [Row(problem.name, "forward", "heuristic", True, reason=reason)]


# The command


HEADER = ("problem", "direction", "ms", "of the heuristic", "spread", "configuration")


def text(content: Mapping[str, Any]) -> str:
    rows = sorted(
        content["rows"], key=lambda row: (row["problem"], row["direction"], row["ms"] or float("inf"))
    )
    cells = [
        (
            row["problem"],
            row["direction"],
            report.number(row["ms"], 4),
            report.number(row["ratio"]),
            report.percent(row["spread"]),
            row["reason"] or row["implementation"],
        )
        for row in rows
    ]
    return report.table(HEADER, cells)


def markdown(content: Mapping[str, Any], picture: str | None) -> str:
    return f"{report.environment_line(content['environment'])}\n\n```text\n{text(content)}\n```\n"


def plot(content: Mapping[str, Any], path: str) -> None:
    """A bar for each candidate, by problem."""
    rows = [row for row in content["rows"] if row["ms"]]
    figure, axes = report.pyplot().subplots(figsize=(11, 1 + 0.25 * len(rows)), layout="constrained")
    colours = ["tab:blue" if row["is_candidate"] else "tab:gray" for row in rows]
    axes.barh(range(len(rows)), [row["ratio"] or 0 for row in rows], color=colours)
    labels = [f"{row['problem']}, {row['direction']}: {row['implementation']}"[:120] for row in rows]
    axes.set(yticks=range(len(rows)), yticklabels=labels, xlabel="speed over the heuristic's")
    axes.tick_params(axis="y", labelsize=6)
    axes.invert_yaxis()
    report.write_plot(figure, pathlib.Path(path), format=None)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser(__doc__)
    parser.add_argument("--platform", default="triton", help="default: %(default)s; with --quick xla")
    parser.add_argument("--candidates", type=int, help="of each problem (default: all)")
    parser.set_defaults(platforms="default", known_platforms=("default",))
    options = command.parse(parser, arguments)
    if options.quick and jax.default_backend() == "cpu":
        options.platform = "xla"
    return options


def choose(options: argparse.Namespace) -> list[Problem]:
    every = (*paged.EVERY, *recurrent.ANCHORS)
    tiny = (*paged.TINY[:1], *paged.TINY[-1:], *recurrent.TINY[:1])
    return command.matching(tiny if options.quick else every, options)


BENCHMARK = command.Benchmark(
    "sweep",
    lambda options, chosen: {"platform": options.platform},
    measure,
    unmeasured,
    lambda rows, chosen: {},
    text,
    markdown,
    plot,
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.render:
        return command.render(BENCHMARK, options)
    return command.run(BENCHMARK, choose(options), options)


if __name__ == "__main__":
    raise SystemExit(main())
