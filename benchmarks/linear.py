"""The linear-time family against flash-linear-attention and mamba_ssm, where these are installed, and its decoding steps.

    python benchmarks/linear.py --json linear.json --plot linear.png
    python benchmarks/linear.py --problems 'KDA|gated' --time-limit 300
    python benchmarks/linear.py --quick                             # tiny problems
    python benchmarks/linear.py --render linear.json --plot linear.png --markdown linear.md

Every result of ours is first compared, on this device and at full size, with the recurrence in float32, token by token; a speed is
reported only for what agrees. Peers are given the same data and are timed as CUDA graphs, without the time that Python takes to launch
them. Steps write their state in place and are compared with a pass of XLA that reads and writes a state of that size in place; without
a GPU the peer is a `lax.scan` over time.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import linear_peers as peers
from benchmarks import linear_problems as problems
from benchmarks import report
from benchmarks.attention import DIRECTIONS, torch_with_cuda
from benchmarks.attention_problems import FAILURES
from benchmarks.linear_plot import plot
from benchmarks.linear_problems import Arrays, Inputs, LinearProblem
from benchmarks.measure import input_set_count, JaxWork, launch_floor, repeated, StateWork, time_whole, Work
from ejkernel_eqx.dispatch import on_selection, Selection, to_json

STEP = "step"
OURS = ("default", "triton", "xla")
_SAME_MATHEMATICS = 0.1  # what a peer rounds is its own affair


@dataclasses.dataclass
class Row:
    """One implementation of one problem in one direction. `reason` says why there is no time; `ratio` is the time of the fastest peer
    over this one's. `bytes`: what must at least be read and written."""

    problem: str
    direction: str
    implementation: str
    is_peer: bool
    platform: str | None = None
    config: str | None = None
    config_from: str | None = None
    errors: dict[str, float | None] = dataclasses.field(default_factory=dict)
    ms: float | None = None
    spread: float | None = None
    samples_ms: tuple[float, ...] = ()
    launches: int | None = None
    bytes: int | None = None
    tb_per_s: float | None = None
    temporary_bytes: int | None = None
    ratio: float | None = None
    reason: str | None = None


class Prepared(NamedTuple):
    """Ready to be checked and timed; `make` gives from the number of runs in one launch what is timed."""

    results: Arrays
    make: Callable[[int], Work]
    selection: Selection | None = None
    temporary_bytes: int | None = None


# The implementations: from the problem, its input sets and the direction to `Prepared`.
Implementation = Callable[[LinearProblem, Sequence[Inputs], str], Prepared]


def _temporary_bytes(compiled: Any) -> int | None:
    memory = compiled.memory_analysis()
    return None if memory is None else memory.temp_size_in_bytes


def _prepare(forward: Callable[..., Any], sets: Sequence[Inputs], direction: str) -> Prepared:
    """Of a function of many tokens."""
    function = problems.direction_of(forward, direction != "forward")

    @functools.cache
    def program(runs: int) -> Any:
        return jax.jit(repeated(function, runs)).lower(sets[0]).compile()

    found: list[Selection] = []
    with on_selection(found.append):
        compiled = program(1)
    return Prepared(
        compiled(sets[0]),
        lambda runs: JaxWork(program(runs), [(inputs,) for inputs in sets]),
        found[0] if found else None,
        _temporary_bytes(compiled),
    )


def _prepare_step(
    function: Callable[[Arrays, Array], tuple[Array, Arrays]], sets: Sequence[Inputs]
) -> Prepared:
    """Of `(learned, state) -> (state, results)`, which writes its state in place."""
    state = sets[0].state
    assert state is not None, "a step starts from a state"

    def several(runs: int, learned: Arrays, state: Array) -> tuple[Array, list[Arrays]]:
        results = []
        for _ in range(runs):
            state, found = function(learned, state)
            state = jax.lax.optimization_barrier(state)
            results.append(found)
        return state, results

    @functools.cache
    def program(runs: int) -> Any:
        function = jax.jit(functools.partial(several, runs), donate_argnums=1)
        return function.lower(sets[0].learned, state).compile()

    found: list[Selection] = []
    with on_selection(found.append):
        compiled = program(1)
    new, (results,) = compiled(sets[0].learned, jnp.copy(state))
    return Prepared(
        {**results, "state": new},
        lambda runs: StateWork(program(runs), jnp.copy(state), [inputs.learned for inputs in sets]),
        found[0] if found else None,
        _temporary_bytes(compiled),
    )


