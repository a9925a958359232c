"""Attention over pages: decoding against the memory's speed, latents and prefills against arithmetic, and peers where they are installed.

    python benchmarks/decode.py --json decode.json --plot decode.png --markdown decode.md
    python benchmarks/decode.py --problems 'N64 S4096|prefill' --time-limit 300
    python benchmarks/decode.py --quick                             # tiny problems
    python benchmarks/decode.py --render decode.json --plot decode.png --markdown decode.md

Every result is first compared, on this device and at full size, with the plain mathematics in float32; a speed is reported only for what
agrees (peers, in arithmetic of their own, within ten percent). Bytes are those of visible keys and values, queries, results and tables,
whatever an implementation moves beside them; the memory's speed is that of a copy in the same run.
Ours, peers and baselines (our FlashAttention on dense keys, our 16-bit pages beside 8-bit ones)
are timed in turn, on a GPU on inputs that do not fit the cache.
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
from benchmarks import decode_peers as peers
from benchmarks import decode_problems as problems
from benchmarks import report
from benchmarks.attention_problems import FAILURES
from benchmarks.decode_peers import Peer
from benchmarks.decode_plot import plot
from benchmarks.decode_problems import BARS, DecodeProblem, Inputs, KINDS
from benchmarks.decode_tables import card_line, markdown, text_tables
from benchmarks.measure import input_set_count, JaxWork, launch_floor, time_in_turn, time_whole, Work
from ejkernel_eqx.dispatch import on_selection, Selection, to_json

OURS = ("default", "triton", "xla")
MINE, PEER, BASELINE = "ours", "peer", "baseline"
_SAME_MATHEMATICS = 0.1  # what a peer rounds is its own affair, and so is what it raises
_RAISED = {MINE: FAILURES, BASELINE: FAILURES, PEER: (Exception,)}


@dataclasses.dataclass
class Row:
    """One implementation of one problem. `reason` says why there is no time; `of_card`: of the speed of a copy; `ratio` and
    `over_baseline` are the times of the fastest peer and of the baseline over this one's."""

    problem: str
    kind: str
    role: str
    implementation: str
    bytes: int
    flops: float
    platform: str | None = None
    config: str | None = None
    config_from: str | None = None
    error: float | None = None
    ms: float | None = None
    spread: float | None = None
    samples_ms: tuple[float, ...] = ()
    launches: int | None = None
    tb_per_s: float | None = None
    of_card: float | None = None
    tflops: float | None = None
    temporary_bytes: int | None = None
    ratio: float | None = None
    over_baseline: float | None = None
    reason: str | None = None


class Prepared(NamedTuple):
    """Ready to be checked and timed; `make` gives from the number of runs in one launch what is timed."""

    out: Array
    make: Callable[[int], Work]
    selection: Selection | None
    temporary_bytes: int | None


def prepare(run: Callable[[Any], Array], sets: Sequence[Any]) -> Prepared:
    """Compiles `run` and computes the first of the sets."""

    @functools.cache
    def program(runs: int) -> Any:
        if runs == 1:
            return jax.jit(run).lower(sets[0]).compile()
        return jax.jit(in_turn(run, runs)).lower(tuple(sets)).compile()

    def make(runs: int) -> Work:
        return JaxWork(program(runs), [(x,) for x in sets] if runs == 1 else [(tuple(sets),)])

    found: list[Selection] = []
    with on_selection(found.append):
        memory = program(1).memory_analysis()
    out = program(1)(sets[0])
    temporary = None if memory is None else memory.temp_size_in_bytes
    return Prepared(out, make, found[0] if found else None, temporary)


def in_turn(run: Callable[[Any], Array], runs: int) -> Callable[[Sequence[Any]], list[Array]]:
    """A function that runs so many times, one set of inputs after the other, so that a short run too finds none of them in the cache.

    As in `repeated` of the tuner, barriers keep the runs apart and in order, and all results are returned.
    """

    def several(sets: Sequence[Any]) -> list[Array]:
        kept: list[Array] = []
        for n in range(runs):
            inputs = sets[n % len(sets)]
            if kept:
                inputs, kept[-1] = jax.lax.optimization_barrier((inputs, kept[-1]))
            kept.append(run(inputs))
        return kept

    return several


def implementations(problem: DecodeProblem, options: argparse.Namespace) -> Iterator[tuple[str, Peer]]:
    """The role of each, and how it is run."""
    resolved = None
    for name in options.platforms:
        platform = None if name == "default" else name
        if name != resolved:  # the same platform gives the same program
            yield MINE, Peer(name, lambda inputs: inputs, problems.ours(problem, platform))
        if name == "default":
            resolved = default_platform(problem)
    if options.peers:
        for peer in peers.peers_of(problem, jax.default_backend() == "gpu"):
            yield BASELINE if peer.is_baseline else PEER, peer


