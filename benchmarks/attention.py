"""FlashAttention on each of its platforms, compared with cuDNN called directly and with PyTorch's attention.

    python benchmarks/attention.py --json out.json --plot out.png --markdown out.md
    python benchmarks/attention.py --quick                          # a few problems; tiny ones on a CPU
    python benchmarks/attention.py --render out.json --plot out.png --markdown docs/performance.md

Every implementation of every problem is first compared with a float32 reference, on this device and at full size;
speeds are reported only if the results agree. Times are device times.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import attention_problems as problems
from benchmarks import command, report
from benchmarks.attention_plot import plot
from benchmarks.attention_problems import AttentionProblem, Inputs
from benchmarks.measure import TorchWork
from benchmarks.prepare import (
    Attempt,
    DIRECTIONS,
    finite,
    input_sets,
    measure_rows,
    Measured,
    prepare,
    Prepared,
    ratio,
    selected_platform,
    worst,
)
from ejkernel_eqx.dispatch import device_facts, kernel_registry
from tests.tolerances import TOLERANCES

OURS = ("default", "cuda", "triton", "xla")


@dataclasses.dataclass
class Row(Measured):
    """One implementation of one problem in one direction. `reason` is set if there is no time."""

    problem: str
    plain: bool
    direction: str
    implementation: str
    errors: dict[str, float | None] = dataclasses.field(default_factory=dict)
    bound: float | None = None
    tflops: float | None = None

    @property
    def label(self) -> str:
        return f"{self.problem}, {self.direction}, {self.implementation}"

    @property
    def is_ours(self) -> bool:
        return self.platform is not None

    @property
    def speed(self) -> str:
        over = f", {self.ratio:.2f} of the peer's speed" if self.ratio else ""
        return f"{self.ms:.3f} ms, {self.tflops:.1f} TFLOP/s{over}"


# The implementations: from a problem, its input sets and the direction to `Prepared`.
Implementation = Callable[[AttentionProblem, Sequence[Inputs], bool], Prepared]


def ours(platform: str | None) -> Implementation:
    def make_ready(problem: AttentionProblem, sets: Sequence[Inputs], backward: bool) -> Prepared:
        attention = problems.build(problem, platform)
        return _prepare(lambda learned, masking: attention(**learned, **masking), sets, backward)

    return make_ready


def jax_nn(implementation: str) -> Implementation:
    def make_ready(problem: AttentionProblem, sets: Sequence[Inputs], backward: bool) -> Prepared:
        options: dict[str, Any] = {"is_causal": problem.causal, "implementation": implementation}
        if problem.window:
            options["local_window_size"] = (problem.window - 1, 0)

        def forward(learned: dict[str, Array], masking: dict[str, Array]) -> Array:
            return jax.nn.dot_product_attention(learned["q"], learned["k"], learned["v"], **options)

        return _prepare(forward, sets, backward)

    return make_ready


def _prepare(forward: Callable[..., Array], sets: Sequence[Inputs], backward: bool) -> Prepared:
    function = problems.direction_of(forward, backward)
    return prepare(lambda inputs: function(*inputs), sets)


def torch_sdpa(backend: str) -> Implementation:
    def make_ready(problem: AttentionProblem, sets: Sequence[Inputs], backward: bool) -> Prepared:
        import torch
        from torch.nn.attention import sdpa_kernel, SDPBackend

        def tensors(inputs: Inputs) -> tuple[Any, ...]:
            arrays = (*(inputs.learned[name] for name in "qkv"), inputs.cotangent)
            # The same data in the same memory layout; PyTorch's axes have heads before tokens.
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
        work = InContext(run, torch_sets)
        return Prepared(dict(zip(("q", "k", "v") if backward else ("out",), results)), lambda runs: work)

    return make_ready


def implementations(
    problem: AttentionProblem, options: argparse.Namespace, backward: bool
) -> Iterator[tuple[str, Implementation]]:
    """The implementations for the problem and a direction, starting with the peer that ratios are relative to."""
    gpu = jax.default_backend() == "gpu"
    expressible = problem.is_plain or (problem.window is not None and not problem.packed)
    if expressible:
        yield ("cudnn", jax_nn("cudnn")) if gpu else ("jax-xla", jax_nn("xla"))
    resolved = None
    if "default" in options.platforms:
        yield "default", ours(None)
        resolved = _default_platform(problem, backward)
    for platform in options.platforms:
        # The same platform gives the same program; the slow one is measured where that tells something.
        if platform in ("default", resolved) or (platform == "xla" and gpu and not problem.every_platform):
            continue
        yield platform, ours(platform)
    if problem.is_plain and gpu and options.torch:
        yield "torch-fa2", torch_sdpa("FLASH_ATTENTION")
        yield "torch-cudnn", torch_sdpa("CUDNN_ATTENTION")


def _default_platform(problem: AttentionProblem, backward: bool) -> str:
    inputs = jax.eval_shape(lambda: problems.make_inputs(problem))
    attention = problems.build(problem)
    forward = lambda learned, masking: attention(**learned, **masking)
    return selected_platform(problems.direction_of(forward, backward), *inputs)


# Measuring


def measure(problem: AttentionProblem, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of a problem, by direction."""
    sets = input_sets(functools.partial(problems.make_inputs, problem))
    expected = problems.expected_results(problem, sets[0])
    for direction in DIRECTIONS:
        backward = direction != "forward"
        attempts = (
            Attempt(
                Row(problem.name, problem.is_plain, direction, name),
                functools.partial(make_ready, problem, sets, backward),
            )
            for name, make_ready in implementations(problem, options, backward)
        )
        # Launches are long: none has to be run several times in one.
        rows = measure_rows(attempts, functools.partial(_check, problem, expected), options)
        peer = next((row.ms for row in rows if row.implementation in ("cudnn", "jax-xla")), None)
        for row in rows:
            row.tflops = problem.flops(backward) / row.ms / 1e9 if row.ms else None
            row.ratio = ratio(peer, row)
        yield rows


