"""Grouped matmuls compared with PyTorch's `_grouped_mm`, if installed, and `lax.ragged_dot`; and the layer `MixtureOfExperts` beside them.

    python -m benchmarks moe --json moe.json --plot moe.png
    python -m benchmarks moe --problems 'E64' --time-limit 300
    python -m benchmarks moe-layer --json moe_layer.json --plot moe_layer.png
    python -m benchmarks moe --render moe.json --plot moe.png --markdown moe.md

Of grouped matmuls the output and the gradient of each side are measured apart; gates, gathered rows and right sides in 8 bits have no peer. The layer
is compared with the layer of transformers on `torch._grouped_mm`, which receives the same weights and tokens, and with its grouped matmuls alone, on
rows that are sorted already: what is above their time is routing, sorting, moving and adding up. Peers in PyTorch are timed as CUDA graphs where they
can be captured.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import ejkernel_eqx as ejx
from benchmarks import peers, runner
from benchmarks.peers import Tensors, TorchPeer
from benchmarks.prepare import (
    Arrays,
    BASELINE,
    DIRECTIONS,
    fastest,
    FORWARD,
    Implementation,
    Inputs,
    nbytes,
    OURS,
    PEER,
    prepare,
    Prepared,
    Row,
    UNTUNED,
)
from ejkernel_eqx._tolerances import TOLERANCES
from ejkernel_eqx.matmul import reference
from ejkernel_eqx.matmul.spec import GroupedArrays, GroupedSpec, PAIR
from ejkernel_eqx.nn.moe.statistics import counts_of
from ejkernel_eqx.paged.cache.quantise import quantise

LEFT, RIGHT = "d_lhs", "d_rhs"
SIDES = (FORWARD, LEFT, RIGHT)
ALONE = "matmuls alone"
Forward = Callable[[Arrays, Arrays], Array]


# Grouped matmuls


@dataclasses.dataclass(frozen=True)
class MoeProblem:
    """`M` rows in `E` groups by right sides `[E, K, N]`.

    `skewed`: the first group has half of the rows. `gated`: SwiGLU of two right sides. `top_k`: the rows are gathered from `M / top_k` tokens.
    `stored`: the dtype of right sides in 8 bits. `decode`: every group has a row, and only the forward pass is measured.
    """

    M: int
    K: int
    N: int
    E: int
    skewed: bool = False
    gated: bool = False
    top_k: int = 0
    stored: str = ""
    decode: bool = False
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        words = [f"M{self.M} K{self.K} N{self.N} E{self.E}"]
        words += [word for word in ("skewed", "gated") if getattr(self, word)]
        words += [f"gathered by {self.top_k}"] if self.top_k else []
        return " ".join(
            [*words, *filter(None, (self.stored, "" if self.dtype == "bfloat16" else self.dtype))]
        )

    @property
    def is_plain(self) -> bool:
        """Tells whether peers have it: one right side, rows in order, nothing stored in 8 bits."""
        return not (self.gated or self.top_k or self.stored)

    @property
    def directions(self) -> tuple[str, ...]:
        return SIDES[:1] if self.decode or self.stored else SIDES

    @property
    def flops(self) -> float:
        """Operations of any one direction."""
        return 2.0 * self.M * self.K * self.N * (2 if self.gated else 1)


def make_inputs(problem: MoeProblem, seed: int = 0) -> Inputs:
    p, keys = problem, iter(jax.random.split(jax.random.key(seed), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.float32)
    rng = np.random.default_rng(seed)
    rows = p.M // p.top_k if p.top_k else p.M
    learned = {"lhs": normal(rows, p.K).astype(p.dtype)}
    constants = {"group_sizes": jnp.asarray(group_sizes(p, rng))}
    for name in ("rhs", "up") if p.gated else ("rhs",):
        w = normal(p.E, p.K, p.N) * p.K**-0.5
        if p.stored:
            stored, constants[f"{name}_scale"] = quantise(jnp.swapaxes(w, 1, 2), p.stored)
            constants[name] = jnp.swapaxes(stored, 1, 2)
        else:
            learned[name] = w.astype(p.dtype)
    if p.top_k:
        constants["row_indices"] = jnp.asarray(rng.permutation(np.arange(p.M) % rows).astype(np.int32))
    return Inputs(learned, normal(p.M, p.N).astype(p.dtype), constants)


def group_sizes(problem: MoeProblem, rng: np.random.Generator) -> np.ndarray:
    """All rows are in a group."""
    rows, count = problem.M, problem.E
    if problem.decode:
        sizes = np.bincount(np.arange(rows) % count, minlength=count)
    elif problem.skewed:
        sizes = np.concatenate([[rows // 2], np.full(count - 1, (rows - rows // 2) // (count - 1))])
        sizes[-1] += rows - sizes.sum()
    else:
        sizes = rng.multinomial(rows, rng.dirichlet(np.full(count, 16.0)))
    return sizes.astype(np.int32)


def ours(problem: MoeProblem, platform: ejx.PlatformLike | None) -> Forward:
    """Our operation as a function of the learned inputs and the constants."""
    operation = ejx.GroupedMatmul("silu" if problem.gated else None, platform=platform)
    return lambda learned, constants: operation(**learned, **constants)


def ragged_dot(learned: Arrays, constants: Arrays) -> Array:
    """JAX's own."""
    return lax.ragged_dot(learned["lhs"], learned["rhs"], constants["group_sizes"])


