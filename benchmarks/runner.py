"""The runner of all benchmarks that compare implementations: a `Family` is data, and everything that is done with it is here.

    python -m benchmarks FAMILY --json out.json --plot out.png --markdown out.md
    python -m benchmarks FAMILY --problems REGEX --time-limit 300
    python -m benchmarks FAMILY --quick                               # tiny problems, anywhere
    python -m benchmarks FAMILY --render out.json --plot out.png --markdown page.md
    python -m benchmarks FAMILY --candidates 6 --platforms triton     # configurations of the tuner side by side

Every result of ours is first compared with a reference in float32, on this device and at full size; speeds are reported only if the results
agree. Peers receive the same data in the same run. All implementations are timed in turn, with inputs that do not fit the cache.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import re
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import prepare, processes, report
from benchmarks.measure import torch_with_cuda
from benchmarks.peers import implementation, installed, is_missing, TorchPeer
from benchmarks.prepare import Arrays, DIRECTIONS, Implementation, Others, OURS, PEER, Prepared, Row
from ejkernel_eqx._tolerances import Tolerance, TOLERANCES
from ejkernel_eqx.dispatch import device_facts
from ejkernel_eqx.tuning.check import all_errors
from ejkernel_eqx.tuning.measure import launch_floor
from ejkernel_eqx.tuning.report.data import describe

UNMEASURED = "not measured: "
Errors = tuple[Mapping[str, float], str | None]
Content = Mapping[str, Any]


class Extreme(NamedTuple):
    """A number of our rows, or of those that `among` holds for, of which the most or the least is picked."""

    title: str
    number: Callable[[Row], float | None]
    pick: Callable[..., Any]
    among: Callable[[Row], bool] = lambda row: True


def entry(name: str) -> Callable[[Row], float | None]:
    return lambda row: row.numbers.get(name)


def of_kind(kind: str) -> Callable[[Row], bool]:
    """Holds for the problems whose name begins so."""
    return lambda row: row.problem.startswith(kind)


RATIO = Extreme("lowest ratio", lambda row: row.ratio, min)
MEMORY = Extreme("most temporary memory", lambda row: row.memory, max)


# Tables

_NAMES = ("problem", "implementation", "platform", "direction")


class Tables(NamedTuple):
    """Rows as a table for each direction.

    - `header`: titles of the columns, names first, the error last.
    - `note`: behind the title of each table of the text.
    - `picture`: the description of the plot in Markdown.
    - `groups`: the tables in the order shown, by the entry `by` of their rows.
    - `digits`: of milliseconds.
    """

    header: Sequence[str]
    note: str
    picture: str
    groups: Sequence[str] = DIRECTIONS
    by: str = "direction"
    digits: int = 3

    def cells(self, row: Content) -> tuple[str, ...]:
        """The texts of a row; behind the names of one without a time, its reason."""
        if row["reason"] is None:
            return tuple(self._cell(title, row) for title in self.header)
        names = tuple(self._cell(title, row) for title in self.header if title in _NAMES)
        return (*names, *["–"] * (len(self.header) - len(names) - 1), row["reason"][:60])

    def _cell(self, title: str, row: Content) -> str:
        if title in _NAMES:
            beside = title == "implementation" and row.get("role") == "baseline"
            return (row[title] or "") + (" (baseline)" if beside else "")
        if title == "ms":
            return report.number(row["ms"], self.digits)
        if title == "spread":
            return report.percent(row["spread"])
        if title == "temporary":
            known = row["temporary_bytes"] is not None
            return f"{row['temporary_bytes'] / row['bytes']:.2f}x" if known else "–"
        if title == "error":
            errors = row["errors"].values() if "errors" in row else [row["error"]]
            known = [error for error in errors if error is not None]
            return f"{max(known):.1e}" if known else ""
        number = next((row[name] for name in report.data("tables")["numbers"][title] if name in row), None)
        return report.number(number, 1 if title == "TFLOP/s" and (number or 0) > 1 else 2)

    def each(self, content: Content, table: Callable[..., str]) -> Iterator[tuple[str, str]]:
        for group in self.groups:
            if rows := [self.cells(row) for row in content["rows"] if row[self.by] == group]:
                yield group, table(self.header, rows)

    def text(self, content: Content) -> str:
        parts = [f"{group} ({self.note})\n{table}" for group, table in self.each(content, report.table)]
        return "\n\n".join((*parts, report.summary_lines(content["summary"])))

    def markdown(self, content: Content, picture: str | None) -> str:
        """The tables for the documentation."""
        parts = [report.environment_line(content["environment"])]
        parts += [] if picture is None else [f"![{self.picture}]({picture})"]
        parts += [f"{group}:\n\n{table}" for group, table in self.each(content, report.markdown_table)]
        return "\n\n".join(parts) + "\n"


# Families


def errors_of(
    dtype: str, results: Mapping[str, Any], expected: Mapping[str, Array], factor: float = 1.0
) -> Errors:
    """The relative RMS error of each result, measured as in the tuner, and the reason if one is wrong (otherwise `None`)."""
    table = TOLERANCES[dtype]
    kinds = {name: "forward" if name in ("out", "state") else "gradient" for name in results}
    allowed = {name: Tolerance(*(factor * x for x in table[kind])) for name, kind in kinds.items()}
    return all_errors(results, {name: expected[name] for name in results}, allowed)


class Family:
    """A benchmark: a subclass says what differs. Problems are a `problems.Problem`.

    - `name`: on the command line, in the JSON, and in the markers of a Markdown page; `description`: of the command.
    - `lists`: the lists of problems; `groups`: those that are measured, in order of importance: a time limit omits the last ones. With
      `--quick` the list `tiny` is measured, and on a CPU `cpu`.
    - `near`: the most that a peer, which may round differently, may be off.
    - `with_out`: whether the output is a result beside the gradients.
    - `once`: whether a platform is left out that the default resolves to: it gives the same program.
    - `in_turn`: whether several runs of one launch of ours take one set of inputs after another.
    - `rotated`: the least bytes of all sets of inputs together on a GPU.
    - `packages`: those that peers need; `needed`: of these, the ones without which no peer is run.
    """

    name: str
    title: str
    description: str | None = None
    lists: Mapping[str, Sequence[Any]]
    groups: Sequence[str] = ("anchors",)
    near: float | None = 0.1
    with_out = False
    once = False
    in_turn = False
    rotated = 0
    extremes: Sequence[Extreme] = ()
    packages: Sequence[str] = ("torch",)
    needed: Sequence[str] = ()
    known_platforms: Sequence[str] = ("default", "triton", "xla")
    platforms = "default"

    make_inputs: Callable[..., Any]
    """`make_inputs(problem, seed)`."""
    expected: Callable[[Any, Any], Mapping[str, Array]]
    """`expected(problem, inputs)`: all results in float32, by name."""
    ours: Callable[[Any, Any], Callable[..., Any]]
    """`ours(problem, platform)`: our operation as a function of what is learned and of constants."""

    def __init__(self, **functions: Callable[..., Any]):
        """`functions`: some of these three, which are no methods."""
        vars(self).update(functions)

    # What a family computes

    def directed(self, problem: Any, forward: Callable[..., Any], direction: str) -> Callable[[Any], Arrays]:
        """The measured function of inputs."""
        return prepare.directed(forward, direction, self.with_out)

    def beside(self, problem: Any, options: Namespace, direction: str) -> Others:
        """Peers in JAX, and baselines."""
        return ()

    def peers(self, problem: Any) -> Iterable[TorchPeer]:
        """Peers in PyTorch."""
        return ()

    def errors(self, problem: Any, row: Row, results: Arrays, expected: Arrays) -> Errors:
        return errors_of(problem.dtype, results, expected)

    def complete(self, problem: Any, inputs: Any, direction: str, rows: list[Row]) -> None:
        """Adds numbers to the rows of a direction."""

    # What it measures

    def ready(self, problem: Any, platform: Any, sets: Sequence[Any], direction: str) -> Prepared:
        """Ours, prepared."""
        run = self.directed(problem, self.ours(problem, platform), direction)
        return prepare.ready(run, sets, self.in_turn)

    def in_jax(
        self, problem: Any, name: str, forward: Callable[..., Any], role: str = PEER, is_checked: bool = True
    ) -> Implementation:
        """A function in JAX as a peer or a baseline."""
        make = lambda sets, direction: prepare.ready(self.directed(problem, forward, direction), sets)
        return Implementation(name, make, role, is_checked)

    def is_measured(self, problem: Any, platform: str) -> bool:
        return True

    def implementations(self, problem: Any, options: Namespace, direction: str) -> Others:
        """Ours on each of the chosen platforms, and what is beside it."""
        resolved = None
        if self.once and "default" in options.platforms:
            inputs = jax.eval_shape(lambda: self.make_inputs(problem))
            forward = self.directed(problem, self.ours(problem, None), direction)
            resolved = prepare.selection_of(forward, inputs).platform.value
        for name in options.platforms:
            if name != resolved and self.is_measured(problem, name):
                platform = None if name == "default" else name
                yield Implementation(name, functools.partial(self.ready, problem, platform))
        yield from self.beside(problem, options, direction)

    def directions(self, problem: Any, options: Namespace) -> list[str]:
        return [way for way in problem.directions if way in options.directions or options.directions == [""]]

    def usual(self, options: Namespace) -> Sequence[Any]:
        """The problems that are measured here, before they are chosen by name."""
        on_cpu = jax.default_backend() == "cpu" and options.process is None  # which only compiles for a GPU
        groups = ("tiny",) if options.quick else ("cpu",) if on_cpu else self.groups
        return [problem for group in groups for problem in self.lists[group]]

    def chosen(self, options: Namespace) -> list[Any]:
        return [one for one in self.usual(options) if re.search(options.problems, one.name)]

    def apart(self, problem: Any) -> str:
        """Names the process that measures a problem, with `--apart`."""
        raise SystemExit(f"{self.name} runs in one process")

    # What it says

    @property
    def tables(self) -> Tables:
        return Tables(**report.data("tables")[self.name])

    def about(self, options: Namespace, chosen: Sequence[Any]) -> dict[str, Any]:
        """Entries of the JSON, from before the first problem."""
        return {}

    def sum_up(self, rows: Sequence[Row], chosen: Sequence[Any]) -> dict[str, Any]:
        return {"summary": self.summary(rows)}

    def summary(self, rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
        """The extremes of ours in each direction."""
        result = {}
        mine = [row for row in rows if row.role == OURS]
        for direction in dict.fromkeys(row.direction for row in mine):
            for of in (RATIO, *self.extremes):
                same = [row for row in mine if row.direction == direction and of.among(row)]
                known = [(value, row.problem) for row in same if (value := of.number(row)) is not None]
                if known:
                    value, problem = of.pick(known, key=lambda pair: pair[0])
                    result[f"{of.title}, {direction}"] = {"value": value, "problem": problem}
        return result

    def text(self, content: Content) -> str:
        return self.tables.text(content)

    def markdown(self, content: Content, picture: str | None) -> str:
        return self.tables.markdown(content, picture)

    def panels(self, content: Content) -> list[report.Panel]:
        """The parts of the plot. With a peer, bars start at 1, the speed of the peer; otherwise only milliseconds are shown."""
        rows = [row for row in content["rows"] if row["ms"] is not None]
        title = "{}: speed over the fastest peer's (milliseconds in the bars)"
        label = lambda row: f"{row['ms']:.3f} ms"
        each = {
            way: [r for r in rows if r["direction"] == way]
            for way in dict.fromkeys(r["direction"] for r in rows)
        }
        return [report.Panel(title.format(way), mine, "ratio", label, at=1.0) for way, mine in each.items()]


def rate(rows: Iterable[Row], **work: float | None) -> None:
    """Adds `bytes` and `flops` of a problem to its rows, and how fast these are."""
    for row in rows:
        row.numbers |= work
        for name, speed in (("bytes", "tb_per_s"), ("flops", "tflop_per_s")):
            if (size := work.get(name)) is not None:
                row.numbers[speed] = size / row.ms / 1e9 if row.ms else None


def compare(rows: Sequence[Row]) -> None:
    """Adds the speed of ours and of peers over the fastest peer's."""
    peer = prepare.fastest(rows, PEER)
    for row in rows:
        row.ratio = prepare.ratio(peer, row) if row.role in (OURS, PEER) else None


