"""Losses of a projection to a vocabulary compared with Liger, with PyTorch's compiled logits, and with the products of matrices that they contain.

    python -m benchmarks losses --json losses.json --plot losses.png
    python -m benchmarks losses --problems 'N8192 E4096' --platforms default,xla
    python -m benchmarks losses --render losses.json --markdown losses.md

The baseline is the products alone, in 16 bits: one forward, three with gradients, and one more for a teacher. `chunks` is ours with chunks of half as
many tokens as there are features, where all tokens would be one chunk.
"""

import dataclasses
import functools
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import ejkernel_eqx as ejx
from benchmarks import prepare, problems, runner
from benchmarks.peers import Tensors, TorchPeer
from benchmarks.prepare import Arrays, BASELINE, FORWARD, Inputs, nbytes, Others, Prepared, Row
from ejkernel_eqx._kernel import selections_of

PRODUCTS, CHUNKS = "products", "chunks"
ENTROPY, STATISTICS, DIVERGENCE = "cross entropy", "statistics", "forward KL"


@dataclasses.dataclass(frozen=True)
class LossProblem(problems.Problem):
    """The mean over `N` tokens with `E` features, of a vocabulary of `V`; one token in 16 has no label. A teacher has as many features."""

    form: str
    N: int
    E: int
    V: int

    def words(self) -> list[str]:
        return [self.form, f"N{self.N}", f"E{self.E}", f"V{self.V}"]


PROBLEMS = problems.load("losses", LossProblem)


def make_inputs(problem: LossProblem, seed: int = 0) -> Inputs:
    keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 6))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.dtype(problem.dtype))
    head = lambda: normal(problem.V, problem.E) / jnp.asarray(problem.E**0.5, problem.dtype)
    learned = {"x": normal(problem.N, problem.E), "weight": head()}
    labels = jax.random.randint(next(keys), problem.N, 0, problem.V)
    constants = {"labels": jnp.where(jnp.arange(problem.N) % 16 == 15, -100, labels)}
    if problem.form == DIVERGENCE:
        constants |= {"teacher_x": normal(problem.N, problem.E), "teacher_weight": head()}
    return Inputs(learned, jnp.ones(()), constants)


def ours(problem: LossProblem, platform: Any, config: Any = None) -> Callable[[Arrays, Arrays], Any]:
    """The loss, and what else of each token is asked for."""

    def run(learned: Arrays, constants: Arrays) -> Any:
        x, weight, labels = learned["x"], learned["weight"], constants["labels"]
        if problem.form == DIVERGENCE:
            teacher = ejx.Teacher.from_features(constants["teacher_x"], constants["teacher_weight"])
            operation = ejx.LinearDivergence(platform=platform, config=config)
            return operation(x, weight, teacher, mask=labels >= 0), {}
        operation = ejx.LinearCrossEntropy(platform=platform, config=config)
        if problem.form == ENTROPY:
            return operation(x, labels, weight), {}
        loss, each = operation(x, labels, weight, return_statistics=True)
        return loss, {"log_probs": each.log_probs, "entropy": each.entropy}

    return run


def formula(problem: LossProblem) -> Callable[[Arrays, Arrays], Any]:
    """The same from all logits, as one writes it in `jax.numpy`."""

    def run(learned: Arrays, constants: Arrays) -> Any:
        labels = constants["labels"]
        real, log_p = labels >= 0, jax.nn.log_softmax(learned["x"] @ learned["weight"].T)
        mean = lambda losses: jnp.sum(jnp.where(real, losses, 0)) / jnp.sum(real, dtype=losses.dtype)
        if problem.form == DIVERGENCE:
            teacher = jax.nn.log_softmax(constants["teacher_x"] @ constants["teacher_weight"].T)
            return mean(jnp.sum(jnp.exp(teacher) * (teacher - log_p), -1)), {}
        log_probs = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[:, None], 1)[:, 0]
        if problem.form == ENTROPY:
            return mean(-log_probs), {}
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1)
        each = {"log_probs": jax.lax.stop_gradient(log_probs), "entropy": jax.lax.stop_gradient(entropy)}
        return mean(-log_probs), {name: jnp.where(real, x, 0) for name, x in each.items()}

    return run


def directed(forward: Callable[[Arrays, Arrays], Any], direction: str) -> Callable[[Inputs], Arrays]:
    def run(inputs: Inputs) -> Arrays:
        call = lambda learned: forward(learned, inputs.constants)
        if direction == FORWARD:
            loss, each = call(inputs.learned)
            return {"out": loss, **each}
        loss, pull, each = jax.vjp(call, inputs.learned, has_aux=True)
        return {"out": loss, **each, **pull(inputs.cotangent)[0]}

    return run