def ours(platform: str | None) -> Implementation:
    def prepare(problem: LinearProblem, sets: Sequence[Inputs], direction: str) -> Prepared:
        function = problems.ours(problem, platform)
        if not problem.is_step:
            return _prepare(function, sets, direction)

        def step(learned: Arrays, state: Array) -> tuple[Array, Arrays]:
            out, state = function(learned, state)
            return state, {"out": out}

        return _prepare_step(step, sets)

    return prepare


def over_time(problem: LinearProblem, sets: Sequence[Inputs], direction: str) -> Prepared:
    """`lax.scan` over the tokens."""
    return _prepare(problems.plain(problem), sets, direction)


def in_place(problem: LinearProblem, sets: Sequence[Inputs], direction: str) -> Prepared:
    """Reads and writes the state, and does nothing else."""
    prepared = _prepare_step(lambda learned, state: (0.999 * state, {}), sets)
    return prepared._replace(results={})


def in_torch(peer: peers.Peer) -> Implementation:
    def prepare(problem: LinearProblem, sets: Sequence[Inputs], direction: str) -> Prepared:
        prepared = peers.prepare(peer, sets, direction != "forward")
        return Prepared(prepared.results, prepared.make, None, prepared.temporary_bytes)

    return prepare


def implementations(
    problem: LinearProblem, options: argparse.Namespace
) -> Iterator[tuple[str, bool, Implementation]]:
    """Name, whether it is a peer, and how to prepare it."""
    for platform in options.platforms:
        yield platform, False, ours(None if platform == "default" else platform)
    if problem.is_step:
        yield "in place", True, in_place
    elif jax.default_backend() == "cpu":
        yield "lax.scan", True, over_time
    elif options.torch:
        for peer in peers.peers_of(problem):
            yield peer.name, True, in_torch(peer)


# Measuring


def _nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def least_bytes(inputs: Inputs, direction: str) -> int:
    """Every input read once, every result written once."""
    learned, out = _nbytes(inputs.learned), _nbytes(inputs.cotangent)
    if direction == "forward+backward":
        return 2 * learned + out
    return learned + out + 2 * _nbytes(inputs.state)