# Measuring


def measure(family: Family, problem: Any, options: Namespace) -> Iterator[list[Row]]:
    """The rows of a problem, by direction. In turns with other processes that measure on the device."""
    peers = [*installed(*family.peers(problem))] if options.torch and options.peers else []
    for peer in peers:
        peer.load()
    with processes.held():
        sets = prepare.input_sets(functools.partial(family.make_inputs, problem), family.rotated)
        check = functools.partial(_check, family, problem, family.expected(problem, sets[0]))
        floor = launch_floor(sets[0])
        for direction in family.directions(problem, options):
            if options.candidates:
                competitors = candidates(family, problem, direction, sets, options)
            else:
                competitors = [*family.implementations(problem, options, direction)]
                competitors += map(implementation, peers)
                competitors = [one for one in competitors if options.peers or one.role == OURS]
            rows = prepare.measure_rows(competitors, problem.name, direction, sets, check, options, floor)
            compare(rows)
            family.complete(problem, sets[0], direction, rows)
            if options.candidates:
                for row in rows:
                    row.ratio = prepare.ratio(rows[0].ms, row)
            yield rows


def _check(family: Family, problem: Any, expected: Any, row: Row, results: Arrays) -> str | None:
    errors, wrong = family.errors(problem, row, results, expected)
    row.errors = prepare.finite(errors)
    near = row.role == PEER and family.near is not None and all(x <= family.near for x in errors.values())
    return None if near else wrong


