"""The layer `MixtureOfExperts` compared with its grouped matmuls alone and, if installed, with the layer of transformers on `torch._grouped_mm`.

    python benchmarks/moe_layer.py --json moe_layer.json --plot moe_layer.png
    python benchmarks/moe_layer.py --problems 'E64' --time-limit 300
    python benchmarks/moe_layer.py --quick                                # tiny problems
    python benchmarks/moe_layer.py --render moe_layer.json --markdown moe_layer.md

Every result of ours is first compared with the layer in float32 on this device and at full size; speeds are reported only if the results
agree. The peer receives the same weights and tokens in the same run, and is timed as CUDA graphs where it can be captured. "matmuls alone" has rows
that are sorted already: what is above its time is routing, sorting, moving and adding up.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import command, comparison
from benchmarks.comparison import Implementation
from benchmarks.linear_plot import plot as plot_bars
from benchmarks.measure import torch_work
from benchmarks.prepare import DIRECTIONS, fastest, input_sets, PeerRow, prepare, Prepared, ratio
from ejkernel_eqx._tolerances import Tolerance, TOLERANCES
from ejkernel_eqx.nn.moe.statistics import counts_of
from ejkernel_eqx.tuning.check import all_errors

ALONE = "matmuls alone"
PEER = "transformers, grouped_mm"
Arrays = dict[str, Array]


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


class Inputs(NamedTuple):
    weights: Arrays
    x: Array
    cotangent: Array


@dataclasses.dataclass
class Row(PeerRow):
    """One implementation of one problem in one direction. `reason` is set if there is no time; `ratio` is the time of the peer divided by this
    one's, `over_alone` this one's divided by that of the grouped matmuls alone."""

    flops: float | None = None
    tflop_per_s: float | None = None
    over_alone: float | None = None

    @property
    def speed(self) -> str:
        over = f", {self.over_alone:.2f} of the time of its matmuls" if self.over_alone else ""
        return f"{self.ms:.3f} ms, {self.tflop_per_s:.1f} TFLOP/s{over}"


def layer_of(problem: LayerProblem, platform: ejx.PlatformLike | None = None, seed: int = 0) -> Any:
    p = problem
    options: Any = {"num_experts": p.N, "top_k": p.top_k, "platform": platform, "dtype": p.dtype}
    return ejx.nn.MixtureOfExperts(p.E, p.F, **options, key=jax.random.key(seed))


def _weights(layer: Any) -> tuple[Array, ...]:
    return layer.gate.weight, layer.experts.gate_proj, layer.experts.up_proj, layer.experts.down_proj


NAMES = ("gate", "gate_proj", "up_proj", "down_proj")


def make_inputs(problem: LayerProblem, seed: int = 0) -> Inputs:
    weights = jax.jit(lambda: dict(zip(NAMES, _weights(layer_of(problem, seed=seed)))))()
    x, cotangent = jax.random.normal(jax.random.key(seed + 100), (2, problem.T, problem.E)).astype(
        problem.dtype
    )
    return Inputs(weights, x, cotangent)


def with_weights(problem: LayerProblem, platform: ejx.PlatformLike | None) -> Callable[[Arrays], Any]:
    """A function of the weights by name that returns the layer with them."""
    empty = eqx.filter_eval_shape(layer_of, problem, platform)
    return lambda weights: eqx.tree_at(_weights, empty, tuple(weights[name] for name in NAMES))


def ours(
    problem: LayerProblem, platform: ejx.PlatformLike | None, direction: str
) -> Callable[[Inputs], Arrays]:
    layer = with_weights(problem, platform)
    return lambda inputs: _results(lambda weights, x: layer(weights)(x), direction, inputs)


def alone(problem: LayerProblem, direction: str) -> Callable[[Inputs], Arrays]:
    """The grouped matmuls of the layer on rows that are sorted already."""
    layer = with_weights(problem, None)

    def run(inputs: Inputs) -> Arrays:
        # As many rows as the layer has, in even groups; what is in them does not matter.
        rows, cotangent = (jnp.tile(x, (problem.top_k, 1)) for x in (inputs.x, inputs.cotangent))
        sizes = counts_of(jnp.arange(rows.shape[0], dtype=jnp.int32) % problem.N, problem.N)
        call = lambda weights, rows: layer(weights).experts(rows, sizes)
        return _results(call, direction, Inputs(inputs.weights, rows, cotangent))

    return run


def _results(call: Callable[[Arrays, Array], Array], direction: str, inputs: Inputs) -> Arrays:
    if direction == "forward":
        return {"out": call(inputs.weights, inputs.x)}
    out, pull = jax.vjp(call, inputs.weights, inputs.x)
    weights, x = pull(inputs.cotangent)
    return {"out": out, "x": x} | {name: weights[name] for name in NAMES[1:]}


def expected_results(problem: LayerProblem, inputs: Inputs) -> dict[str, Arrays]:
    """The results of the layer in float32."""
    wide = dataclasses.replace(problem, dtype="float32")
    inputs = jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, inputs
    )
    with jax.default_matmul_precision("highest"):
        return {way: jax.jit(ours(wide, "xla", way))(inputs) for way in problem.directions}


def in_torch(problem: LayerProblem, sets: Sequence[Inputs], direction: str) -> Prepared:
    """Mixtral's layer in transformers."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import MixtralConfig  # pyright: ignore[reportMissingImports]
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock  # pyright: ignore[reportMissingImports]

    sizes = {"hidden_size": problem.E, "intermediate_size": problem.F, "num_local_experts": problem.N}
    config = MixtralConfig(**sizes, num_experts_per_tok=problem.top_k)
    config._experts_implementation = "grouped_mm"
    jax.block_until_ready(sets)

    def tensors(inputs: Inputs) -> tuple[Any, ...]:
        block = MixtralSparseMoeBlock(config).to("cuda", getattr(torch, problem.dtype))
        take = lambda name: torch.from_dlpack(inputs.weights[name])
        with torch.no_grad():
            block.gate.weight.copy_(take("gate"))
            block.experts.gate_up_proj.copy_(torch.cat([take("gate_proj"), take("up_proj")], 1))
            block.experts.down_proj.copy_(take("down_proj"))
        x = torch.from_dlpack(inputs.x)[None].clone().requires_grad_(direction != "forward")
        return block, x, torch.from_dlpack(inputs.cotangent)[None].clone()

    def run(block: Any, x: Any, cotangent: Any) -> Any:
        if direction == "forward":
            with torch.no_grad():
                return block(x), ()
        out = block(x)
        return out, torch.autograd.grad(out, (x, *block.parameters()), cotangent)

    torch_sets = [tensors(inputs) for inputs in sets]
    out, gradients = run(*torch_sets[0])
    torch.cuda.synchronize()
    results = {"out": jnp.from_dlpack(out.detach()[0].contiguous())}
    results |= {"x": jnp.from_dlpack(gradients[0][0].contiguous())} if gradients else {}
    return Prepared(results, lambda runs: torch_work(run, torch_sets, runs))


