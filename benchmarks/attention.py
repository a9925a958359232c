"""FlashAttention on each of its platforms, compared with cuDNN called directly and with PyTorch's attention.

    python -m benchmarks attention --json out.json --plot out.png --markdown out.md
    python -m benchmarks attention --quick                          # a few problems; tiny ones on a CPU
    python -m benchmarks attention --render out.json --plot out.png --markdown docs/performance.md

Options are compared with plain attention, by visible scores and by visible tiles.
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import report, runner
from benchmarks.peers import attention_backend, TorchPeer
from benchmarks.prepare import (
    Arrays,
    BOTH,
    directed,
    DIRECTIONS,
    fastest,
    FORWARD,
    Implementation,
    Inputs,
    OURS,
    PEER,
    prepare,
    ratio,
    Row,
    selected_platform,
    UNTUNED,
)
from ejkernel_eqx._tolerances import Tolerance, TOLERANCES
from ejkernel_eqx.attention import reference
from ejkernel_eqx.attention.spec import AttentionArrays, AttentionSpec
from ejkernel_eqx.dispatch import device_facts, kernel_registry
from ejkernel_eqx.tuning.check import all_errors

PLATFORMS = ("default", "cuda", "triton", "xla")
FIRST_PEERS = ("cudnn", "jax-xla")


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """Self-attention over `B` rows of `S` tokens.

    `packed` splits every row into documents of `document` tokens that do not see each other, given by
    `"segment_ids"` or by `"cu_seqlens"` (then all rows form one); or into as many documents of random lengths as `documents` says, given by
    segment ids. `baselines` names the plain problems that a
    problem with options is compared with. `every_platform`: slow platforms are measured on a GPU too.
    """

    B: int
    S: int
    H: int
    D: int
    K: int = 0
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    packed: str | None = None
    document: int = 1024
    documents: int = 0
    dtype: str = "bfloat16"
    baselines: tuple[str, ...] = ()
    every_platform: bool = False

    @property
    def kv_heads(self) -> int:
        return self.K or self.H

    @property
    def name(self) -> str:
        heads = f"H{self.H}" if self.kv_heads == self.H else f"H{self.H} KV{self.K}"
        words = [f"B{self.B} S{self.S} {heads} D{self.D}", "causal" if self.causal else "full"]
        words += [f"window {self.window}"] if self.window else []
        random = f"{self.documents} documents of random lengths"
        words += [random if self.documents else f"{self.packed} {self.document}"] if self.packed else []
        words += ["sinks"] if self.sinks else []
        words += [f"soft cap {self.soft_cap:g}"] if self.soft_cap else []
        words += [] if self.dtype == "bfloat16" else [self.dtype]
        return " ".join(words)

    @property
    def is_plain(self) -> bool:
        return not (self.window or self.soft_cap or self.sinks or self.packed)

    def visible_scores(self) -> int:
        """The number of pairs of a query and a visible key, for one head and all rows."""
        start, end = self._ranges()
        return int((end - start).sum())

    def visible_tiles(self, size: int = 128) -> int:
        """The number of tiles of `size` queries by `size` keys that contain a visible pair."""
        start, end = (x.reshape(-1, min(size, self.S)) for x in self._ranges())
        return int((-(-end.max(1) // size) - start.min(1) // size).sum())

    def flops(self, backward: bool) -> float:
        """`4 B S S H D`, halved if causal, or the visible scores if fewer; 3.5 times that with the backward pass."""
        scores = self.B * self.S * self.S / (2 if self.causal else 1)
        if self.window or self.packed:
            scores = self.visible_scores()
        return 4 * scores * self.H * self.D * (3.5 if backward else 1)

    def document_of(self) -> np.ndarray:
        """The number of the document of every token of a packed problem, `[B, S]`."""
        if not self.documents:
            return np.broadcast_to(np.arange(self.S) // self.document, (self.B, self.S))
        rng, starts = np.random.default_rng(0), np.zeros((self.B, self.S), np.int32)
        for row in starts:
            row[rng.choice(np.arange(1, self.S), self.documents - 1, replace=False)] = 1
        return starts.cumsum(1)

    def _ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """The first key of every query and the one behind its last, `[B, S]`."""
        i = np.broadcast_to(np.arange(self.S), (self.B, self.S))
        start, end = np.zeros_like(i), np.full_like(i, self.S)
        if self.causal:
            end = i + 1
        if self.window:
            start = np.maximum(start, i - self.window + 1)
        if self.packed:
            changes = np.diff(self.document_of(), axis=1, prepend=-1, append=-1) != 0  # [B, S + 1]
            at = np.arange(self.S + 1)
            start = np.maximum(start, np.maximum.accumulate(np.where(changes, at, 0), axis=1)[:, :-1])
            following = np.where(changes, at, self.S)[:, ::-1]
            end = np.minimum(end, np.minimum.accumulate(following, axis=1)[:, ::-1][:, 1:])
        return start, end


def make_inputs(problem: AttentionProblem, seed: int = 0) -> Inputs:
    """Standard normal inputs; different for every seed."""
    rows = (problem.B * problem.S,) if problem.packed == "cu_seqlens" else (problem.B, problem.S)
    keys = jax.random.split(jax.random.key(seed), 5)
    shapes = {"q": (problem.H,), "k": (problem.kv_heads,), "v": (problem.kv_heads,)}
    learned = {
        name: jax.random.normal(key, (*rows, *heads, problem.D), problem.dtype)
        for key, (name, heads) in zip(keys, shapes.items())
    }
    if problem.sinks:
        learned["sinks"] = jax.random.normal(keys[3], (problem.H,))
    masking = {}
    if problem.packed == "segment_ids":
        masking["segment_ids"] = jnp.asarray(problem.document_of(), jnp.int32)
    elif problem.packed == "cu_seqlens":
        masking["cu_seqlens"] = jnp.arange(0, rows[0] + 1, problem.document, dtype=jnp.int32)
    return Inputs(learned, jax.random.normal(keys[4], learned["q"].shape, problem.dtype), masking)


def build(
    problem: AttentionProblem, platform: str | None = None, config: Any | None = None
) -> ejx.FlashAttention:
    """Our operation for the problem."""
    return ejx.FlashAttention(
        problem.causal, problem.window, problem.soft_cap, platform=platform, config=config
    )


@functools.partial(jax.jit, static_argnums=0, compiler_options=UNTUNED)
def expected_results(problem: AttentionProblem, inputs: Inputs) -> Arrays:
    """Output and gradients of the reference in float32."""
    spec = AttentionSpec(
        scale=problem.D**-0.5,
        logits_soft_cap=problem.soft_cap,
        left=problem.window and problem.window - 1,
        right=0 if problem.causal else None,
    )
    documents = jnp.asarray(problem.document_of(), jnp.int32) if problem.packed else None
    return by_key_head(problem, inputs, spec, documents)


def by_key_head(
    problem: Any, inputs: Inputs, spec: AttentionSpec, ids: Array | None = None, mask: Array | None = None
) -> Arrays:
    """Output and gradients of the reference in float32, a batch row and a key head at a time; `ids`: segments `[B, S]`."""
    rows, kv_heads, learned = problem.B, problem.kv_heads, inputs.learned
    groups = problem.H // kv_heads

    def split(x: Array, heads: int) -> Array:
        x = x.astype(jnp.float32).reshape(rows, problem.S, kv_heads, heads, problem.D)
        return jnp.moveaxis(x, 2, 1).reshape(rows * kv_heads, 1, problem.S, heads, problem.D)

    def join(x: Array, heads: int, like: Array) -> Array:
        x = x.reshape(rows, kv_heads, problem.S, heads, problem.D)
        return jnp.moveaxis(x, 1, 2).reshape(like.shape)

    def one(parts: Arrays) -> Arrays:
        cotangent, segments = parts.pop("cotangent"), parts.pop("ids", None)

        def forward(learned: dict[str, Any]) -> Array:
            arrays = AttentionArrays(**learned, mask=mask, q_segments=segments, kv_segments=segments)
            return reference.attend(arrays, spec)[0]

        out, pull = jax.vjp(forward, parts)
        return {"out": out, **pull(cotangent)[0]}

    heads = {"q": groups, "k": 1, "v": 1, "out": groups}
    parts = {name: split(learned[name], heads[name]) for name in "qkv"}
    parts["cotangent"] = split(inputs.cotangent, groups)
    if ids is not None:
        parts["ids"] = jnp.repeat(ids, kv_heads, axis=0)[:, None]  # [B K, 1, S]
    if "sinks" in learned:
        sinks = learned["sinks"].reshape(1, kv_heads, 1, groups)
        parts["sinks"] = jnp.broadcast_to(sinks, (rows, kv_heads, 1, groups)).reshape(-1, 1, groups)
    results = jax.lax.map(one, parts)
    like = {**learned, "out": learned["q"]}
    joined = {name: join(results[name], n, like[name]) for name, n in heads.items()}
    if "sinks" in learned:
        joined["sinks"] = results["sinks"].reshape(rows, problem.H).sum(0)
    return joined


# The implementations


def in_jax(forward: Callable[[Arrays, Arrays], Array]) -> Callable[..., Any]:
    return lambda sets, direction: prepare(directed(forward, direction), sets)


def ours(problem: AttentionProblem, platform: str | None) -> Callable[[Arrays, Arrays], Array]:
    return lambda learned, masking: build(problem, platform)(**learned, **masking)


def jax_nn(problem: AttentionProblem, implementation: str) -> Callable[[Arrays, Arrays], Array]:
    options: dict[str, Any] = {"is_causal": problem.causal, "implementation": implementation}
    if problem.window:
        options["local_window_size"] = (problem.window - 1, 0)
    return lambda learned, masking: jax.nn.dot_product_attention(*(learned[n] for n in "qkv"), **options)


def torch_peers(problem: AttentionProblem) -> Iterator[TorchPeer]:
    """PyTorch's attention, by backend; its axes have heads before tokens."""

    def run(backend: str, x: dict[str, Any]) -> Any:
        from torch.nn.functional import scaled_dot_product_attention

        grouped = {"enable_gqa": True} if problem.kv_heads != problem.H else {}
        heads_first = (x[name].transpose(1, 2) for name in "qkv")
        with attention_backend(backend):
            out = scaled_dot_product_attention(*heads_first, is_causal=problem.causal, **grouped)
        return out.transpose(1, 2)

    if problem.is_plain:
        for name, backend in (("torch-fa2", "FLASH_ATTENTION"), ("torch-cudnn", "CUDNN_ATTENTION")):
            yield TorchPeer(name, "torch", functools.partial(run, backend))