def candidates(
    family: Family, problem: Any, direction: str, sets: Sequence[Any], options: Namespace
) -> list[Implementation]:
    """Ours with each of the tuner's first candidates, the heuristic's choice first; ratios are over its speed."""

    def ready(overlay: Mapping[str, Any], sets: Sequence[Any], direction: str) -> Prepared:
        with ejx.overlay_cache(overlay):
            mine = next(x for x in family.implementations(problem, options, direction) if x.role == OURS)
            return mine.make_ready(sets, direction)

    chosen = ready({}, sets, direction).selection
    assert chosen is not None
    configs = chosen.implementation.load().candidates(chosen.problem, device_facts())
    names = [f"{'heuristic ' * (not n)}{describe(config)}" for n, config in enumerate(configs)]
    overlays = [{chosen.problem.operation: config} for config in configs]
    every = [
        Implementation(name, functools.partial(ready, overlay)) for name, overlay in zip(names, overlays)
    ]
    return every[: options.candidates]


# Options


def parser(family: Family) -> argparse.ArgumentParser:
    result = report.parser(family.name, family.description, "family")
    platforms = f"comma-separated, of {', '.join(family.known_platforms)} (default: %(default)s)"
    result.add_argument("--platforms", default=family.platforms, help=platforms)
    return result


