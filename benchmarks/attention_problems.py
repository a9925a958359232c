"""The attention problems that are measured and tuned: sizes, inputs, work and float32 results."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import ejkernel_eqx as ejx
from benchmarks.prepare import UNTUNED
from ejkernel_eqx.attention import reference
from ejkernel_eqx.attention.spec import AttentionArrays, AttentionSpec


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


class Inputs(NamedTuple):
    """`learned` (the inputs with gradients), the arguments that determine visible keys, and the cotangent of the output."""

    learned: dict[str, Array]
    masking: dict[str, Array]
    cotangent: Array


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
        masking["segment_ids"] = _documents(problem)
    elif problem.packed == "cu_seqlens":
        masking["cu_seqlens"] = jnp.arange(0, rows[0] + 1, problem.document, dtype=jnp.int32)
    return Inputs(learned, masking, jax.random.normal(keys[4], learned["q"].shape, problem.dtype))


def _documents(problem: AttentionProblem) -> Array:
    return jnp.asarray(problem.document_of(), jnp.int32)


def build(
    problem: AttentionProblem, platform: str | None = None, config: Any | None = None
) -> ejx.FlashAttention:
    """Our operation for the problem."""
    return ejx.FlashAttention(
        problem.causal, problem.window, problem.soft_cap, platform=platform, config=config
    )


def direction_of(forward: Any, backward: bool) -> Any:
    """The measured function, from `forward(learned, masking)`: the output, or the gradients of everything learned."""

    def only_forward(learned, masking, cotangent):
        return {"out": forward(learned, masking)}

    def both(learned, masking, cotangent):
        return jax.vjp(lambda learned: forward(learned, masking), learned)[1](cotangent)[0]

    return both if backward else only_forward


@functools.partial(jax.jit, static_argnums=0, compiler_options=UNTUNED)
def expected_results(problem: AttentionProblem, inputs: Inputs) -> dict[str, Array]:
    """Output and gradients of the reference in float32, by batch row and key head."""
    rows, groups, kv_heads = problem.B, problem.H // problem.kv_heads, problem.kv_heads
    spec = AttentionSpec(
        scale=problem.D**-0.5,
        logits_soft_cap=problem.soft_cap,
        left=problem.window and problem.window - 1,
        right=0 if problem.causal else None,
    )
    ids = (
        jnp.repeat(_documents(problem), kv_heads, axis=0)[:, None] if problem.packed else None
    )  # [B K, 1, S]

    def split(x: Array, heads: int) -> Array:
        x = x.astype(jnp.float32).reshape(rows, problem.S, kv_heads, heads, problem.D)
        return jnp.moveaxis(x, 2, 1).reshape(rows * kv_heads, 1, problem.S, heads, problem.D)

    def join(x: Array, heads: int, shape: tuple[int, ...]) -> Array:
        x = x.reshape(rows, kv_heads, problem.S, heads, problem.D)
        return jnp.moveaxis(x, 1, 2).reshape(shape)

    def one(parts: dict[str, Array]) -> dict[str, Array]:
        cotangent, own = parts.pop("cotangent"), parts.pop("ids", None)

        def forward(learned: dict[str, Any]) -> Array:
            return reference.attend(AttentionArrays(**learned, q_segments=own, kv_segments=own), spec)[0]

        out, pull = jax.vjp(forward, parts)
        return {"out": out, **pull(cotangent)[0]}

    learned = inputs.learned
    parts = {"q": split(learned["q"], groups), "k": split(learned["k"], 1), "v": split(learned["v"], 1)}
    parts["cotangent"] = split(inputs.cotangent, groups)
    if ids is not None:
        parts["ids"] = ids
    if problem.sinks:
        sinks = learned["sinks"].reshape(1, kv_heads, 1, groups)
        parts["sinks"] = jnp.broadcast_to(sinks, (rows, kv_heads, 1, groups)).reshape(-1, 1, groups)
    results = jax.lax.map(one, parts)
    shapes = {"out": learned["q"].shape} | {name: x.shape for name, x in learned.items()}
    joined = {
        n: join(results[n], groups if n in ("out", "q") else 1, shapes[n]) for n in ("out", "q", "k", "v")
    }
    if problem.sinks:
        joined["sinks"] = results["sinks"].reshape(rows, problem.H).sum(0)
    return joined


@jax.jit
def relative_errors(actual: dict[str, Array], expected: dict[str, Array]) -> dict[str, Array]:
    """The RMS error of each array, relative to the RMS of the expected result."""

    def one(x: Array, y: Array) -> Array:
        y = y.astype(jnp.float32)
        return jnp.sqrt(jnp.sum((x.astype(jnp.float32) - y) ** 2) / jnp.sum(y**2))

    return {name: one(x, expected[name]) for name, x in actual.items()}


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
