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

import dataclasses
import functools
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import ejkernel_eqx as ejx
from benchmarks import peers, prepare, problems, runner
from benchmarks.peers import Tensors, TorchPeer
from benchmarks.prepare import Arrays, BASELINE, BOTH, DIRECTIONS, FORWARD, Inputs, nbytes, Others, Row
from benchmarks.runner import Errors
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
class MoeProblem(problems.Problem):
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

    def words(self) -> list[str]:
        words = [f"M{self.M} K{self.K} N{self.N} E{self.E}"]
        words += [word for word in ("skewed", "gated") if getattr(self, word)]
        return [*words, f"gathered by {self.top_k}" if self.top_k else "", self.stored]

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


PROBLEMS = problems.load("moe", MoeProblem)


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


def ragged_dot(learned: Arrays, constants: Arrays) -> Array:
    """JAX's own."""
    return lax.ragged_dot(learned["lhs"], learned["rhs"], constants["group_sizes"])


@prepare.reference
def expected_results(problem: MoeProblem, inputs: Inputs) -> Arrays:
    """The results of the reference in float32."""
    spec = GroupedSpec("float32", "silu" if problem.gated else None, PAIR if problem.gated else None)
    names = {"row_indices": "rows", "rhs": "stored", "rhs_scale": "scale", "up": "up_stored"}

    def forward(learned: Arrays, constants: Arrays) -> Array:
        constant = {names.get(name, name): x for name, x in constants.items() if name != "group_sizes"}
        arrays: Any = GroupedArrays(sizes=constants["group_sizes"], **learned, **constant)
        return reference.multiply(arrays, spec)["out"]

    direction = BOTH if len(problem.directions) > 1 else FORWARD
    return prepare.directed(forward, direction, with_out=True)(inputs)


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


class Moe(runner.Family):
    name, title, description, lists = "moe", "Grouped matmuls", __doc__, PROBLEMS
    near, extremes = None, (runner.MEMORY,)

    def ours(self, problem: MoeProblem, platform: Any) -> Forward:
        operation = ejx.GroupedMatmul("silu" if problem.gated else None, platform=platform)
        return lambda learned, constants: operation(**learned, **constants)

    def directed(self, problem: MoeProblem, forward: Any, direction: str) -> Callable[[Any], Arrays]:
        """The output, or the gradient of one side alone."""

        def run(inputs: Inputs) -> Arrays:
            learned = inputs.learned
            some = {name: x for name, x in learned.items() if (name == "lhs") == (direction == LEFT)}
            call = lambda some, constants: forward({**learned, **some}, constants)
            return prepare.directed(call, direction)(inputs._replace(learned=some))

        return run

    def beside(self, problem: MoeProblem, options: Namespace, direction: str) -> Others:
        if problem.is_plain:
            yield self.in_jax(problem, "lax.ragged_dot", ragged_dot)

    def peers(self, problem: MoeProblem) -> Sequence[TorchPeer]:
        return (grouped_mm(),) if problem.is_plain else ()

    def complete(self, problem: MoeProblem, inputs: Inputs, direction: str, rows: list[Row]) -> None:
        """Bytes are those of reading every input once and writing every result once."""
        left, out = nbytes(inputs.learned["lhs"]), nbytes(inputs.cotangent)
        right = nbytes([x for name, x in inputs.learned.items() if name != "lhs"])
        right += nbytes([x for name, x in inputs.constants.items() if name.startswith(("rhs", "up"))])
        # A gradient of a gated product reads the other sides too.
        again = 0 if direction == FORWARD or not problem.gated else {LEFT: left}.get(direction, right)
        runner.rate(rows, bytes=left + right + out + again, flops=problem.flops)

    def sum_up(self, rows: Sequence[Row], chosen: Sequence[MoeProblem]) -> dict[str, Any]:
        """Adds what skewed groups cost."""
        summary = self.summary(rows)
        even = {(row.problem, row.direction, row.implementation): row.ms for row in rows if row.ms}
        for row in rows:
            other = even.get((row.problem.replace(" skewed", ""), row.direction, row.implementation))
            if " skewed" in row.problem and row.ms and other and row.role == prepare.OURS:
                key = f"time over that of even groups, {row.direction}"
                value = {"value": row.ms / other, "problem": row.problem}
                summary[key] = max(summary.get(key, value), value, key=lambda entry: entry["value"])
        return {"summary": summary}


FAMILY = Moe(make_inputs=make_inputs, expected=expected_results)


# The layer