def implementations(
    problem: AttentionProblem, options: argparse.Namespace, direction: str
) -> Iterator[Implementation]:
    """The implementations for the problem and a direction, starting with the peer that ratios are relative to."""
    gpu = jax.default_backend() == "gpu"
    if problem.is_plain or (problem.window is not None and not problem.packed):
        name, kind = ("cudnn", "cudnn") if gpu else ("jax-xla", "xla")
        yield Implementation(name, in_jax(jax_nn(problem, kind)), PEER)
    resolved = None
    if "default" in options.platforms:
        yield Implementation("default", in_jax(ours(problem, None)))
        inputs = jax.eval_shape(lambda: make_inputs(problem))
        resolved = selected_platform(directed(ours(problem, None), direction), inputs)
    for platform in options.platforms:
        # The same platform gives the same program; the slow one is measured where that tells something.
        if platform in ("default", resolved) or (platform == "xla" and gpu and not problem.every_platform):
            continue
        yield Implementation(platform, in_jax(ours(problem, platform)))


def errors(
    problem: AttentionProblem, inputs: Inputs, row: Row, results: Arrays, expected: Mapping[str, Array]
) -> runner.Errors:
    """The relative RMS error of each result; single numbers of peers may be off by more."""
    bound = TOLERANCES[problem.dtype]["forward" if row.direction == FORWARD else "gradient"].rms
    row.numbers["bound"] = bound
    allowed = dict.fromkeys(results, Tolerance(bound, float("inf")))
    return all_errors(results, {name: expected[name] for name in results}, allowed)


