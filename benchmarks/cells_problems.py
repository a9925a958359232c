"""The problems of recurrent cells that are measured: sizes, inputs, our operation and float32 results."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

import ejkernel_eqx as ejx
from benchmarks.prepare import UNTUNED
from ejkernel_eqx._tolerances import TOLERANCES
from ejkernel_eqx.tuning.check import all_errors

Arrays = dict[str, Array]
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclasses.dataclass(frozen=True)
class CellProblem:
    """`B` rows of `T` tokens with `I` inputs, and `H` hidden features, for one kind of cell."""

    cell: str
    B: int
    T: int
    H: int
    I: int
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        words = [self.cell, f"B{self.B}", f"T{self.T}", f"H{self.H}"]
        words += [] if self.I == self.H else [f"I{self.I}"]
        return " ".join(words if self.dtype == "bfloat16" else [*words, self.dtype])


class Inputs(NamedTuple):
    """`learned` (the inputs and the parameters, by PyTorch's names without the layer) and the cotangent of the output."""

    learned: Arrays
    cotangent: Array


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
    return Inputs(learned, normal(problem.H))


Forward = Callable[[Arrays], Array]


def direction_of(forward: Forward, backward: bool) -> Callable[[Inputs], Arrays]:
    """The measured function, from `forward(learned) -> out`: the output, or the gradients of everything learned."""
    if not backward:
        return lambda inputs: {"out": forward(inputs.learned)}
    return lambda inputs: jax.vjp(forward, inputs.learned)[1](inputs.cotangent)[0]


def ours(problem: CellProblem, platform: str | None) -> Forward:
    """Our operation, with the projection of the inputs."""
    operation = ejx.Recurrent(problem.cell.lower(), platform=platform)  # pyright: ignore[reportArgumentType]
    return lambda learned: operation(
        learned["x"],
        learned["weight_hh"],
        learned["bias_hh"],
        weight_ih=learned["weight_ih"],
        bias_ih=learned["bias_ih"],
    )[0]


def plain(problem: CellProblem) -> Forward:
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


def expected_results(problem: CellProblem, inputs: Inputs) -> dict[str, Arrays]:
    """The results of the reference in float32, by direction."""
    with jax.default_matmul_precision("highest"):
        return _expected_results(problem, inputs)


@functools.partial(jax.jit, static_argnums=0, compiler_options=UNTUNED)
def _expected_results(problem: CellProblem, inputs: Inputs) -> dict[str, Arrays]:
    learned, cotangent = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    out, pull = jax.vjp(plain(problem), learned)
    return {"forward": {"out": out}, "forward+backward": pull(cotangent)[0]}


def errors_of(
    problem: CellProblem, direction: str, results: Mapping[str, Any], expected: Mapping[str, Arrays]
) -> tuple[dict[str, float], str | None]:
    """The relative RMS error of each result, measured as in the tuner, and the reason if one is wrong (otherwise `None`)."""
    kind = "gradient" if direction == "forward+backward" else "forward"
    return all_errors(results, expected[direction], dict.fromkeys(results, TOLERANCES[problem.dtype][kind]))


P = CellProblem
ANCHORS = (
    P("LSTM", 64, 512, 1024, 1024),
    P("GRU", 64, 512, 1024, 1024),
    P("LSTM", 256, 512, 256, 256),
    P("GRU", 256, 512, 256, 256),
    P("RNN", 64, 512, 1024, 1024),
    P("LSTM", 1024, 128, 128, 128),
    P("LSTM", 64, 512, 512, 512),
    P("LSTM", 1, 512, 512, 512),
    P("LSTM", 64, 512, 1024, 1024, "float32"),
)
CPU = (P("LSTM", 8, 256, 128, 128, "float32"), P("GRU", 8, 256, 128, 128, "float32"))
TINY = tuple(P(cell, 2, 6, 8, 5, "float32") for cell in GATES)