def parse(family: Family, arguments: Sequence[str] | None) -> Namespace:
    made = parser(family)
    options = made.parse_args(arguments)
    options.platforms, options.directions = options.platforms.split(","), options.directions.split(",")
    if unknown := sorted(set(options.platforms) - set(family.known_platforms)):
        expected = ", ".join(family.known_platforms)
        made.error(f"--platforms: expected some of {expected}, received {', '.join(unknown)}")
    short = options.quick and jax.default_backend() == "cpu"
    options.sample_ms = options.sample_ms or (2.0 if short else 30.0)
    return options


# The run


def main(family: Family, arguments: Sequence[str] | None = None) -> int:
    options = parse(family, arguments)
    if options.render:
        content = json.loads(pathlib.Path(options.render).read_text(encoding="utf-8"))
        show(family, content, options)
        return 0
    given = [family.name, *(sys.argv[2:] if arguments is None else arguments)]
    if options.apart:  # the memory of the device is the others'
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if options.compile_peers and options.process is None:  # before this process takes memory of the device
        command = processes.this_command(*given)
        processes.compile_apart(command, options.compile_peers, {"JAX_PLATFORMS": "cpu"})
    chosen = family.chosen(options)
    if not chosen:
        print(f"no problem matches {options.problems!r}", file=sys.stderr)
        return 2
    if options.process is not None:
        return compile_peers(family, chosen, options)
    if options.apart:
        return run_apart(family, chosen, options, given)
    options.torch = options.torch and torch_with_cuda() and not any(map(is_missing, family.needed))
    options.torch = options.torch and bool(family.packages) and jax.default_backend() != "cpu"
    return run(family, chosen, options)


def run(family: Family, chosen: Sequence[Any], options: Namespace) -> int:
    """Measures the problems, writes results after each, and shows all of them. Nonzero if one of ours is wrong or was not measured."""
    start = time.monotonic()
    content: dict[str, Any] = {"schema": 1, "benchmark": family.name.replace("-", "_")}
    content["environment"] = report.environment(options.commit)
    print(report.environment_line(content["environment"]))
    on_gpu = jax.default_backend() != "cpu"
    content["missing"] = [name for name in family.packages if on_gpu and is_missing(name)]
    for package in content["missing"]:
        print(f"peer omitted: {package} is not installed")
    content |= family.about(options, chosen)
    rows: list[Row] = []
    for n, problem in enumerate(chosen):
        if time.monotonic() - start > options.time_limit:
            print(f"time limit: {len(chosen) - n} of {len(chosen)} problems omitted")
            break
        for new in _measured(family, problem, options):
            rows += new
            seconds = time.monotonic() - start
            for row in new:
                print(f"[{seconds:5.0f} s, {n + 1}/{len(chosen)}] {_progress(row)}", flush=True)
            content |= _said_of(family, rows, chosen) | {"seconds": seconds}
            if options.json:
                report.write_json(options.json, content)
    if not rows:
        print("time limit: nothing measured", file=sys.stderr)
        return 1
    show(family, content, options)
    return _verdict(rows)