def default_platform(problem: DecodeProblem) -> str:
    found: list[Selection] = []
    with on_selection(found.append):
        jax.eval_shape(problems.ours(problem, None), jax.eval_shape(lambda: problems.make_inputs(problem)))
    return found[0].platform.value


# Measuring


def measure_card(options: argparse.Namespace) -> dict[str, float]:
    """TB/s of a copy (read and written) and of a sum (read) of an array that does not fit the cache."""
    count = 2**20 if options.quick else 2**26 if jax.default_backend() == "cpu" else 2**28
    x = jnp.arange(count, dtype=jnp.int32)
    functions = {"copy": lambda x: x ^ 1, "read": lambda x: jnp.sum(x)}
    works = {name: JaxWork(jax.jit(f).lower(x).compile(), [(x,)]) for name, f in functions.items()}
    timings = time_in_turn(works, options.samples, options.sample_ms)
    moved = {"copy": 2 * x.nbytes, "read": x.nbytes}
    return {name: moved[name] / timing.ms / 1e9 for name, timing in timings.items()}


def measure(problem: DecodeProblem, card: Mapping[str, float], options: argparse.Namespace) -> list[Row]:
    """The rows of a problem: first every result is checked, then all are timed in turn."""
    first = problems.make_inputs(problem)
    more = range(1, input_set_count(sum(x.nbytes for x in jax.tree.leaves(first))))
    sets = [first, *(problems.make_inputs(problem, seed) for seed in more)]
    expected, floor = problems.expected_results(problem, first), launch_floor(first)
    rows, makers = [], {}
    for role, peer in implementations(problem, options):
        row = Row(problem.name, problem.kind, role, peer.name, problem.bytes(), problem.flops())
        rows.append(row)
        try:
            prepared = prepare(peer.run, _converted(peer, sets))
            _check(row, prepared, problem, expected)
            if row.reason is None:
                makers[peer.name] = functools.cache(prepared.make)
                makers[peer.name](1).sample(1)
        except _RAISED[role] as error:
            makers.pop(peer.name, None)
            row.reason = _reason(error)
    timings = time_whole(makers, floor, options.samples, options.sample_ms)
    for row in rows:
        if row.implementation in timings:
            row.ms, row.spread, row.samples_ms, row.launches = timings[row.implementation]
            row.tb_per_s, row.tflops = row.bytes / row.ms / 1e9, row.flops / row.ms / 1e9
            row.of_card = row.tb_per_s / card["copy"]
    _compare(rows)
    return rows


def _converted(peer: Peer, sets: Sequence[Inputs]) -> list[Any]:
    convert = jax.jit(peer.convert)
    return [jax.block_until_ready(convert(inputs)) for inputs in sets]


def _compare(rows: Sequence[Row]) -> None:
    def best(role: str) -> float:
        return min((row.ms for row in rows if row.role == role and row.ms), default=0.0)

    peer, baseline = best(PEER), best(BASELINE)
    for row in rows:
        if row.ms and row.role == MINE:
            row.ratio, row.over_baseline = peer / row.ms or None, baseline / row.ms or None


def _check(row: Row, prepared: Prepared, problem: DecodeProblem, expected: Mapping[str, Array]) -> None:
    """Fills in what is known before any timing; `row.reason` if the result is wrong."""
    if prepared.selection is not None:
        chosen = prepared.selection
        row.platform, row.config = chosen.platform.value, to_json(chosen.config)
        row.config_from = chosen.tier.value
    row.temporary_bytes = prepared.temporary_bytes
    error, wrong = problems.error_of(problem, prepared.out, dict(expected))
    row.error = error if error < float("inf") else None
    if wrong and not (row.role == PEER and error <= _SAME_MATHEMATICS):
        row.reason = f"wrong: {wrong}"


def _reason(error: BaseException) -> str:
    if isinstance(error, ejx.UnsupportedError):
        return "; ".join(f"{platform} {reason}" for platform, reason in error.reasons.items())
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The worst of each bar's problems, by the fastest of ours, and the lowest ratio of each kind of problem."""
    fastest: dict[str, Row] = {}
    for row in rows:
        best = fastest.get(row.problem)
        if row.role == MINE and row.ms and (best is None or row.ms < (best.ms or 0)):
            fastest[row.problem] = row
    bars = []
    for bar in BARS:
        mine = [fastest[p.name] for p in bar.problems if p.name in fastest]
        known = [(getattr(row, bar.field), row.problem) for row in mine]
        known = [(value, problem) for value, problem in known if value is not None]
        if known:
            value, problem = max(known) if bar.at_most else min(known)
            met = value <= bar.bound if bar.at_most else value >= bar.bound
            bars.append({"what": bar.what, "bound": bar.bound, "at_most": bar.at_most, "met": met})
            bars[-1] |= {"value": value, "problem": problem, "measured": len(known), "of": len(bar.problems)}
    lowest = {}
    for kind in KINDS:
        if timed := [row for row in fastest.values() if row.kind == kind and row.ratio]:
            worst = min(timed, key=lambda row: row.ratio or 0)
            lowest[kind] = {"value": worst.ratio, "problem": worst.problem}
    return {"bars": bars, "lowest ratio": lowest}