def complete(problem: AttentionProblem, inputs: Inputs, direction: str, rows: list[Row]) -> None:
    peer = fastest(row for row in rows if row.implementation in FIRST_PEERS)
    for row in rows:
        row.numbers["plain"] = problem.is_plain
        row.numbers["tflops"] = problem.flops(direction == BOTH) / row.ms / 1e9 if row.ms else None
        row.ratio = ratio(peer, row)


# Summing up


def compare_features(rows: Sequence[Row], chosen: Sequence[AttentionProblem]) -> list[dict[str, Any]]:
    """Compares, for each of our platforms, the time of an option relative to its plain baseline, divided by the ratio of visible
    scores (`per_score`) and of visible tiles of 128 x 128 (`per_tile`)."""
    times = {(r.problem, r.direction, r.platform): r.ms for r in rows if r.platform and r.ms is not None}
    by_name = {problem.name: problem for problem in chosen}
    features = []
    for problem, direction in itertools.product(chosen, DIRECTIONS):
        for baseline, platform in itertools.product(problem.baselines, ("cuda", "triton", "xla")):
            plain = by_name.get(baseline)
            ms, plain_ms = (times.get((name, direction, platform)) for name in (problem.name, baseline))
            if plain is None or ms is None or plain_ms is None:
                continue
            scores = problem.visible_scores() / plain.visible_scores()
            tiles = problem.visible_tiles() / plain.visible_tiles()
            names = {"problem": problem.name, "baseline": baseline, "direction": direction}
            shares = {"time": ms / plain_ms, "visible_scores": scores, "visible_tiles": tiles}
            shares |= {"per_score": ms / plain_ms / scores, "per_tile": ms / plain_ms / tiles}
            features.append(names | {"platform": platform, "ms": ms, "baseline_ms": plain_ms} | shares)
    return features


