"""FlashAttention on each of its platforms against cuDNN called directly and against PyTorch's attention.

    python benchmarks/attention.py --json out.json --plot out.png --markdown out.md
    python benchmarks/attention.py --quick                          # a few problems; on a CPU tiny ones
    python benchmarks/attention.py --render out.json --plot out.png --markdown docs/performance.md

Every implementation of every problem is first compared, on this device and at full size, with the plain
mathematics in float32; a speed is reported only for what agrees. Times are device times.
"""

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import attention_problems as problems
from benchmarks import report
from benchmarks.attention_plot import plot
from benchmarks.attention_problems import AttentionProblem, Inputs
from benchmarks.measure import input_set_count, JaxWork, time_in_turn, TorchWork, Work
from ejkernel_eqx.dispatch import device_facts, kernel_registry, on_selection, Selection, to_json
from tests.tolerances import TOLERANCES

DIRECTIONS = ("forward", "forward+backward")
OURS = ("default", "cuda", "triton", "xla")


@dataclasses.dataclass
class Row:
    """One implementation of one problem in one direction. `reason` says why there is no time."""

    problem: str
    plain: bool
    direction: str
    implementation: str
    platform: str | None = None
    config: str | None = None
    config_from: str | None = None
    errors: dict[str, float | None] = dataclasses.field(default_factory=dict)
    bound: float | None = None
    ms: float | None = None
    spread: float | None = None
    samples_ms: tuple[float, ...] = ()
    launches: int | None = None
    tflops: float | None = None
    temporary_bytes: int | None = None
    ratio: float | None = None
    reason: str | None = None


class Prepared(NamedTuple):
    """Ready to be checked and timed."""

    work: Work
    results: dict[str, Array]
    selection: Selection | None = None
    temporary_bytes: int | None = None


# The implementations: from a problem, its input sets and the direction to `Prepared`.
Implementation = Callable[[AttentionProblem, Sequence[Inputs], bool], Prepared]


def ours(platform: str | None) -> Implementation:
    def prepare(problem: AttentionProblem, sets: Sequence[Inputs], backward: bool) -> Prepared:
        attention = problems.build(problem, platform)
        return _compiled(lambda learned, masking: attention(**learned, **masking), sets, backward)

    return prepare


def jax_nn(implementation: str) -> Implementation:
    def prepare(problem: AttentionProblem, sets: Sequence[Inputs], backward: bool) -> Prepared:
        options: dict[str, Any] = {"is_causal": problem.causal, "implementation": implementation}
        if problem.window:
            options["local_window_size"] = (problem.window - 1, 0)

        def forward(learned: dict[str, Array], masking: dict[str, Array]) -> Array:
            return jax.nn.dot_product_attention(learned["q"], learned["k"], learned["v"], **options)

        return _compiled(forward, sets, backward)

    return prepare


def _compiled(forward: Callable[..., Array], sets: Sequence[Inputs], backward: bool) -> Prepared:
    found: list[Selection] = []
    with on_selection(found.append):
        lowered = jax.jit(problems.direction_of(forward, backward)).lower(*sets[0])
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    temporary = None if memory is None else memory.temp_size_in_bytes
    return Prepared(JaxWork(compiled, sets), compiled(*sets[0]), found[0] if found else None, temporary)