def show(content: dict[str, Any], options: argparse.Namespace) -> None:
    print("\n" + text_tables(content))
    if options.plot:
        plot(content, options.plot)
    if options.markdown:
        folder = pathlib.Path(options.markdown).resolve().parent
        picture = options.plot and os.path.relpath(options.plot, folder)
        report.write_markdown(options.markdown, "decode", markdown(content, picture))
    for path in filter(None, (options.json, options.plot, options.markdown)):
        print(f"wrote {path}")


# The command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny problems")
    add("--problems", default="", metavar="REGEX", help="only problems whose name matches")
    add("--platforms", default="default,xla", help=f"of {', '.join(OURS)}, by comma (default: %(default)s)")
    add("--no-peers", dest="peers", action="store_false", help="ours alone")
    add("--samples", type=int, default=5, help="samples of each time (default: %(default)s)")
    add("--sample-ms", type=float, default=None, help="length of a sample (default: 30; quick on a CPU 2)")
    limit = "start no problem after this"
    add("--time-limit", type=float, default=float("inf"), metavar="SECONDS", help=limit)
    add("--commit", help="name of the code's version (default: asked of git)")
    add("--render", metavar="JSON", help="measure nothing; show an earlier run")
    for name in ("json", "plot", "markdown"):
        add(f"--{name}", metavar="PATH")
    options = parser.parse_args(arguments)
    options.platforms = options.platforms.split(",")
    if unknown := sorted(set(options.platforms) - set(OURS)):
        parser.error(f"--platforms: expected some of {', '.join(OURS)}, received {', '.join(unknown)}")
    on_cpu = jax.default_backend() == "cpu"
    options.sample_ms = options.sample_ms or (2.0 if on_cpu and options.quick else 30.0)
    return options


def choose(options: argparse.Namespace) -> list[DecodeProblem]:
    """In the order of importance, so that a time limit cuts off the least."""
    full = problems.CPU if jax.default_backend() == "cpu" else problems.EVERY
    chosen = problems.TINY if options.quick else full
    return [problem for problem in chosen if re.search(options.problems, problem.name)]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.render:
        show(json.loads(pathlib.Path(options.render).read_text(encoding="utf-8")), options)
        return 0
    start = time.monotonic()
    chosen = choose(options)
    if not chosen:
        print(f"no problem matches {options.problems!r}", file=sys.stderr)
        return 2
    content: dict[str, Any] = {"schema": 1, "benchmark": "decode"}
    content["environment"] = report.environment(options.commit)
    content["missing"] = peers.missing() if options.peers and jax.default_backend() == "gpu" else []
    content["card"] = measure_card(options)
    content["sizes"] = {problem.name: dataclasses.asdict(problem) for problem in chosen}
    print(report.environment_line(content["environment"]))
    print(card_line(content))
    for package in content["missing"]:
        print(f"peer left out: {package} is not installed")
    rows: list[Row] = []
    for n, problem in enumerate(chosen):
        if time.monotonic() - start > options.time_limit:
            print(f"time limit: {len(chosen) - n} of {len(chosen)} problems left out")
            break
        found = measure(problem, content["card"], options)
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
        print(f"WRONG: {row.problem}, {row.implementation}: {row.reason}", file=sys.stderr)
    return 1 if any(row.role == MINE for row in wrong) else 0


def _progress(row: Row, n: int, count: int, seconds: float) -> str:
    head = f"[{seconds:5.0f} s, {n + 1}/{count}] {row.problem}, {row.implementation}"
    head += f" ({row.platform})" if row.platform and row.platform != row.implementation else ""
    if row.ms is None:
        return f"{head}: {row.reason}"
    ratio = f", {row.ratio:.2f} of the fastest peer's speed" if row.ratio else ""
    return f"{head}: {row.ms:.4f} ms, {row.tb_per_s:.2f} TB/s, {row.tflops:.1f} TFLOP/s{ratio}"


if __name__ == "__main__":
    # Peers and XLA's temporaries take memory too; a pool made at the start keeps allocations out of the times.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.8")
    raise SystemExit(main())