def summarise(rows: Sequence[Row], features: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The worst case of each kind: the ratios of the default and of Triton to the peer, and the times of the options."""
    summary: dict[str, dict[str, Any]] = {}
    for direction in DIRECTIONS:
        mine = [r for r in rows if r.role == OURS and r.direction == direction and r.ratio]
        triton = [r for r in mine if r.platform == "triton"]
        groups = {
            "default": [r for r in mine if r.implementation == "default"],
            "triton": triton,
            "triton, D 64 and 128": [r for r in triton if " D256" not in r.problem],
        }
        for name, group in groups.items():
            if lowest := min(group, key=lambda r: r.ratio or 0.0, default=None):
                value = {"value": lowest.ratio, "problem": lowest.problem}
                summary[f"lowest ratio, {name}, {direction}"] = value
        for kind, capped in itertools.product(("per_score", "per_tile"), (False, True)):
            same = [
                f for f in features if f["direction"] == direction and capped == ("soft cap" in f["problem"])
            ]
            if group := [f for f in same if f["platform"] == "triton"] or same:
                highest = max(group, key=lambda f: f[kind])
                what = "soft cap" if capped else "window, segments, sinks"
                label = f"{highest['problem']} against {highest['baseline']}"
                value = {"value": highest[kind], "problem": label}
                summary[f"highest time {kind}, {what}, {direction}"] = value
    return summary


def sum_up(rows: Sequence[Row], chosen: Sequence[AttentionProblem]) -> dict[str, Any]:
    features = compare_features(rows, chosen)
    return {"features": features, "summary": summarise(rows, features)}


# Showing

_FEATURES = ("time", "visible_scores", "visible_tiles", "per_score", "per_tile")
TABLES = runner.Tables(
    ("problem", "implementation", "platform", "ms", "spread", "TFLOP/s", "ratio", "error"),
    "ratio: speed over cuDNN's, or jax.nn's on XLA",
    "Attention, TFLOP/s and the price of the options",
)


def _feature_table(content: Mapping[str, Any]) -> tuple[Sequence[str], list[Sequence[str]]]:
    words = (name.removeprefix("visible_").replace("_", " ") for name in _FEATURES)
    header = ("problem", "against", "platform", "direction", "ms", *words)
    names = ("problem", "baseline", "platform", "direction")
    return header, [
        (*(f[name] for name in names), report.number(f["ms"], 3), *(report.number(f[x]) for x in _FEATURES))
        for f in content["features"]
    ]


def text(content: Mapping[str, Any]) -> str:
    tables = TABLES.text(content | {"summary": {}})
    features = report.table(*_feature_table(content)) if content["features"] else ""
    parts = [tables, features and f"options over plain attention\n{features}"]
    return "\n\n".join((*filter(None, parts), report.summary_lines(content["summary"])))


def markdown(content: Mapping[str, Any], picture: str | None) -> str:
    """TFLOP/s of all implementations, ratios and options, as Markdown for the documentation."""
    rows = {(r["problem"], r["direction"], r["implementation"]): r for r in content["rows"]}
    triton = {(r["problem"], r["direction"]): r for r in content["rows"] if r["platform"] == "triton"}
    names = list(dict.fromkeys(r["implementation"] for r in content["rows"] if r["plain"]))

    def pair(some: Sequence[dict[str, Any] | None], field: str, digits: int) -> str:
        values = [report.number(row[field], digits) if row else "–" for row in some]
        return "" if set(values) == {"–"} else " / ".join(values)

    lines = []
    for problem in dict.fromkeys(r["problem"] for r in content["rows"] if r["plain"]):
        by_name = lambda name, p=problem: [rows.get((p, d, name)) for d in DIRECTIONS]
        cells = [pair(by_name(name), "tflops", 0) for name in names]
        ratios = by_name("default"), [triton.get((problem, d)) for d in DIRECTIONS]
        lines.append((problem, *cells, *(pair(some, "ratio", 2) for some in ratios)))
    peer = content["peer"]
    header = ("problem", *names, f"default over {peer}", f"Triton over {peer}")
    parts = [report.environment_line(content["environment"])]
    parts += [] if picture is None else [f"![{TABLES.picture}]({picture})"]
    parts += ["TFLOP/s, forward / forward+backward:", report.markdown_table(header, lines)]
    if content["features"]:
        parts += ["Options relative to plain attention:", report.markdown_table(*_feature_table(content))]
    return "\n\n".join(parts) + "\n"


def plot(content: Mapping[str, Any], path: str) -> None:
    """Writes the PNG: the speed of every implementation, and the cost of the options. Requires matplotlib."""
    plt = report.pyplot()
    rows = [row for row in content["rows"] if row["ms"] is not None]
    plain = list(dict.fromkeys(row["problem"] for row in rows if row["plain"]))
    names = list(dict.fromkeys(row["implementation"] for row in rows if row["plain"]))
    panels = 2 + bool(content["features"])
    figure, axes = plt.subplots(panels, 1, figsize=(max(8, 0.62 * len(plain) + 3), 3.4 * panels))
    for axis, direction in zip(axes, DIRECTIONS):
        width = 0.85 / max(len(names), 1)
        for n, name in enumerate(names):
            mine = [
                r
                for r in rows
                if (r["direction"], r["implementation"], r["plain"]) == (direction, name, True)
            ]
            places = [plain.index(r["problem"]) + (n - (len(names) - 1) / 2) * width for r in mine]
            axis.bar(places, [r["tflops"] for r in mine], width, label=name)
        labels = [name.replace(" causal", "\ncausal").replace(" full", "\nfull") for name in plain]
        axis.set_xticks(range(len(plain)), labels, rotation=35, ha="right", fontsize=6)
        axis.set(title=f"{direction}, TFLOP/s", axisbelow=True)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylim(top=1.15 * axes[0].get_ylim()[1])
    axes[0].legend(ncols=max(len(names), 1), fontsize=7, loc="upper left")
    if content["features"]:
        _plot_features(axes[2], content["features"])
    figure.suptitle(f"Attention on {content['environment']['device']}")
    figure.tight_layout()
    report.write_plot(figure, path, bbox_inches="tight")


def _plot_features(axis: Any, features: Sequence[Mapping[str, Any]]) -> None:
    label = lambda f: f"{f['problem']} ({f['platform']})\nagainst {f['baseline']}"
    labels = list(dict.fromkeys(map(label, features)))
    for n, direction in enumerate(DIRECTIONS):
        mine = [f for f in features if f["direction"] == direction]
        places = [labels.index(label(f)) + (n - 0.5) * 0.38 for f in mine]
        axis.barh(places, [f["per_tile"] for f in mine], 0.36, label=direction)
    axis.axvline(1.0, color="#444444", linewidth=0.8)
    axis.set_yticks(range(len(labels)), labels, fontsize=6)
    axis.invert_yaxis()
    axis.set_title("time of an option relative to plain attention, per visible tile of 128 x 128")
    axis.legend(fontsize=7)


# The problems

P = AttentionProblem
_D128, _D64 = "B4 S4096 H16 D128 causal", "B4 S4096 H32 D64 causal"
_SHORT = "B16 S1024 H16 D128 causal"

ANCHORS = (
    P(4, 4096, 16, 128, every_platform=True),
    P(1, 16384, 16, 128),
    P(4, 4096, 32, 128, K=8),
    P(16, 1024, 16, 128),
    P(4, 4096, 32, 64, every_platform=True),
    P(4, 4096, 16, 128, causal=False, every_platform=True),
    P(2, 4096, 16, 256),
)
FEATURES = (
    P(4, 4096, 16, 128, window=1024, baselines=(_D128,)),
    # Documents of 1024 tokens touch the same tiles as rows of 1024 tokens.
    P(4, 4096, 16, 128, packed="segment_ids", baselines=(_D128, _SHORT)),
    P(4, 4096, 16, 128, packed="cu_seqlens", baselines=(_D128, _SHORT)),
    P(4, 4096, 16, 128, packed="segment_ids", documents=8, baselines=(_D128,)),
    P(4, 4096, 16, 128, sinks=True, baselines=(_D128,)),
    P(4, 4096, 16, 128, soft_cap=30.0, baselines=(_D128,)),
    P(4, 4096, 32, 64, window=1024, baselines=(_D64,)),
    P(4, 4096, 32, 64, soft_cap=30.0, baselines=(_D64,)),
)
_GRID = tuple(
    P(16384 // length, length, 2048 // dim, dim, causal=causal)
    for dim in (128, 64)
    for causal in (True, False)
    for length in (1024, 2048, 4096, 8192, 16384)
)
GRID = tuple(p for p in _GRID if p.name not in {anchor.name for anchor in ANCHORS})
# Shapes of models, and dtypes and head dims not covered above, for the shipped table.
MODELS = (
    P(8, 2048, 16, 64),
    P(32, 1024, 12, 64, K=4),
    P(4, 4096, 32, 96, K=8),
    P(2, 4096, 16, 256, causal=False),
    P(4, 4096, 32, 64, packed="segment_ids"),
    P(4, 4096, 16, 128, dtype="float16"),
    P(4, 2048, 16, 64, dtype="float32"),
    P(4, 2048, 16, 128, dtype="float32"),
)
# Not used when the heuristics were written; they show whether these generalise.
HELD_OUT = (
    P(2, 3072, 24, 64, K=8),
    P(6, 1536, 16, 128, window=256),
    P(2, 6144, 8, 80),
    P(1, 8192, 32, 128, K=4, packed="segment_ids", document=512),
    P(4, 2048, 12, 64, K=12, causal=False, soft_cap=50.0),
)
CPU = (
    P(1, 2048, 8, 64, causal=False, dtype="float32"),
    P(1, 2048, 8, 64, dtype="float32"),
)
_TINY = "B2 S128 H2 D16 causal float32"
TINY = (
    P(2, 128, 2, 16, dtype="float32"),
    P(2, 128, 4, 16, K=2, causal=False),
    P(2, 128, 2, 16, window=32, dtype="float32", baselines=(_TINY,)),
    P(2, 128, 2, 16, packed="cu_seqlens", document=32, sinks=True, dtype="float32", baselines=(_TINY,)),
)


def choose(options: argparse.Namespace) -> Sequence[AttentionProblem]:
    if jax.default_backend() == "cpu":
        return TINY if options.quick else CPU
    return (ANCHORS[0], ANCHORS[4], FEATURES[0], FEATURES[4]) if options.quick else ANCHORS + FEATURES + GRID


def about(options: argparse.Namespace, chosen: Sequence[AttentionProblem]) -> dict[str, Any]:
    """Omits the platforms that this machine cannot use."""
    known = kernel_registry.list_implementations(ejx.FlashAttention.operation, device_facts())
    reasons = {implementation.platform.value: reason for implementation, reason in known}
    unusable = {name: reason for name in options.platforms if (reason := reasons.get(name)) is not None}
    options.platforms = [name for name in options.platforms if name not in unusable]
    for platform, reason in unusable.items():
        print(f"platform {platform} is not usable here: {reason}")
    return {"unusable": unusable, "peer": "jax.nn on XLA" if jax.default_backend() == "cpu" else "cuDNN"}


FAMILY = runner.Family(
    "attention",
    __doc__,
    TINY,
    CPU,
    ANCHORS + FEATURES + GRID,
    make_inputs,
    implementations,
    expected_results,
    TABLES,
    "Attention",
    peers=torch_peers,
    errors=errors,
    near=None,
    complete=complete,
    known_platforms=PLATFORMS,
    platforms=",".join(PLATFORMS),
    about=about,
    sum_up=sum_up,
    choose=choose,
    text=text,
    markdown=markdown,
    plot=plot,
)