def directed(forward: Forward, direction: str) -> Callable[[Inputs], Arrays]:
    """The measured function: the output, or the gradient of one side alone."""
    if direction == FORWARD:
        return lambda inputs: {"out": forward(inputs.learned, inputs.constants)}

    def gradient(inputs: Inputs) -> Arrays:
        some = {name: x for name, x in inputs.learned.items() if (name == "lhs") == (direction == LEFT)}
        call = lambda some: forward({**inputs.learned, **some}, inputs.constants)
        return jax.vjp(call, some)[1](inputs.cotangent)[0]

    return gradient


def expected_results(problem: MoeProblem, inputs: Inputs) -> Arrays:
    """The results of the reference in float32."""
    with jax.default_matmul_precision("highest"):
        return _expected_results(problem, inputs)


@functools.partial(jax.jit, static_argnums=0, compiler_options=UNTUNED)
def _expected_results(problem: MoeProblem, inputs: Inputs) -> Arrays:
    spec = GroupedSpec("float32", "silu" if problem.gated else None, PAIR if problem.gated else None)
    constants = inputs.constants
    arrays = GroupedArrays(
        inputs.learned["lhs"],
        constants["group_sizes"],
        rows=constants.get("row_indices"),
        stored=constants.get("rhs"),
        scale=constants.get("rhs_scale"),
        up_stored=constants.get("up"),
        up_scale=constants.get("up_scale"),
    )

    def forward(learned: Arrays) -> Array:
        return reference.multiply(arrays._replace(**learned), spec)["out"]

    learned, cotangent = jax.tree.map(lambda x: x.astype(jnp.float32), (inputs.learned, inputs.cotangent))
    out, pull = jax.vjp(forward, learned)
    gradients = pull(cotangent)[0] if len(problem.directions) > 1 else {}
    return {"out": out, **gradients}


def grouped_mm() -> TorchPeer:
    """PyTorch's grouped product, of the transposed sides for the gradients."""

    def multiply(x: Tensors, lhs: Any, rhs: Any) -> Any:
        import torch

        return torch._grouped_mm(lhs, rhs, offs=x["ends"])

    def gradients(x: Tensors, cotangent: Any, direction: str) -> Tensors:
        if direction == LEFT:
            return {"lhs": multiply(x, cotangent, x["rhs"].transpose(-2, -1))}
        return {"rhs": multiply(x, x["lhs"].transpose(-2, -1), cotangent)}

    def ends(x: Tensors) -> Tensors:
        import torch

        return {"ends": x["group_sizes"].cumsum(0).to(torch.int32)}

    run = lambda x: multiply(x, x["lhs"], x["rhs"])
    return TorchPeer("torch._grouped_mm", "torch", run, gradients=gradients, constants=ends)