def torch_sdpa(backend: str) -> Implementation:
    def prepare(problem: AttentionProblem, sets: Sequence[Inputs], backward: bool) -> Prepared:
        import torch
        from torch.nn.attention import sdpa_kernel, SDPBackend

        def tensors(inputs: Inputs) -> tuple[Any, ...]:
            arrays = (*(inputs.learned[name] for name in "qkv"), inputs.cotangent)
            # The same data, in the same layout in memory; PyTorch names the heads before the tokens.
            *qkv, cotangent = (torch.from_dlpack(x).clone() for x in arrays)
            return (*(x.requires_grad_(backward) for x in qkv), cotangent)

        def only_this() -> Any:
            return sdpa_kernel(getattr(SDPBackend, backend))

        grouped = {"enable_gqa": True} if problem.kv_heads != problem.H else {}

        def run(q: Any, k: Any, v: Any, cotangent: Any) -> tuple[Any, ...]:
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            attend = torch.nn.functional.scaled_dot_product_attention
            out = attend(*heads_first, is_causal=problem.causal, **grouped).transpose(1, 2)
            return torch.autograd.grad(out, (q, k, v), cotangent) if backward else (out,)

        class InContext(TorchWork):
            def sample(self, launches: int) -> float:
                with only_this():
                    return super().sample(launches)

        jax.block_until_ready(sets)
        torch_sets = [tensors(inputs) for inputs in sets]
        with only_this():
            results = [jax.numpy.from_dlpack(x.detach().contiguous()) for x in run(*torch_sets[0])]
        torch.cuda.synchronize()
        return Prepared(
            InContext(run, torch_sets), dict(zip(("q", "k", "v") if backward else ("out",), results))
        )

    return prepare


def torch_with_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def implementations(
    problem: AttentionProblem, options: argparse.Namespace
) -> Iterator[tuple[str, Implementation]]:
    """Those that could run the problem, the peer that ratios are taken to first."""
    gpu = jax.default_backend() == "gpu"
    expressible = problem.is_plain or (problem.window is not None and not problem.packed)
    if expressible:
        yield ("cudnn", jax_nn("cudnn")) if gpu else ("jax-xla", jax_nn("xla"))
    resolved = None
    if "default" in options.platforms:
        yield "default", ours(None)
        resolved = _default_platform(problem)
    for platform in options.platforms:
        # The same platform gives the same program; the slow one is measured where that tells something.
        if platform in ("default", resolved) or (platform == "xla" and gpu and not problem.every_platform):
            continue
        yield platform, ours(platform)
    if problem.is_plain and gpu and options.torch:
        yield "torch-fa2", torch_sdpa("FLASH_ATTENTION")
        yield "torch-cudnn", torch_sdpa("CUDNN_ATTENTION")


def _default_platform(problem: AttentionProblem) -> str:
    found: list[Selection] = []
    inputs = jax.eval_shape(lambda: problems.make_inputs(problem))
    attention = problems.build(problem)
    with on_selection(found.append):
        jax.eval_shape(
            lambda learned, masking: attention(**learned, **masking), inputs.learned, inputs.masking
        )
    return found[0].platform.value


# Measuring


