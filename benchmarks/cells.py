"""Recurrent cells (LSTM, GRU, RNN) compared with cuDNN, by PyTorch and by JAX.

    python -m benchmarks cells --json cells.json --plot cells.png
    python -m benchmarks cells --problems 'LSTM B64' --platforms default,xla
    python -m benchmarks cells --render cells.json --plot cells.png --markdown cells.md

The reference is a `lax.scan` of the formulas. Each time includes the projection of the inputs. PyTorch's layers are timed as CUDA graphs, without
Python's launch overhead, and keep their parameters in cuDNN's layout. Without a GPU, the peer is the `lax.scan`.
"""

import dataclasses
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import ejkernel_eqx as ejx
from benchmarks import linear, peers, prepare, problems, runner
from benchmarks.prepare import Arrays, FORWARD, Implementation, Inputs, Others, PEER, Prepared

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


@dataclasses.dataclass(frozen=True)
class CellProblem(problems.Problem):
    """`B` rows of `T` tokens with `I` inputs, and `H` hidden features, for one kind of cell."""

    cell: str
    B: int
    T: int
    H: int
    I: int

    def words(self) -> list[str]:
        other = "" if self.I == self.H else f"I{self.I}"
        return [self.cell, f"B{self.B}", f"T{self.T}", f"H{self.H}", other]


PROBLEMS = problems.load("cells", CellProblem)


def make_inputs(problem: CellProblem, seed: int = 0) -> Inputs:
    """Normal inputs, and parameters uniform in +-H^-1/2 as in a new layer; different for every seed."""
    keys = iter(jax.random.split(jax.random.key(seed), 6))
    gates, bound = GATES[problem.cell] * problem.H, problem.H**-0.5
    shapes = {
        "weight_ih": (gates, problem.I),
        "weight_hh": (gates, problem.H),
        "bias_ih": (gates,),
        "bias_hh": (gates,),
    }
    normal = lambda size: jax.random.normal(next(keys), (problem.B, problem.T, size)).astype(problem.dtype)
    learned = {"x": normal(problem.I)}
    for name, shape in shapes.items():
        drawn = jax.random.uniform(next(keys), shape, minval=-bound, maxval=bound)
        learned[name] = drawn.astype(problem.dtype)
    return Inputs(learned, normal(problem.H), {})


def plain(problem: CellProblem) -> Callable[[Arrays], Array]:
    """A `lax.scan` over time of the cell's formula."""

    def run(learned: Arrays) -> Array:
        project = lambda x, what: x @ learned[f"weight_{what}"].T + learned[f"bias_{what}"][None]

        @jax.checkpoint
        def token(state: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], Array]:
            state = _formula(problem.cell, project(x, "ih"), project(state[0], "hh"), *state)
            return state, state[0]

        x = learned["x"]
        zeros = jnp.zeros((problem.B, problem.H), x.dtype)
        return jnp.moveaxis(lax.scan(token, (zeros, zeros), jnp.moveaxis(x, 1, 0))[1], 0, 1)

    return run


def _formula(kind: str, x: Array, u: Array, h: Array, c: Array) -> tuple[Array, Array]:
    sigmoid = jax.nn.sigmoid
    if kind == "RNN":
        return jnp.tanh(x + u), c
    if kind == "GRU":
        (xr, xz, xn), (ur, uz, un) = jnp.split(x, 3, -1), jnp.split(u, 3, -1)
        z = sigmoid(xz + uz)
        return (1 - z) * jnp.tanh(xn + sigmoid(xr + ur) * un) + z * h, c
    i, f, g, o = jnp.split(x + u, 4, -1)
    c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
    return sigmoid(o) * jnp.tanh(c), c


@prepare.reference
def expected_results(problem: CellProblem, inputs: Inputs) -> Arrays:
    """Output and gradients of the formulas in float32."""
    forward = lambda learned, constants: plain(problem)(learned)
    return prepare.directed(forward, prepare.BOTH, with_out=True)(inputs)


# Peers


def jax_cudnn(problem: CellProblem) -> Callable[[Arrays], Array]:
    """Takes float32 alone, so inputs and parameters are cast; products are in TF32."""
    from jax.experimental import rnn

    def run(learned: Arrays) -> Array:
        wide = {name: a.astype(jnp.float32) for name, a in learned.items()}
        weights = jnp.concatenate([wide[name].reshape(-1) for name in PARAMETERS])
        zeros = jnp.zeros((1, problem.B, problem.H), jnp.float32)
        lengths = jnp.full(problem.B, problem.T, jnp.int32)
        sizes: Any = (problem.I, problem.H, 1, 0.0, False)
        results: Any = rnn.lstm(wide["x"], zeros, zeros, weights, lengths, *sizes)
        return results[0].astype(problem.dtype)

    return run


def torch_layer(problem: CellProblem, sets: Sequence[Inputs], direction: str) -> Prepared:
    """PyTorch's layer on the same data. It has one set of parameters, those of the first inputs, in the layout of cuDNN."""
    import torch

    layer = getattr(torch.nn, problem.cell)(problem.I, problem.H, batch_first=True)
    layer = layer.to(device="cuda", dtype=getattr(torch, problem.dtype))
    parameters = {name: getattr(layer, f"{name}_l0") for name in PARAMETERS}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_dlpack(sets[0].learned[name]))
    layer.flatten_parameters()

    def run(x: Any, cotangent: Any) -> dict[str, Any]:
        if direction == FORWARD:
            with torch.no_grad():
                return {"out": layer(x)[0]}
        learned = {"x": x, **parameters}
        return dict(
            zip(learned, torch.autograd.grad(layer(x)[0], [*learned.values()], cotangent), strict=True)
        )

    def tensors(inputs: Inputs) -> tuple[Any, ...]:
        x = peers.tensor(inputs.learned["x"]).requires_grad_(direction != FORWARD)
        return x, peers.tensor(inputs.cotangent)

    return peers.prepared(run, sets, tensors)


class Cells(runner.Family):
    name, title, description, lists = "cells", "Recurrent cells", __doc__, PROBLEMS
    extremes, platforms = (runner.MEMORY,), "default,xla"
    complete = linear.Linear.complete

    def ours(self, problem: CellProblem, platform: Any) -> Callable[..., Array]:
        """Our operation, with the projection of the inputs."""
        operation = ejx.Recurrent(problem.cell.lower(), platform=platform)  # pyright: ignore[reportArgumentType]

        def run(learned: Arrays, constants: Arrays) -> Array:
            x, weight_ih, weight_hh, bias_ih, bias_hh = (learned[name] for name in ("x", *PARAMETERS))
            return operation(x, weight_hh, bias_hh, weight_ih=weight_ih, bias_ih=bias_ih)[0]

        return run

    def beside(self, problem: CellProblem, options: Namespace, direction: str) -> Others:
        alone = lambda run: lambda learned, constants: run(learned)
        if jax.default_backend() == "cpu":
            yield self.in_jax(problem, "lax.scan", alone(plain(problem)))
            return
        if options.torch:
            make = lambda sets, direction: torch_layer(problem, sets, direction)
            yield Implementation("PyTorch", make, PEER)
        if problem.cell == "LSTM":
            yield self.in_jax(problem, "jax.experimental.rnn, float32", alone(jax_cudnn(problem)))


FAMILY = Cells(make_inputs=make_inputs, expected=expected_results)