def implementations(
    problem: MoeProblem, options: argparse.Namespace, direction: str
) -> Iterator[Implementation]:
    def in_jax(forward: Forward, sets: Sequence[Inputs], direction: str) -> Prepared:
        return prepare(directed(forward, direction), sets)

    yield from runner.ours(options, lambda platform, *given: in_jax(ours(problem, platform), *given))
    if problem.is_plain:
        yield Implementation("lax.ragged_dot", functools.partial(in_jax, ragged_dot), PEER)


def complete(problem: MoeProblem, inputs: Inputs, direction: str, rows: list[Row]) -> None:
    """Bytes are those of reading every input once and writing every result once."""
    left, out = nbytes(inputs.learned["lhs"]), nbytes(inputs.cotangent)
    right = nbytes([x for name, x in inputs.learned.items() if name != "lhs"])
    right += nbytes([x for name, x in inputs.constants.items() if name.startswith(("rhs", "up"))])
    # A gradient of a gated product reads the other sides too.
    again = 0 if direction == FORWARD or not problem.gated else {LEFT: left}.get(direction, right)
    runner.rate(rows, bytes=left + right + out + again, flops=problem.flops)


def sum_up(rows: Sequence[Row], chosen: Sequence[MoeProblem]) -> dict[str, Any]:
    """Adds what skewed groups cost."""
    summary = FAMILY.summary(rows)
    even = {(row.problem, row.direction, row.implementation): row.ms for row in rows if row.ms}
    for row in rows:
        other = even.get((row.problem.replace(" skewed", ""), row.direction, row.implementation))
        if " skewed" in row.problem and row.ms and other and row.role == OURS:
            key = f"time over that of even groups, {row.direction}"
            value = {"value": row.ms / other, "problem": row.problem}
            summary[key] = max(summary.get(key, value), value, key=lambda entry: entry["value"])
    return {"summary": summary}


P = MoeProblem
MIXTRAL, DEEPSEEK = P(16384, 4096, 14336, 8), P(32768, 2048, 1408, 64)
DECODE = P(64, 2048, 1408, 64, decode=True)
ANCHORS = (
    MIXTRAL,
    DEEPSEEK,
    DECODE,
    dataclasses.replace(MIXTRAL, skewed=True),
    dataclasses.replace(DEEPSEEK, skewed=True),
    dataclasses.replace(DEEPSEEK, gated=True),
    dataclasses.replace(DEEPSEEK, gated=True, top_k=8),
    dataclasses.replace(MIXTRAL, gated=True),
    dataclasses.replace(DECODE, gated=True),
    dataclasses.replace(DECODE, stored="int8"),
    dataclasses.replace(DECODE, stored="float8_e4m3fn"),
    P(16384, 2048, 768, 128),
    P(8192, 2880, 2880, 32, gated=True),
)
CPU = (
    P(512, 256, 512, 8, dtype="float32"),
    P(512, 256, 512, 8, skewed=True, dtype="float32"),
    P(512, 256, 512, 8, gated=True, top_k=2, dtype="float32"),
    P(8, 256, 512, 64, decode=True, dtype="float32"),
)
TINY = (
    P(24, 8, 16, 3, dtype="float32"),
    P(24, 8, 16, 3, skewed=True, dtype="float32"),
    P(24, 8, 16, 3, gated=True, top_k=2, dtype="float32"),
    P(4, 8, 16, 4, decode=True, stored="int8", dtype="float32"),
)

FAMILY = runner.Family(
    "moe",
    __doc__,
    TINY,
    CPU,
    ANCHORS,
    make_inputs,
    implementations,
    expected_results,
    runner.Tables(
        (
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
        ),
        "temporary: memory over inputs and results; ratio: speed over the fastest peer's",
        "Speed of grouped matmuls over their peers",
        SIDES,
    ),
    "Grouped matmuls",
    peers=lambda problem: peers.installed(grouped_mm()) if problem.is_plain else (),
    near=None,
    complete=complete,
    extremes=(runner.MEMORY,),
    sum_up=sum_up,
)


# The layer