def measure(problem: AttentionProblem, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of a problem, direction by direction: first every result is checked, then all are timed in turn."""
    sets = [problems.make_inputs(problem, seed) for seed in range(input_set_count(problem.input_bytes()))]
    expected = problems.expected_results(problem, sets[0])
    for direction in DIRECTIONS:
        backward = direction != "forward"
        rows, works = [], {}
        for name, prepare in implementations(problem, options):
            row = Row(problem.name, problem.is_plain, direction, name)
            rows.append(row)
            try:
                works[name] = _check(row, prepare(problem, sets, backward), expected, problem)
            except problems.FAILURES as error:
                row.reason = _reason(error)
        passed = {row.implementation: works[row.implementation] for row in rows if row.reason is None}
        timings = time_in_turn(passed, options.samples, options.sample_ms)
        for row in rows:
            if row.implementation in timings:
                row.ms, row.spread, row.samples_ms, row.launches = timings[row.implementation]
                row.tflops = problem.flops(backward) / row.ms / 1e9
        peer = next((row.ms for row in rows if row.implementation in ("cudnn", "jax-xla")), None)
        for row in rows:
            row.ratio = peer / row.ms if peer and row.ms else None
        yield rows


def _reason(error: BaseException) -> str:
    if isinstance(error, ejx.UnsupportedError):
        return "; ".join(f"{platform} {reason}" for platform, reason in error.reasons.items())
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


def _check(row: Row, prepared: Prepared, expected: dict[str, Array], problem: AttentionProblem) -> Work:
    """Fills in what is known before any timing; `row.reason` if the result is wrong."""
    if prepared.selection is not None:
        chosen = prepared.selection
        row.platform, row.config, row.config_from = (
            chosen.platform.value,
            to_json(chosen.config),
            chosen.tier.value,
        )
    row.temporary_bytes = prepared.temporary_bytes
    errors = problems.relative_errors(prepared.results, expected)
    row.errors = {name: float(error) for name, error in errors.items()}
    row.bound = TOLERANCES[problem.dtype]["forward" if row.direction == "forward" else "gradient"].rms
    wrong = [f"{name} {error:.2g}" for name, error in row.errors.items() if not error <= row.bound]
    if wrong:
        row.reason = f"wrong: relative RMS error of {', '.join(wrong)}, allowed {row.bound:.2g}"
        row.errors = {name: error if error < float("inf") else None for name, error in row.errors.items()}
    return prepared.work


def compare_features(rows: Sequence[Row], chosen: Sequence[AttentionProblem]) -> list[dict[str, Any]]:
    """For each of our platforms, the time of an option over that of its plain baseline, over the ratio of visible
    scores (`per_score`) and of visible tiles of 128 x 128 (`per_tile`)."""
    times = {(r.problem, r.direction, r.platform): r.ms for r in rows if r.platform and r.ms is not None}
    by_name = {problem.name: problem for problem in chosen}
    found = []
    for problem, direction in itertools.product(chosen, DIRECTIONS):
        for baseline, platform in itertools.product(problem.baselines, ("cuda", "triton", "xla")):
            plain = by_name.get(baseline)
            ours_ms, plain_ms = (times.get((name, direction, platform)) for name in (problem.name, baseline))
            if plain is None or ours_ms is None or plain_ms is None:
                continue
            scores = problem.visible_scores() / plain.visible_scores()
            tiles = problem.visible_tiles() / plain.visible_tiles()
            found.append(
                {
                    "problem": problem.name,
                    "baseline": baseline,
                    "direction": direction,
                    "platform": platform,
                    "ms": ours_ms,
                    "baseline_ms": plain_ms,
                    "time": ours_ms / plain_ms,
                    "visible_scores": scores,
                    "visible_tiles": tiles,
                    "per_score": ours_ms / plain_ms / scores,
                    "per_tile": ours_ms / plain_ms / tiles,
                }
            )
    return found


def summarise(rows: Sequence[Row], features: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The worst of each kind: ratio to the peer of the default and of Triton, time of the options."""
    summary: dict[str, dict[str, Any]] = {}
    for direction in DIRECTIONS:
        groups = {
            "default": [r for r in rows if r.implementation == "default"],
            "triton": [r for r in rows if r.platform == "triton"],
            "triton, D 64 and 128": [r for r in rows if r.platform == "triton" and " D256" not in r.problem],
        }
        for name, group in groups.items():
            with_ratio = [r for r in group if r.direction == direction and r.ratio is not None]
            if with_ratio:
                worst = min(with_ratio, key=lambda r: r.ratio or 0)
                summary[f"lowest ratio, {name}, {direction}"] = {
                    "value": worst.ratio,
                    "problem": worst.problem,
                }
        for kind in ("per_score", "per_tile"):
            for capped in (False, True):
                group = [
                    f
                    for f in features
                    if f["direction"] == direction and ("soft cap" in f["problem"]) == capped
                ]
                group = [f for f in group if f["platform"] == "triton"] or group
                if group:
                    worst = max(group, key=lambda f: f[kind])
                    name = "soft cap" if capped else "window, segments, sinks"
                    label = f"{worst['problem']} against {worst['baseline']}"
                    summary[f"highest time {kind}, {name}, {direction}"] = {
                        "value": worst[kind],
                        "problem": label,
                    }
    return summary


# Showing


def text_tables(content: dict[str, Any]) -> str:
    header = ("problem", "implementation", "platform", "ms", "spread", "TFLOP/s", "ratio", "error")
    parts = []
    for direction in DIRECTIONS:
        rows = []
        for row in (r for r in content["rows"] if r["direction"] == direction):
            errors = [error for error in row["errors"].values() if error is not None]
            name, platform = row["implementation"], row["platform"] or ""
            if row["reason"] is not None:
                rows.append((row["problem"], name, platform, "–", "", "", "", row["reason"][:60]))
                continue
            spread = f"{100 * row['spread']:.1f}%" if row["spread"] is not None else ""
            speed = (
                report.number(row["ms"], 3),
                spread,
                report.number(row["tflops"], 1 if row["tflops"] and row["tflops"] > 1 else 4),
            )
            rows.append(
                (row["problem"], name, platform, *speed, report.number(row["ratio"]), f"{max(errors):.1e}")
            )
        parts.append(f"{direction} (ratio: speed over {content['peer']})\n{report.table(header, rows)}")
    if content["features"]:
        parts.append(f"options over plain attention\n{report.table(*_feature_table(content))}")
    lines = [
        f"{name}: {entry['value']:.3f} ({entry['problem']})" for name, entry in content["summary"].items()
    ]
    return "\n\n".join((*parts, "\n".join(lines)))


def _feature_table(content: dict[str, Any]) -> tuple[Sequence[str], list[Sequence[str]]]:
    header = (
        "problem",
        "against",
        "platform",
        "direction",
        "ms",
        "time",
        "scores",
        "tiles",
        "per score",
        "per tile",
    )
    rows = []
    for f in content["features"]:
        numbers = [
            report.number(f[name])
            for name in ("time", "visible_scores", "visible_tiles", "per_score", "per_tile")
        ]
        rows.append(
            (f["problem"], f["baseline"], f["platform"], f["direction"], report.number(f["ms"], 3), *numbers)
        )
    return header, rows


def markdown(content: dict[str, Any], plot_path: str | None) -> str:
    """TFLOP/s of all implementations, the ratios, the options; meant for a page of the documentation."""
    rows = {(r["problem"], r["direction"], r["implementation"]): r for r in content["rows"]}
    by_platform = {(r["problem"], r["direction"], r["platform"]): r for r in content["rows"] if r["platform"]}
    names = list(dict.fromkeys(r["implementation"] for r in content["rows"] if r["plain"]))
    plain = list(dict.fromkeys(r["problem"] for r in content["rows"] if r["plain"]))

    def pair(found: list[dict[str, Any] | None], field: str, digits: int) -> str:
        values = [report.number(row[field], digits) if row else "–" for row in found]
        return "" if set(values) == {"–"} else " / ".join(values)

    lines = []
    for problem in plain:
        cells = [pair([rows.get((problem, d, name)) for d in DIRECTIONS], "tflops", 0) for name in names]
        default = [rows.get((problem, d, "default")) for d in DIRECTIONS]
        triton = [by_platform.get((problem, d, "triton")) for d in DIRECTIONS]
        lines.append((problem, *cells, pair(default, "ratio", 2), pair(triton, "ratio", 2)))
    peer = content["peer"]
    parts = [report.environment_line(content["environment"]), "TFLOP/s, forward / forward+backward:"]
    parts.append(
        report.markdown_table(("problem", *names, f"default over {peer}", f"Triton over {peer}"), lines)
    )
    if content["features"]:
        parts += ["Options relative to plain attention:", report.markdown_table(*_feature_table(content))]
    if plot_path is not None:
        parts.append(f"![Attention, TFLOP/s and the price of the options]({plot_path})")
    return "\n\n".join(parts) + "\n"


def show(content: dict[str, Any], options: argparse.Namespace) -> None:
    print("\n" + text_tables(content))
    if options.plot:
        plot(content, options.plot)
    if options.markdown:
        relative = options.plot and os.path.relpath(
            options.plot, pathlib.Path(options.markdown).resolve().parent
        )
        report.write_markdown(options.markdown, "attention", markdown(content, relative))
    for path in filter(None, (options.json, options.plot, options.markdown)):
        print(f"wrote {path}")


# The command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few problems; on a CPU tiny ones")
    parser.add_argument("--problems", default="", metavar="REGEX", help="only problems whose name matches")
    parser.add_argument("--platforms", default=",".join(OURS), help="ours, by comma (default: %(default)s)")
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="leave PyTorch out")
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
    if unknown := set(options.platforms) - set(OURS):
        parser.error(
            f"--platforms: expected some of {', '.join(OURS)}, received {', '.join(sorted(unknown))}"
        )
    return options