@prepare.reference
def expected_results(problem: LossProblem, inputs: Inputs) -> Arrays:
    return directed(formula(problem), prepare.BOTH)(inputs)


def products(inputs: Inputs, direction: str) -> Arrays:
    """What no implementation can do without."""
    (x, weight), constants = inputs.learned.values(), inputs.constants
    results = {"logits": x @ weight.T}
    if "teacher_x" in constants:
        results["teacher"] = constants["teacher_x"] @ constants["teacher_weight"].T
    if direction != FORWARD:
        logits = jax.lax.optimization_barrier(results.pop("logits"))
        results |= {"dx": logits @ weight, "dweight": logits.T @ x}
    return results


# Peers


def _compiled(problem: LossProblem) -> Callable[[Tensors], Any]:
    @functools.cache
    def made() -> Any:
        import torch
        from torch.nn import functional as F

        def cross_entropy(x: Any, weight: Any, labels: Any) -> Any:
            return F.cross_entropy((x @ weight.T).float(), labels)

        def divergence(x: Any, weight: Any, labels: Any, teacher_x: Any, teacher_weight: Any) -> Any:
            mine = F.log_softmax((x @ weight.T).float(), -1)
            other = F.log_softmax((teacher_x @ teacher_weight.T).float(), -1)
            losses = F.kl_div(mine, other, reduction="none", log_target=True).sum(-1)
            real = labels >= 0
            return torch.where(real, losses, 0.0).sum() / real.sum()

        return torch.compile(divergence if problem.form == DIVERGENCE else cross_entropy, dynamic=False)

    return lambda tensors: made()(**tensors)


def _liger(tensors: Tensors) -> Any:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(tensors["weight"], tensors["x"], tensors["labels"])


class Losses(runner.Family):
    name, title, description, lists = "losses", "Losses", __doc__, PROBLEMS
    packages, once = ("torch", "liger_kernel"), True
    extremes = (
        runner.Extreme("lowest share of the products' speed", runner.entry("of_products"), min),
        runner.Extreme("most temporary memory, GB", runner.entry("temporary_gb"), max),
    )

    def directed(self, problem: Any, forward: Any, direction: str) -> Callable[[Any], Arrays]:
        return directed(forward, direction)

    def peers(self, problem: LossProblem) -> Iterator[TorchPeer]:
        constants = lambda tensors: tensors | {"labels": tensors["labels"].long()}
        if problem.form != STATISTICS:
            yield TorchPeer("torch.compile", "torch", _compiled(problem), constants=constants)
        if problem.form == ENTROPY:
            yield TorchPeer("liger", "liger_kernel", _liger, constants=constants)

    def beside(self, problem: LossProblem, options: Namespace, direction: str) -> Others:
        def alone(sets: Sequence[Inputs], direction: str) -> Prepared:
            return prepare.ready(functools.partial(products, direction=direction), sets)

        yield prepare.Implementation(PRODUCTS, alone, BASELINE, is_checked=False)
        if (config := _in_chunks(problem)) is not None and direction != FORWARD:
            run = self.directed(problem, ours(problem, None, config), direction)
            yield prepare.Implementation(CHUNKS, lambda sets, direction: prepare.ready(run, sets))

    def complete(self, problem: LossProblem, inputs: Inputs, direction: str, rows: list[Row]) -> None:
        """`of_products`: the speed over that of the products. Temporaries of ours have the sum of the weight's gradient in float32."""
        count = {FORWARD: 1}.get(direction, 3) + (problem.form == DIVERGENCE)
        flops = 2.0 * count * problem.N * problem.E * problem.V
        runner.rate(rows, flops=flops, bytes=nbytes(inputs))
        base = next((row.ms for row in rows if row.role == BASELINE), None)
        for row in rows:
            row.numbers["of_products"] = base / row.ms if base and row.ms and row.role != BASELINE else None
            known = row.temporary_bytes
            row.numbers["temporary_gb"] = None if known is None else known / 1e9


def _in_chunks(problem: LossProblem) -> Any:
    """The configuration with chunks, where by default all tokens are one."""
    if problem.form != ENTROPY or jax.default_backend() != "gpu":
        return None
    inputs = jax.eval_shape(lambda: make_inputs(problem))
    given = ejx.inputs(inputs.learned["x"], inputs.constants["labels"], inputs.learned["weight"])
    chosen = selections_of(ejx.LinearCrossEntropy(), given)[0].config
    size = max(getattr(chosen, "chunk_size", problem.N), problem.E // 2)
    if getattr(chosen, "grad_chunk_size", 0) < problem.N or size >= problem.N:
        return None
    return dataclasses.replace(chosen, grad_chunk_size=size)


FAMILY = Losses(make_inputs=make_inputs, expected=expected_results, ours=ours)