@dataclasses.dataclass(frozen=True)
class LayerProblem(problems.Problem):
    """`T` tokens of width `E`, each to `top_k` of `N` experts that are `F` wide inside. `decode`: only the forward pass is measured."""

    T: int
    E: int
    F: int
    N: int
    top_k: int
    decode: bool = False

    def words(self) -> list[str]:
        return [f"T{self.T} E{self.E} F{self.F} N{self.N} top {self.top_k}"]

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


def alone(problem: LayerProblem, direction: str) -> Callable[[Inputs], Arrays]:
    """The grouped matmuls of the layer on rows that are sorted already."""
    with_weights = _with_weights(problem, None)

    def run(inputs: Inputs) -> Arrays:
        # As many rows as the layer has, in even groups; what is in them does not matter.
        rows, cotangent = (jnp.tile(x, (problem.top_k, 1)) for x in (inputs.learned["x"], inputs.cotangent))
        sizes = counts_of(jnp.arange(rows.shape[0], dtype=jnp.int32) % problem.N, problem.N)
        call = lambda learned, constants: with_weights(learned).experts(learned["x"], sizes)
        return results_of(call, direction)(Inputs(inputs.learned | {"x": rows}, cotangent, {}))

    return run


def _with_weights(problem: LayerProblem, platform: ejx.PlatformLike | None) -> Callable[[Arrays], Any]:
    """A function of the weights by name that returns the layer with them."""
    empty = eqx.filter_eval_shape(layer_of, problem, platform)
    return lambda weights: eqx.tree_at(_weights, empty, tuple(weights[name] for name in NAMES))


def results_of(call: Forward, direction: str) -> Callable[[Inputs], Arrays]:
    """The output and the gradients but for the router's."""
    run = prepare.directed(call, direction, True)
    return lambda inputs: {name: x for name, x in run(inputs).items() if name != "gate"}


def layer(problem: LayerProblem, platform: ejx.PlatformLike | None) -> Forward:
    with_weights = _with_weights(problem, platform)
    return lambda learned, constants: with_weights(learned)(learned["x"])


@prepare.reference
def expected_layer(problem: LayerProblem, inputs: Inputs) -> Arrays:
    """The results of the layer in float32."""
    wide = dataclasses.replace(problem, dtype="float32")
    return results_of(layer(wide, "xla"), problem.directions[-1])(inputs)


def in_transformers(problem: LayerProblem, sets: Sequence[Inputs], direction: str) -> prepare.Prepared:
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


class Layer(runner.Family):
    name, title, description = "moe-layer", "Mixtures of experts", __doc__
    lists = problems.load("moe-layer", LayerProblem)
    near, packages, needed = None, ("torch", "transformers"), ("transformers",)
    extremes = (runner.Extreme("most time over that of its matmuls", runner.entry("over_alone"), max),)

    def directed(self, problem: LayerProblem, forward: Any, direction: str) -> Callable[[Any], Arrays]:
        return results_of(forward, direction)

    def beside(self, problem: LayerProblem, options: Namespace, direction: str) -> Others:
        matmuls = lambda sets, direction: prepare.ready(alone(problem, direction), sets)
        yield prepare.Implementation(ALONE, matmuls, BASELINE, is_checked=False)
        if options.torch:
            make = functools.partial(in_transformers, problem)
            yield prepare.Implementation("transformers, grouped_mm", make, prepare.PEER)

    def complete(self, problem: LayerProblem, inputs: Inputs, direction: str, rows: list[Row]) -> None:
        lower = prepare.fastest(rows, BASELINE)
        runner.rate(rows, flops=problem.flops(direction))
        for row in rows:
            known = row.ms and lower and row.role != BASELINE
            row.numbers["over_alone"] = row.ms / lower if known else None

    def errors(self, problem: LayerProblem, row: Row, results: Arrays, expected: Arrays) -> Errors:
        """The router of the peer works in the dtype of the tokens, so a few tokens go to other experts: they are left out, unless they are more
        than one in ten."""
        if row.role == prepare.PEER:
            distance = jnp.linalg.norm(results["out"].astype(jnp.float32) - expected["out"], axis=-1)
            bound = 8 * TOLERANCES[problem.dtype]["forward"].rms
            near = distance <= bound * jnp.linalg.norm(expected["out"], axis=-1)
            if jnp.mean(near) >= 0.9:
                results, expected = (
                    {name: some[name][near] for name in results} for some in (results, expected)
                )
        return runner.errors_of(problem.dtype, results, expected)


LAYER = Layer(make_inputs=make_layer_inputs, expected=expected_layer, ours=layer)
