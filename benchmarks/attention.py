"""FlashAttention on each of its platforms, compared with cuDNN called directly and with PyTorch's attention.

    python -m benchmarks attention --json out.json --plot out.png --markdown out.md
    python -m benchmarks attention --quick                          # a few problems; tiny ones on a CPU
    python -m benchmarks attention --render out.json --plot out.png --markdown page.md

Options are compared with plain attention, by visible scores and by visible tiles.
"""

import dataclasses
import functools
import itertools
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import prepare, problems, report, runner
from benchmarks.peers import attention_backend, TorchPeer
from benchmarks.prepare import Arrays, BOTH, DIRECTIONS, FORWARD, Inputs, Others, Row
from benchmarks.runner import Errors, Extreme, RATIO
from ejkernel_eqx._tolerances import Tolerance, TOLERANCES
from ejkernel_eqx.attention import reference
from ejkernel_eqx.attention.spec import AttentionArrays, AttentionSpec
from ejkernel_eqx.dispatch import device_facts, kernel_registry
from ejkernel_eqx.tuning.check import all_errors

PLATFORMS = ("default", "cuda", "triton", "xla")
FIRST_PEERS = ("cudnn", "jax-xla")


@dataclasses.dataclass(frozen=True)
class AttentionProblem(problems.Problem):
    """Self-attention over `B` rows of `S` tokens.

    `packed` splits every row into documents of `document` tokens that do not see each other, given by
    `"segment_ids"` or by `"cu_seqlens"` (then all rows form one); or into as many documents of random lengths as `documents` says, given by
    segment ids. `forget`: forget gates of a mean near 0.98. `every_platform`: slow platforms are measured on a GPU too.
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
    forget: bool = False
    packed: str | None = None
    document: int = 1024
    documents: int = 0
    every_platform: bool = False

    @property
    def kv_heads(self) -> int:
        return self.K or self.H

    def words(self) -> list[str]:
        heads = f"H{self.H}" if self.kv_heads == self.H else f"H{self.H} KV{self.K}"
        random = f"{self.documents} documents of random lengths"
        return [
            f"B{self.B} S{self.S} {heads} D{self.D}",
            "causal" if self.causal else "full",
            f"window {self.window}" if self.window else "",
            (random if self.documents else f"{self.packed} {self.document}") if self.packed else "",
            "sinks" if self.sinks else "",
            "forget gates" if self.forget else "",
            f"soft cap {self.soft_cap:g}" if self.soft_cap else "",
        ]

    @property
    def baselines(self) -> tuple[str, ...]:
        """The names of the plain problems that one with options is compared with: of the same rows and, of documents of one length, of rows as
        long as a document, which touch the same tiles."""
        if self.is_plain:
            return ()
        plain = AttentionProblem(self.B, self.S, self.H, self.D, self.K, self.causal, dtype=self.dtype)
        if not self.packed or self.documents:
            return (plain.name,)
        rows = self.B * self.S // self.document
        return plain.name, dataclasses.replace(plain, B=rows, S=self.document).name

    @property
    def is_plain(self) -> bool:
        return not (self.window or self.soft_cap or self.sinks or self.forget or self.packed)

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


PROBLEMS = problems.load("attention", AttentionProblem)


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
    if problem.forget:
        learned["log_forget"] = jax.nn.log_sigmoid(jax.random.normal(keys[3], (*rows, problem.H)) + 4)
    masking = {}
    if problem.packed == "segment_ids":
        masking["segment_ids"] = jnp.asarray(problem.document_of(), jnp.int32)
    elif problem.packed == "cu_seqlens":
        masking["cu_seqlens"] = jnp.arange(0, rows[0] + 1, problem.document, dtype=jnp.int32)
    return Inputs(learned, jax.random.normal(keys[4], learned["q"].shape, problem.dtype), masking)


def build(problem: AttentionProblem, platform: str | None) -> ejx.FlashAttention:
    """Our operation for the problem."""
    return ejx.FlashAttention(problem.causal, problem.window, problem.soft_cap, platform=platform)


@prepare.reference
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
        x = x.reshape(rows, problem.S, kv_heads, heads, -1)
        return jnp.moveaxis(x, 2, 1).reshape(rows * kv_heads, 1, problem.S, heads, -1)

    def join(x: Array, heads: int, like: Array) -> Array:
        x = x.reshape(rows, kv_heads, problem.S, heads, -1)
        return jnp.moveaxis(x, 1, 2).reshape(like.shape)

    def forward(learned: Arrays, segments: Arrays) -> Array:
        return reference.attend(AttentionArrays(**learned, **segments, mask=mask), spec)[0]

    heads = {"q": groups, "k": 1, "v": 1, "out": groups}
    parts = {name: split(learned[name], heads[name]) for name in "qkv"}
    segments = {}
    if ids is not None:
        ids = jnp.repeat(ids, kv_heads, axis=0)[:, None]  # [B K, 1, S]
        segments = {"q_segments": ids, "kv_segments": ids}
    if "sinks" in learned:
        sinks = learned["sinks"].reshape(1, kv_heads, 1, groups)
        parts["sinks"] = jnp.broadcast_to(sinks, (rows, kv_heads, 1, groups)).reshape(-1, 1, groups)
    if "log_forget" in learned:
        heads["log_forget"], parts["log_forget"] = groups, split(learned["log_forget"], groups)[..., 0]
    results = jax.lax.map(
        prepare.directed(forward, BOTH, True), Inputs(parts, split(inputs.cotangent, groups), segments)
    )
    like = {**learned, "out": learned["q"]}
    joined = {name: join(results[name], n, like[name]) for name, n in heads.items()}
    if "sinks" in learned:
        joined["sinks"] = results["sinks"].reshape(rows, problem.H).sum(0)
    return joined


def jax_nn(problem: AttentionProblem, implementation: str) -> Callable[[Arrays, Arrays], Array]:
    options: dict[str, Any] = {"is_causal": problem.causal, "implementation": implementation}
    if problem.window:
        options["local_window_size"] = (problem.window - 1, 0)
    return lambda learned, masking: jax.nn.dot_product_attention(*(learned[n] for n in "qkv"), **options)


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
            entry = {"problem": problem.name, "baseline": baseline, "direction": direction}
            entry |= {"platform": platform, "ms": ms, "baseline_ms": plain_ms, "time": ms / plain_ms}
            entry |= {"visible_scores": scores, "visible_tiles": tiles}
            entry |= {"per_score": ms / plain_ms / scores, "per_tile": ms / plain_ms / tiles}
            features.append(entry)
    return features


def most_time(features: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The worst option of each kind, on Triton if it was measured there."""
    summary: dict[str, dict[str, Any]] = {}
    for direction, kind, capped in itertools.product(DIRECTIONS, ("per_score", "per_tile"), (False, True)):
        same = [f for f in features if f["direction"] == direction and capped == ("soft cap" in f["problem"])]
        if group := [f for f in same if f["platform"] == "triton"] or same:
            highest = max(group, key=lambda f: f[kind])
            what = "soft cap" if capped else "window, segments, sinks"
            label = f"{highest['problem']} against {highest['baseline']}"
            summary[f"highest time {kind}, {what}, {direction}"] = {"value": highest[kind], "problem": label}
    return summary