@dataclasses.dataclass(frozen=True)
class LayerProblem:
    """`T` tokens of width `E`, each to `top_k` of `N` experts that are `F` wide inside. `decode`: only the forward pass is measured."""

    T: int
    E: int
    F: int
    N: int
    top_k: int
    decode: bool = False
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"T{self.T} E{self.E} F{self.F} N{self.N} top {self.top_k}{'' if self.dtype == 'bfloat16' else f' {self.dtype}'}"

    @property
    def directions(self) -> tuple[str, ...]:
        return DIRECTIONS[:1] if self.decode else DIRECTIONS

    def flops(self, direction: str) -> float:
        forward = 6.0 * self.T * self.top_k * self.E * self.F
        return forward if direction == "forward" else 3 * forward


def layer_of(problem: LayerProblem, platform: ejx.PlatformLike | None = None, seed: int = 0) -> Any:
    p = problem
    options: Any = {"num_experts": p.N, "top_k": p.top_k, "platform": platform, "dtype": p.dtype}
    return ejx.nn.MixtureOfExperts(p.E, p.F, **options, key=jax.random.key(seed))


def _weights(layer: Any) -> tuple[Array, ...]:
    return layer.gate.weight, layer.experts.gate_proj, layer.experts.up_proj, layer.experts.down_proj


NAMES = ("gate", "gate_proj", "up_proj", "down_proj")


def make_layer_inputs(problem: LayerProblem, seed: int = 0) -> Inputs:
    weights = jax.jit(lambda: dict(zip(NAMES, _weights(layer_of(problem, seed=seed)))))()
    shape = (2, problem.T, problem.E)
    x, cotangent = jax.random.normal(jax.random.key(seed + 100), shape).astype(problem.dtype)
    return Inputs(weights | {"x": x}, cotangent, {})


def layer(
    problem: LayerProblem, platform: ejx.PlatformLike | None, direction: str
) -> Callable[[Inputs], Arrays]:
    with_weights = _with_weights(problem, platform)
    return lambda inputs: _results(lambda x: with_weights(x)(x["x"]), direction, inputs)


def alone(problem: LayerProblem, direction: str) -> Callable[[Inputs], Arrays]:
    """The grouped matmuls of the layer on rows that are sorted already."""
    with_weights = _with_weights(problem, None)

    def run(inputs: Inputs) -> Arrays:
        # As many rows as the layer has, in even groups; what is in them does not matter.
        rows, cotangent = (jnp.tile(x, (problem.top_k, 1)) for x in (inputs.learned["x"], inputs.cotangent))
        sizes = counts_of(jnp.arange(rows.shape[0], dtype=jnp.int32) % problem.N, problem.N)
        call = lambda x: with_weights(x).experts(x["x"], sizes)
        return _results(call, direction, Inputs(inputs.learned | {"x": rows}, cotangent, {}))

    return run


def _with_weights(problem: LayerProblem, platform: ejx.PlatformLike | None) -> Callable[[Arrays], Any]:
    """A function of the weights by name that returns the layer with them."""
    empty = eqx.filter_eval_shape(layer_of, problem, platform)
    return lambda weights: eqx.tree_at(_weights, empty, tuple(weights[name] for name in NAMES))


def _results(call: Callable[[Arrays], Array], direction: str, inputs: Inputs) -> Arrays:
    if direction == FORWARD:
        return {"out": call(inputs.learned)}
    out, pull = jax.vjp(call, inputs.learned)
    gradients = pull(inputs.cotangent)[0]
    return {"out": out} | {name: x for name, x in gradients.items() if name != "gate"}


def expected_layer(problem: LayerProblem, inputs: Inputs) -> Arrays:
    """The results of the layer in float32."""
    wide = dataclasses.replace(problem, dtype="float32")
    inputs = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    with jax.default_matmul_precision("highest"):
        return jax.jit(layer(wide, "xla", problem.directions[-1]))(inputs)