def measure(problem: LinearProblem, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of a problem, direction by direction: first every result is checked, then all are timed in turn."""
    first = problems.make_inputs(problem)
    sets = [
        first,
        *(problems.make_inputs(problem, seed) for seed in range(1, input_set_count(_nbytes(first)))),
    ]
    expected, floor = problems.expected_results(problem, first), launch_floor(first)
    for direction in (STEP,) if problem.is_step else DIRECTIONS:
        rows, makers = [], {}
        for name, is_peer, prepare in implementations(problem, options):
            row = Row(problem.name, direction, name, is_peer, bytes=least_bytes(first, direction))
            rows.append(row)
            try:
                prepared = prepare(problem, sets, direction)
                _check(row, prepared, problem, expected)
                if row.reason is None:
                    makers[name] = functools.cache(prepared.make)
                    makers[name](1)
            except FAILURES as error:
                makers.pop(name, None)
                row.reason = _reason(error)
        _time(rows, makers, floor, options)
        yield rows


def _time(rows: Sequence[Row], makers: Mapping[str, Any], floor: float, options: argparse.Namespace) -> None:
    timings = time_whole(makers, floor, options.samples, options.sample_ms)
    for row in rows:
        if row.implementation in timings:
            row.ms, row.spread, row.samples_ms, row.launches = timings[row.implementation]
            row.tb_per_s = row.bytes / row.ms / 1e9 if row.bytes else None
    peer = min((row.ms for row in rows if row.is_peer and row.ms), default=None)
    for row in rows:
        row.ratio = peer / row.ms if peer and row.ms else None


def _reason(error: BaseException) -> str:
    if isinstance(error, ejx.UnsupportedError):
        return "; ".join(f"{platform} {reason}" for platform, reason in error.reasons.items())
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


def _check(row: Row, prepared: Prepared, problem: LinearProblem, expected: Mapping[str, Arrays]) -> None:
    """Fills in what is known before any timing; `row.reason` if the result is wrong."""
    if prepared.selection is not None:
        chosen = prepared.selection
        row.platform, row.config = chosen.platform.value, to_json(chosen.config)
        row.config_from = chosen.tier.value
    row.temporary_bytes = prepared.temporary_bytes
    errors, wrong = problems.errors_of(problem, row.direction, prepared.results, expected)
    if not row.is_peer:
        row.reason = wrong and f"wrong: {wrong}"
    elif not all(error <= _SAME_MATHEMATICS for error in errors.values()):
        row.reason = f"wrong: {wrong}"
    row.errors = {name: error if error < float("inf") else None for name, error in errors.items()}


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The lowest ratio of ours in each direction, and the largest temporary memory over inputs and results."""
    summary: dict[str, dict[str, Any]] = {}
    for direction in (*DIRECTIONS, STEP):
        mine = [row for row in rows if row.direction == direction and not row.is_peer]
        if timed := [row for row in mine if row.ratio is not None]:
            worst = min(timed, key=lambda row: row.ratio or 0)
            summary[f"lowest ratio, {direction}"] = {"value": worst.ratio, "problem": worst.problem}
        if known := [row for row in mine if row.temporary_bytes is not None and row.bytes]:
            worst = max(known, key=_memory)
            summary[f"most temporary memory, {direction}"] = {
                "value": _memory(worst),
                "problem": worst.problem,
            }
    return summary


def _memory(row: Row) -> float:
    """Temporary memory over that of inputs and results."""
    return (row.temporary_bytes or 0) / (row.bytes or 1)


# Showing


HEADER = ("problem", "implementation", "platform", "ms", "spread", "TB/s", "temporary", "ratio", "error")


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if row["reason"] is not None:
        return row["problem"], row["implementation"], row["platform"] or "", *["–"] * 5, row["reason"][:60]
    spread = f"{100 * row['spread']:.1f}%" if row["spread"] is not None else ""
    temporary = "–" if row["temporary_bytes"] is None else f"{row['temporary_bytes'] / row['bytes']:.2f}x"
    errors = [error for error in row["errors"].values() if error is not None]
    return (
        row["problem"],
        row["implementation"],
        row["platform"] or "",
        report.number(row["ms"], 3),
        spread,
        report.number(row["tb_per_s"]),
        temporary,
        report.number(row["ratio"]),
        f"{max(errors):.1e}" if errors else "",
    )


def text_tables(content: Mapping[str, Any]) -> str:
    parts = []
    for direction in (*DIRECTIONS, STEP):
        if rows := [_cells(row) for row in content["rows"] if row["direction"] == direction]:
            title = f"{direction} (temporary: memory over inputs and results; ratio: speed over the fastest peer's)"
            parts.append(f"{title}\n{report.table(HEADER, rows)}")
    lines = [
        f"{name}: {entry['value']:.3f} ({entry['problem']})" for name, entry in content["summary"].items()
    ]
    return "\n\n".join((*parts, "\n".join(lines)))


def markdown(content: Mapping[str, Any], picture: str | None) -> str:
    """A table for each direction; meant for a page of the documentation."""
    parts = [report.environment_line(content["environment"])]
    for direction in (*DIRECTIONS, STEP):
        if rows := [_cells(row) for row in content["rows"] if row["direction"] == direction]:
            parts += [f"{direction}:", report.markdown_table(HEADER, rows)]
    if picture is not None:
        parts.append(f"![Speed of the linear-time family over its peers]({picture})")
    return "\n\n".join(parts) + "\n"


def show(content: dict[str, Any], options: argparse.Namespace) -> None:
    print("\n" + text_tables(content))
    if options.plot:
        plot(content, options.plot)
    if options.markdown:
        folder = pathlib.Path(options.markdown).resolve().parent
        picture = options.plot and os.path.relpath(options.plot, folder)
        report.write_markdown(options.markdown, "linear", markdown(content, picture))
    for path in filter(None, (options.json, options.plot, options.markdown)):
        print(f"wrote {path}")


# The command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny problems")
    parser.add_argument("--problems", default="", metavar="REGEX", help="only problems whose name matches")
    parser.add_argument(
        "--platforms", default="default", help=f"of {', '.join(OURS)}, by comma (default: %(default)s)"
    )
    parser.add_argument(
        "--no-torch", dest="torch", action="store_false", help="leave the peers in PyTorch out"
    )
    parser.add_argument("--samples", type=int, default=5, help="samples of each time (default: %(default)s)")
    parser.add_argument(
        "--sample-ms", type=float, default=None, help="length of a sample (default: 30; quick on a CPU 2)"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="start no problem after this",
    )
    parser.add_argument("--commit", help="name of the code's version (default: asked of git)")
    parser.add_argument("--render", metavar="JSON", help="measure nothing; show an earlier run")
    for name in ("json", "plot", "markdown"):
        parser.add_argument(f"--{name}", metavar="PATH")
    options = parser.parse_args(arguments)
    options.platforms = options.platforms.split(",")
    if unknown := sorted(set(options.platforms) - set(OURS)):
        parser.error(f"--platforms: expected some of {', '.join(OURS)}, received {', '.join(unknown)}")
    return options


def choose(options: argparse.Namespace) -> list[LinearProblem]:
    """In the order of importance, so that a time limit cuts off the least."""
    on_cpu = jax.default_backend() == "cpu"
    chosen = problems.TINY if options.quick else problems.CPU if on_cpu else problems.ANCHORS + problems.STEPS
    return [problem for problem in chosen if re.search(options.problems, problem.name)]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.render:
        show(json.loads(pathlib.Path(options.render).read_text(encoding="utf-8")), options)
        return 0
    start = time.monotonic()
    on_cpu = jax.default_backend() == "cpu"
    options.torch = options.torch and not on_cpu and torch_with_cuda()
    options.sample_ms = options.sample_ms or (2.0 if on_cpu and options.quick else 30.0)
    chosen = choose(options)
    if not chosen:
        print(f"no problem matches {options.problems!r}", file=sys.stderr)
        return 2
    content: dict[str, Any] = {"schema": 1, "benchmark": "linear"}
    content["environment"] = report.environment(options.commit)
    content["missing"] = peers.missing() if not on_cpu else []
    print(report.environment_line(content["environment"]))
    for package in content["missing"]:
        print(f"peer left out: {package} is not installed")
    rows: list[Row] = []
    for n, problem in enumerate(chosen):
        if time.monotonic() - start > options.time_limit:
            print(f"time limit: {len(chosen) - n} of {len(chosen)} problems left out")
            break
        for found in measure(problem, options):
            rows += found
            for row in found:
                print(_progress(row, n, len(chosen), time.monotonic() - start), flush=True)
            content |= {"rows": [dataclasses.asdict(row) for row in rows], "summary": summarise(rows)}
            content["seconds"] = time.monotonic() - start
            if options.json:
                report.write_json(options.json, content)
    if not rows:
        print("time limit: nothing measured", file=sys.stderr)
        return 1
    show(content, options)
    wrong = [row for row in rows if row.reason and row.reason.startswith("wrong")]
    for row in wrong:
        print(f"WRONG: {row.problem}, {row.direction}, {row.implementation}: {row.reason}", file=sys.stderr)
    return 1 if any(not row.is_peer for row in wrong) else 0


def _progress(row: Row, n: int, count: int, seconds: float) -> str:
    head = f"[{seconds:5.0f} s, {n + 1}/{count}] {row.problem}, {row.direction}, {row.implementation}"
    head += f" ({row.platform})" if row.platform and row.platform != row.implementation else ""
    if row.ms is None:
        return f"{head}: {row.reason}"
    ratio = f", {row.ratio:.2f} of the fastest peer's speed" if row.ratio else ""
    return f"{head}: {row.ms:.3f} ms{ratio}"


if __name__ == "__main__":
    # Room for PyTorch on the same GPU; a pool made at the start keeps allocations out of the times.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    raise SystemExit(main())