def _is_narrow(row: Row) -> bool:
    return row.platform == "triton" and " D256" not in row.problem


class Attention(runner.Family):
    name, title, description, lists = "attention", "Attention", __doc__, PROBLEMS
    groups = ("anchors", "features", "grid")
    near, once = None, True
    known_platforms, platforms = PLATFORMS, ",".join(PLATFORMS)
    extremes = (
        Extreme("lowest ratio, default", RATIO.number, min, lambda row: row.implementation == "default"),
        Extreme("lowest ratio, triton", RATIO.number, min, lambda row: row.platform == "triton"),
        Extreme("lowest ratio, triton, D 64 and 128", RATIO.number, min, _is_narrow),
    )

    def ours(self, problem: AttentionProblem, platform: Any) -> Callable[[Arrays, Arrays], Array]:
        return lambda learned, masking: build(problem, platform)(**learned, **masking)

    def is_measured(self, problem: AttentionProblem, platform: str) -> bool:
        """Slow platforms are measured where that tells something."""
        return platform != "xla" or jax.default_backend() != "gpu" or problem.every_platform

    def implementations(self, problem: AttentionProblem, options: Namespace, direction: str) -> Others:
        """Starts with the peer that ratios are relative to."""
        if problem.is_plain or (problem.window is not None and not (problem.packed or problem.sinks)):
            name, kind = ("cudnn", "cudnn") if jax.default_backend() == "gpu" else ("jax-xla", "xla")
            yield self.in_jax(problem, name, jax_nn(problem, kind))
        yield from super().implementations(problem, options, direction)

    def peers(self, problem: AttentionProblem) -> Iterator[TorchPeer]:
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

    def errors(self, problem: AttentionProblem, row: Row, results: Arrays, expected: Arrays) -> Errors:
        """The relative RMS error of each result; single numbers of peers may be off by more."""
        bound = TOLERANCES[problem.dtype]["forward" if row.direction == FORWARD else "gradient"].rms
        row.numbers["bound"] = bound
        allowed = dict.fromkeys(results, Tolerance(bound, float("inf")))
        return all_errors(results, {name: expected[name] for name in results}, allowed)

    def complete(self, problem: AttentionProblem, inputs: Inputs, direction: str, rows: list[Row]) -> None:
        peer = prepare.fastest(row for row in rows if row.implementation in FIRST_PEERS)
        for row in rows:
            row.numbers["plain"] = problem.is_plain
            row.numbers["tflops"] = problem.flops(direction == BOTH) / row.ms / 1e9 if row.ms else None
            row.ratio = prepare.ratio(peer, row)

    def usual(self, options: Namespace) -> Sequence[AttentionProblem]:
        if options.quick and jax.default_backend() != "cpu":
            anchors, features = PROBLEMS["anchors"], PROBLEMS["features"]
            return anchors[0], anchors[4], features[0], features[4]
        return super().usual(options)

    def about(self, options: Namespace, chosen: Sequence[AttentionProblem]) -> dict[str, Any]:
        """Omits the platforms that this machine cannot use."""
        known = kernel_registry.list_implementations(ejx.FlashAttention.operation, device_facts())
        reasons = {implementation.platform.value: reason for implementation, reason in known}
        unusable = {name: reason for name in options.platforms if (reason := reasons.get(name)) is not None}
        options.platforms = [name for name in options.platforms if name not in unusable]
        for platform, reason in unusable.items():
            print(f"platform {platform} is not usable here: {reason}")
        return {"unusable": unusable, "peer": "jax.nn on XLA" if jax.default_backend() == "cpu" else "cuDNN"}

    def sum_up(self, rows: Sequence[Row], chosen: Sequence[AttentionProblem]) -> dict[str, Any]:
        features = compare_features(rows, chosen)
        return {"features": features, "summary": self.summary(rows) | most_time(features)}

    def text(self, content: Mapping[str, Any]) -> str:
        tables = self.tables.text(content | {"summary": {}})
        features = report.table_of("features", content["features"]) if content["features"] else ""
        parts = [tables, features and f"options over plain attention\n{features}"]
        return "\n\n".join((*filter(None, parts), report.summary_lines(content["summary"])))

    def markdown(self, content: Mapping[str, Any], picture: str | None) -> str:
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
        parts += [] if picture is None else [f"![{self.tables.picture}]({picture})"]
        parts += ["TFLOP/s, forward / forward+backward:", report.markdown_table(header, lines)]
        if content["features"]:
            table = report.table_of("features", content["features"], report.markdown_table)
            parts += ["Options relative to plain attention:", table]
        return "\n\n".join(parts) + "\n"

    def panels(self, content: Mapping[str, Any]) -> list[report.Panel]:
        """The speed of every implementation, and the cost of the options."""
        rows = [row for row in content["rows"] if row["ms"] is not None and row["plain"]]
        options = [
            {**f, "implementation": f["direction"]}
            | {"problem": f"{f['problem']} ({f['platform']})\nagainst {f['baseline']}"}
            for f in content["features"]
        ]
        title = "time of an option relative to plain attention, per visible tile of 128 x 128"
        speeds = ((way, [row for row in rows if row["direction"] == way]) for way in DIRECTIONS)
        panels = [report.Panel(f"{way}, TFLOP/s", mine, "tflops", inches=0.06) for way, mine in speeds]
        return [*panels, report.Panel(title, options, "per_tile", at=1.0)]


FAMILY = Attention(make_inputs=make_inputs, expected=expected_results)