def usable(platforms: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Those of our platforms that this machine can use, and why it cannot use the others."""
    known = kernel_registry.list_implementations(ejx.FlashAttention.operation, device_facts())
    reasons = {implementation.platform.value: reason for implementation, reason in known}
    unusable = {name: reason for name in platforms if (reason := reasons.get(name)) is not None}
    return [name for name in platforms if name not in unusable], unusable


def choose(options: argparse.Namespace) -> list[AttentionProblem]:
    """In the order of importance, so that a time limit cuts off the least."""
    if jax.default_backend() == "cpu":
        chosen = problems.TINY if options.quick else problems.CPU
    elif options.quick:
        chosen = (problems.ANCHORS[0], problems.ANCHORS[4], problems.FEATURES[0], problems.FEATURES[4])
    else:
        chosen = problems.ANCHORS + problems.FEATURES + problems.GRID
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
    content: dict[str, Any] = {
        "schema": 1,
        "benchmark": "attention",
        "environment": report.environment(options.commit),
    }
    options.platforms, content["unusable"] = usable(options.platforms)
    content["peer"] = "jax.nn on XLA" if on_cpu else "cuDNN"
    print(report.environment_line(content["environment"]))
    for platform, reason in content["unusable"].items():
        print(f"platform {platform} is not usable here: {reason}")
    rows: list[Row] = []
    for n, problem in enumerate(chosen):
        if time.monotonic() - start > options.time_limit:
            print(f"time limit: {len(chosen) - n} of {len(chosen)} problems left out")
            break
        for found in measure(problem, options):
            rows += found
            for row in found:
                print(_progress(row, n, len(chosen), time.monotonic() - start), flush=True)
            features = compare_features(rows, chosen)
            content |= {"rows": [dataclasses.asdict(r) for r in rows], "features": features}
            content |= {"summary": summarise(rows, features), "seconds": time.monotonic() - start}
            if options.json:
                report.write_json(options.json, content)
    if not rows:
        print("time limit: nothing measured", file=sys.stderr)
        return 1
    show(content, options)
    wrong = [row for row in rows if row.reason and row.reason.startswith("wrong")]
    for row in wrong:
        print(f"WRONG: {row.problem}, {row.direction}, {row.implementation}: {row.reason}", file=sys.stderr)
    return 1 if any(row.platform for row in wrong) else 0


def _progress(row: Row, n: int, count: int, seconds: float) -> str:
    head = f"[{seconds:5.0f} s, {n + 1}/{count}] {row.problem}, {row.direction}, {row.implementation}"
    head += f" ({row.platform})" if row.platform and row.platform != row.implementation else ""
    if row.ms is None:
        return f"{head}: {row.reason}"
    ratio = f", {row.ratio:.2f} of the peer's speed" if row.ratio else ""
    return f"{head}: {row.ms:.3f} ms, {row.tflops:.1f} TFLOP/s{ratio}"


if __name__ == "__main__":
    # Room for PyTorch on the same GPU; a pool made at the start keeps allocations out of the times.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    raise SystemExit(main())