def implementations(
    problem: LayerProblem, options: argparse.Namespace, direction: str
) -> Iterator[Implementation]:
    def prepared(name: str, run: Callable[[Inputs], Arrays]) -> Implementation:
        return Implementation(name, False, lambda sets, direction: prepare(run, sets))

    for name, platform in comparison.platforms(options):
        yield prepared(name, ours(problem, platform, direction))
    yield prepared(ALONE, alone(problem, direction))
    if options.torch:
        yield Implementation(PEER, True, functools.partial(in_torch, problem))


# Measuring


def measure(problem: LayerProblem, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of a problem, by direction."""
    sets = input_sets(functools.partial(make_inputs, problem))
    check = functools.partial(_check, problem, expected_results(problem, sets[0]))
    found = functools.partial(implementations, problem, options)
    for direction, rows in comparison.compared(
        Row, problem.name, problem.directions, found, sets, check, options
    ):
        peer = fastest(row for row in rows if row.is_peer)
        lower = fastest(row for row in rows if row.implementation == ALONE)
        for row in rows:
            row.flops = problem.flops(direction)
            row.tflop_per_s = row.flops / row.ms / 1e9 if row.ms else None
            if row.implementation != ALONE:
                row.ratio = ratio(peer, row)
                row.over_alone = row.ms / lower if row.ms and lower else None
        yield rows


def _check(problem: LayerProblem, expected: Mapping[str, Arrays], row: Row, results: Arrays) -> str | None:
    """The error in the results, if any; that of other rows says nothing of the layer."""
    if row.implementation == ALONE:
        return None
    allowed: dict[str, Tolerance] = {
        name: TOLERANCES[problem.dtype]["forward" if name == "out" else "gradient"] for name in results
    }
    if row.implementation == PEER:
        # Its router works in the dtype of the tokens, so a few tokens go to other experts: they are left out.
        results, expected_now = _of_equal_choices(results, expected[row.direction], allowed)
    else:
        expected_now = expected[row.direction]
    return comparison.check_errors(row, all_errors(results, expected_now, allowed))


def _of_equal_choices(
    results: Arrays, expected: Arrays, allowed: Mapping[str, Tolerance]
) -> tuple[Arrays, Arrays]:
    """The tokens whose result is near the expected one; all of them if those are less than nine in ten."""
    out = results["out"].astype(jnp.float32)
    distance = jnp.linalg.norm(out - expected["out"], axis=-1)
    near = distance <= 8 * allowed["out"].rms * jnp.linalg.norm(expected["out"], axis=-1)
    if jnp.mean(near) < 0.9:
        return results, expected
    take = lambda some: {name: x[near] for name, x in some.items() if name in ("out", "x")}
    return take(results), take({name: expected[name] for name in results})


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The lowest ratio of ours to the peer, and the most that the layer takes over its grouped matmuls."""
    most = comparison.Extreme("most time over that of its matmuls", lambda row: row.over_alone, max)
    mine = [row for row in rows if row.implementation == "default"]
    return comparison.summary(mine, extremes=(most,))


# Showing

HEADER = ("problem", "implementation", "ms", "spread", "TFLOP/s", "over matmuls", "ratio", "error")


TABLES = command.Tables(
    HEADER,
    DIRECTIONS,
    "over matmuls: time over that of the grouped matmuls alone; ratio: speed over the peer's",
    "Speed of mixtures of experts over their peer",
)


def plot(content: Mapping[str, Any], path: str) -> None:
    plot_bars(content, path, "Mixtures of experts")


# The problems

P = LayerProblem
ANCHORS = (
    P(16384, 4096, 14336, 8, 2),  # Mixtral
    P(16384, 2048, 768, 128, 8),  # Qwen3-30B-A3B
    P(16384, 2048, 1408, 64, 6),  # DeepSeek-V2-Lite
    P(1, 4096, 14336, 8, 2, decode=True),
    P(32, 2048, 768, 128, 8, decode=True),
)
CPU = (P(256, 128, 256, 8, 2, dtype="float32"), P(1, 128, 256, 64, 2, decode=True, dtype="float32"))
TINY = (P(12, 8, 16, 4, 2, dtype="float32"), P(1, 8, 16, 4, 2, decode=True, dtype="float32"))

# The command

COMPARISON = comparison.Comparison(
    "moe_layer",
    __doc__,
    comparison.Problems(TINY, CPU, ANCHORS),
    measure,
    Row,
    comparison.Output(summarise, TABLES, plot),
    peers=("torch", "transformers"),
    needed=("transformers",),
)
parse, main = COMPARISON.parse, COMPARISON.main


if __name__ == "__main__":
    COMPARISON.script()