def _said_of(family: Family, rows: Sequence[Row], chosen: Sequence[Any]) -> dict[str, Any]:
    return {"rows": [row.to_json() for row in rows], **family.sum_up(rows, chosen)}


def _measured(family: Family, problem: Any, options: Namespace) -> Iterator[list[Row]]:
    """The rows of a problem. If its inputs or its reference cannot be made, other problems can still be measured."""
    known = set()
    try:
        for rows in measure(family, problem, options):
            known |= {row.direction for row in rows}
            yield rows
    except Exception as error:  # of any type, as running out of memory raises several
        traceback.print_exc()
        reason = UNMEASURED + prepare.reason_of(error)
        lost = [way for way in family.directions(problem, options) if way not in known]
        yield [Row(problem.name, way, "default", reason=reason) for way in lost]


def _progress(row: Row) -> str:
    platform = f" ({row.platform})" if row.platform and row.platform != row.implementation else ""
    if row.ms is None:
        return f"{row.label}{platform}: {row.reason}"
    named = {"TB/s": "tb_per_s", "TFLOP/s": "tflop_per_s"}
    speeds = [f", {row.numbers[name]:.2f} {unit}" for unit, name in named.items() if row.numbers.get(name)]
    over = f", {row.ratio:.2f} of the fastest peer's speed" if row.ratio else ""
    return f"{row.label}{platform}: {row.ms:.4f} ms{''.join(speeds)}{over}"


def _verdict(rows: Sequence[Row]) -> int:
    wrong = [row for row in rows if row.reason and row.reason.startswith("wrong")]
    unmeasured = [row for row in rows if row.reason and row.reason.startswith(UNMEASURED)]
    for row in unmeasured:
        print(f"{row.label}: {row.reason}", file=sys.stderr)
    return 1 if unmeasured or any(row.role == OURS for row in wrong) else 0


# Several processes


def compile_peers(family: Family, chosen: Sequence[Any], options: Namespace) -> int:
    """Calls the peers in Triton on memory without contents, and compiles this process's share of their kernels."""
    if processes.are_shared():
        processes.tune_briefly()
    processes.compile_only(options.process, options.processes)
    for problem in chosen:
        inputs = jax.eval_shape(lambda p=problem: family.make_inputs(p, 0))
        for peer in (peer for peer in installed(*family.peers(problem)) if peer.is_triton):
            for direction in family.directions(problem, options):
                peer.call_empty(inputs, direction)
    return 0


def run_apart(family: Family, chosen: Sequence[Any], options: Namespace, given: Sequence[str]) -> int:
    """Runs each part of the problems in a process of its own, and joins the results."""
    groups: dict[str, list[str]] = {}
    for problem in chosen:
        groups.setdefault(family.apart(problem), []).append(problem.name)
    others = [x for x in given if x != "--apart"]
    one_of = lambda names: "^(" + "|".join(map(re.escape, names)) + ")$"
    commands = [
        processes.this_command(*others, "--problems", one_of(names), "--sample-ms", str(options.sample_ms))
        for names in groups.values()
    ]

    def write(parts: list[dict[str, Any]], seconds: float) -> None:
        if options.json:
            report.write_json(options.json, joined(family, chosen, parts, seconds))

    codes = processes.run_apart(commands, write)
    return int(any(codes))


def joined(family: Family, chosen: Sequence[Any], parts: Sequence[Content], seconds: float) -> dict[str, Any]:
    """The results of all parts as those of one run, in the order of the problems."""
    order = {problem.name: n for n, problem in enumerate(chosen)}
    fields = {field.name for field in dataclasses.fields(Row)}
    rows = []
    for entries in (row for part in parts for row in part["rows"]):
        known = {name: x for name, x in entries.items() if name in fields}
        rows.append(Row(**known, numbers={name: x for name, x in entries.items() if name not in fields}))
    rows.sort(key=lambda row: order.get(row.problem, len(order)))
    return {**parts[0], **_said_of(family, rows, chosen), "seconds": seconds}


# Showing


def show(family: Family, content: Content, options: Namespace) -> None:
    print("\n" + family.text(content))
    if options.plot:
        report.plot(
            family.panels(content), f"{family.title} on {content['environment']['device']}", options.plot
        )
    if options.markdown:
        folder = pathlib.Path(options.markdown).resolve().parent
        picture = options.plot and os.path.relpath(options.plot, folder)
        text = family.markdown(content, picture)
        report.write_markdown(options.markdown, family.name.replace("-", "_"), text)
    for path in filter(None, (options.json, options.plot, options.markdown)):
        print(f"wrote {path}")