def in_transformers(problem: LayerProblem, sets: Sequence[Inputs], direction: str) -> Prepared:
    """Mixtral's layer in transformers."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import MixtralConfig  # pyright: ignore[reportMissingImports]
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock  # pyright: ignore[reportMissingImports]

    sizes = {"hidden_size": problem.E, "intermediate_size": problem.F, "num_local_experts": problem.N}
    config = MixtralConfig(**sizes, num_experts_per_tok=problem.top_k)
    config._experts_implementation = "grouped_mm"

    def tensors(inputs: Inputs) -> tuple[Any, ...]:
        block = MixtralSparseMoeBlock(config).to("cuda", getattr(torch, problem.dtype))
        take = lambda name: torch.from_dlpack(inputs.learned[name])
        with torch.no_grad():
            block.gate.weight.copy_(take("gate"))
            block.experts.gate_up_proj.copy_(torch.cat([take("gate_proj"), take("up_proj")], 1))
            block.experts.down_proj.copy_(take("down_proj"))
        x = take("x")[None].clone().requires_grad_(direction != FORWARD)
        return block, x, peers.tensor(inputs.cotangent)[None]

    def run(block: Any, x: Any, cotangent: Any) -> Tensors:
        if direction == FORWARD:
            with torch.no_grad():
                return {"out": block(x)[0]}
        out = block(x)
        return {"out": out[0], "x": torch.autograd.grad(out, (x, *block.parameters()), cotangent)[0][0]}

    return peers.prepared(run, sets, tensors)


def layer_implementations(
    problem: LayerProblem, options: argparse.Namespace, direction: str
) -> Iterator[Implementation]:
    yield from runner.ours(
        options, lambda platform, sets, direction: prepare(layer(problem, platform, direction), sets)
    )
    matmuls = lambda sets, direction: prepare(alone(problem, direction), sets)
    yield Implementation(ALONE, matmuls, BASELINE, is_checked=False)
    if options.torch:
        make = functools.partial(in_transformers, problem)
        yield Implementation("transformers, grouped_mm", make, PEER)


def complete_layer(problem: LayerProblem, inputs: Inputs, direction: str, rows: list[Row]) -> None:
    lower = fastest(rows, BASELINE)
    runner.rate(rows, flops=problem.flops(direction))
    for row in rows:
        known = row.ms and lower and row.role != BASELINE
        row.numbers["over_alone"] = row.ms / lower if known else None


def layer_errors(
    problem: LayerProblem, inputs: Inputs, row: Row, results: Arrays, expected: Mapping[str, Array]
) -> runner.Errors:
    """The router of the peer works in the dtype of the tokens, so a few tokens go to other experts: they are left out, unless they are more than
    one in ten."""
    if row.role == PEER:
        distance = jnp.linalg.norm(results["out"].astype(jnp.float32) - expected["out"], axis=-1)
        bound = 8 * TOLERANCES[problem.dtype]["forward"].rms
        near = distance <= bound * jnp.linalg.norm(expected["out"], axis=-1)
        if jnp.mean(near) >= 0.9:
            results, expected = ({name: some[name][near] for name in results} for some in (results, expected))
    return runner.errors_of(problem.dtype, results, expected)


L = LayerProblem
LAYERS = (
    L(16384, 4096, 14336, 8, 2),  # Mixtral
    L(16384, 2048, 768, 128, 8),  # Qwen3-30B-A3B
    L(16384, 2048, 1408, 64, 6),  # DeepSeek-V2-Lite
    L(1, 4096, 14336, 8, 2, decode=True),
    L(32, 2048, 768, 128, 8, decode=True),
)
LAYERS_CPU = (L(256, 128, 256, 8, 2, dtype="float32"), L(1, 128, 256, 64, 2, decode=True, dtype="float32"))
LAYERS_TINY = (L(12, 8, 16, 4, 2, dtype="float32"), L(1, 8, 16, 4, 2, decode=True, dtype="float32"))

LAYER = runner.Family(
    "moe-layer",
    __doc__,
    LAYERS_TINY,
    LAYERS_CPU,
    LAYERS,
    make_layer_inputs,
    layer_implementations,
    expected_layer,
    runner.Tables(
        ("problem", "implementation", "ms", "spread", "TFLOP/s", "over matmuls", "ratio", "error"),
        "over matmuls: time over that of the grouped matmuls alone; ratio: speed over the peer's",
        "Speed of mixtures of experts over their peer",
    ),
    "Mixtures of experts",
    errors=layer_errors,
    near=None,
    complete=complete_layer,
    extremes=(runner.Extreme("most time over that of its matmuls", runner.entry("over_alone"), max),),
    packages=("torch", "transformers"),
    needed=("transformers",),
)