def _check(
    problem: AttentionProblem, expected: dict[str, Array], row: Row, results: dict[str, Array]
) -> str | None:
    """The error in the results, if any."""
    errors = {name: float(x) for name, x in problems.relative_errors(results, expected).items()}
    bound = TOLERANCES[problem.dtype]["forward" if row.direction == "forward" else "gradient"].rms
    row.errors, row.bound = finite(errors), bound
    wrong = [f"{name} {error:.2g}" for name, error in errors.items() if not error <= bound]
    return f"relative RMS error of {', '.join(wrong)}, allowed {bound:.2g}" if wrong else None


def unmeasured(problem: AttentionProblem, reason: str) -> list[Row]:
    return [Row(problem.name, problem.is_plain, way, "default", reason=reason) for way in DIRECTIONS]


def compare_features(rows: Sequence[Row], chosen: Sequence[AttentionProblem]) -> list[dict[str, Any]]:
    """For each of our platforms, the time of an option relative to its plain baseline, divided by the ratio of visible
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
    """The worst case of each kind: the ratios of the default and of Triton to the peer, and the times of the options."""
    summary: dict[str, dict[str, Any]] = {}
    for direction in DIRECTIONS:
        groups = {
            "default": [r for r in rows if r.implementation == "default"],
            "triton": [r for r in rows if r.platform == "triton"],
            "triton, D 64 and 128": [r for r in rows if r.platform == "triton" and " D256" not in r.problem],
        }
        for name, group in groups.items():
            if lowest := worst(row for row in group if row.direction == direction):
                summary[f"lowest ratio, {name}, {direction}"] = lowest
        for kind in ("per_score", "per_tile"):
            for capped in (False, True):
                group = [
                    f
                    for f in features
                    if f["direction"] == direction and ("soft cap" in f["problem"]) == capped
                ]
                group = [f for f in group if f["platform"] == "triton"] or group
                if group:
                    highest = max(group, key=lambda f: f[kind])
                    name = "soft cap" if capped else "window, segments, sinks"
                    label = f"{highest['problem']} against {highest['baseline']}"
                    summary[f"highest time {kind}, {name}, {direction}"] = {
                        "value": highest[kind],
                        "problem": label,
                    }
    return summary


# Showing


def text_tables(content: Mapping[str, Any]) -> str:
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
            speed = (
                report.number(row["ms"], 3),
                report.percent(row["spread"]),
                report.number(row["tflops"], 1 if row["tflops"] and row["tflops"] > 1 else 4),
            )
            rows.append(
                (row["problem"], name, platform, *speed, report.number(row["ratio"]), f"{max(errors):.1e}")
            )
        parts.append(f"{direction} (ratio: speed over {content['peer']})\n{report.table(header, rows)}")
    if content["features"]:
        parts.append(f"options over plain attention\n{report.table(*_feature_table(content))}")
    return "\n\n".join((*parts, report.summary_lines(content["summary"])))


def _feature_table(content: Mapping[str, Any]) -> tuple[Sequence[str], list[Sequence[str]]]:
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


def markdown(content: Mapping[str, Any], picture: str | None) -> str:
    """TFLOP/s of all implementations, ratios and options, as Markdown for the documentation."""
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
    if picture is not None:
        parts.insert(1, f"![Attention, TFLOP/s and the price of the options]({picture})")
    return "\n\n".join(parts) + "\n"


# The command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser(__doc__, quick="a few problems; tiny ones on a CPU")
    command.add_platforms(parser, OURS, ",".join(OURS))
    command.add_torch(parser)
    return command.parse(parser, arguments)


def usable(platforms: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The platforms that this machine can use, and why it cannot use the others."""
    known = kernel_registry.list_implementations(ejx.FlashAttention.operation, device_facts())
    reasons = {implementation.platform.value: reason for implementation, reason in known}
    unusable = {name: reason for name in platforms if (reason := reasons.get(name)) is not None}
    return [name for name in platforms if name not in unusable], unusable


def choose(options: argparse.Namespace) -> list[AttentionProblem]:
    """The problems in order of importance, so that a time limit omits the least important ones."""
    if jax.default_backend() == "cpu":
        chosen = problems.TINY if options.quick else problems.CPU
    elif options.quick:
        chosen = (problems.ANCHORS[0], problems.ANCHORS[4], problems.FEATURES[0], problems.FEATURES[4])
    else:
        chosen = problems.ANCHORS + problems.FEATURES + problems.GRID
    return command.matching(chosen, options)


def about(options: argparse.Namespace, chosen: Sequence[AttentionProblem]) -> dict[str, Any]:
    """Omits the platforms that this machine cannot use."""
    options.platforms, unusable = usable(options.platforms)
    for platform, reason in unusable.items():
        print(f"platform {platform} is not usable here: {reason}")
    return {"unusable": unusable, "peer": "jax.nn on XLA" if jax.default_backend() == "cpu" else "cuDNN"}


def sum_up(rows: Sequence[Row], chosen: Sequence[AttentionProblem]) -> dict[str, Any]:
    features = compare_features(rows, chosen)
    return {"features": features, "summary": summarise(rows, features)}


BENCHMARK = command.Benchmark("attention", about, measure, unmeasured, sum_up, text_tables, markdown, plot)


def main(arguments: Sequence[str] | None = None) -> int:
    return command.main(BENCHMARK, parse(arguments), choose)


if __name__ == "__main__":
    # Leaves memory for PyTorch on the same GPU; a pool allocated at the start keeps allocations out of the times.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    raise SystemExit(main())
