"""The linear-time family compared with flash-linear-attention and mamba_ssm, if installed, and its decoding steps.

    python -m benchmarks linear --json linear.json --plot linear.png
    python -m benchmarks linear --problems 'KDA|gated' --time-limit 300
    python -m benchmarks linear --apart --problems 'B4 T4096|T65536' --json linear.json   # a process for each member
    python -m benchmarks linear --render linear.json --plot linear.png --markdown linear.md

The reference is the recurrence, token by token. Peers are timed as CUDA graphs, without Python's launch overhead. Steps update their state in
place and are compared with an XLA pass that reads and writes a state of that size in place; without a GPU, the peer is a `lax.scan` over time.
With `--apart` peers tune themselves briefly; with `--compile-peers` several processes compile what they tune before.
"""

import argparse
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import Array

from benchmarks import linear_problems as problems
from benchmarks import peers, runner
from benchmarks.linear_problems import Arrays, LinearProblem, STEP
from benchmarks.peers import SCAN, Tensors, TorchPeer
from benchmarks.prepare import (
    BOTH,
    DIRECTIONS,
    Implementation,
    Inputs,
    nbytes,
    PEER,
    prepare,
    prepare_in_place,
    Prepared,
    Row,
)

_USUAL = 4096


# Peers


def _first(name: str, **options: Any) -> Callable[[Tensors], Any]:
    """The first result of a package's function of tensors by name."""
    module, function = name.rsplit(".", 1)
    return lambda x: getattr(importlib.import_module(module), function)(**x, **options)[0]


def _ssd(chunk_size: int) -> Callable[[Tensors], Any]:
    def run(x: Tensors) -> Any:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        return mamba_chunk_scan_combined(**x, chunk_size=chunk_size, dt_softplus=True)

    return run


def _scan(x: Tensors) -> Any:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    named = {"u": x["x"], "delta": x["dt"], "delta_bias": x["dt_bias"]}
    return selective_scan_fn(**named, **{name: x[name] for name in "ABCDz"}, delta_softplus=True)


# Of several, the first is the fastest forward at the anchors.
PEERS: Mapping[str, tuple[TorchPeer, ...]] = {
    "GLA": (TorchPeer("fla", "fla", _first("fla.ops.gla.chunk_gla")),),
    "lightning": (
        TorchPeer(
            "fla", "fla", _first("fla.ops.lightning_attn.chunk_lightning_attn", layer_idx=0, num_layers=24)
        ),
    ),
    "scalar decay": (TorchPeer("fla", "fla", _first("fla.ops.simple_gla.chunk_simple_gla")),),
    "KDA": (
        TorchPeer("fla, g >= -5", "fla", _first("fla.ops.kda.chunk_kda", safe_gate=True)),
        TorchPeer("fla", "fla", _first("fla.ops.kda.chunk_kda")),
    ),
    "gated delta rule": (TorchPeer("fla", "fla", _first("fla.ops.gated_delta_rule.chunk_gated_delta_rule")),),
    "SSD": (
        TorchPeer("mamba_ssm, chunk 256", "mamba_ssm", _ssd(256)),
        TorchPeer("mamba_ssm, chunk 128", "mamba_ssm", _ssd(128)),
    ),
    "selective scan": (TorchPeer("mamba_ssm", SCAN, _scan, ("x", "dt", "B", "C", "z")),),
}


def torch_peers(problem: LinearProblem) -> Iterator[TorchPeer]:
    """The installed peers that support many tokens of this member; of longer rows than the anchors', one of each package, the first."""
    packages: set[str] = set()
    for peer in peers.installed(*(() if problem.is_step else PEERS[problem.member])):
        if not (problem.T > _USUAL and peer.package in packages):
            packages.add(peer.package)
            yield peer


# Ours


def ours(problem: LinearProblem, platform: str | None, sets: Sequence[Inputs], direction: str) -> Prepared:
    function = problems.ours(problem, platform)
    if not problem.is_step:
        return prepare(problems.directed(function, direction), sets)

    def step(learned: Arrays, state: Array) -> tuple[Array, Arrays]:
        out, state = function(learned, state)
        return state, {"out": out}

    return prepare_in_place(step, [inputs.learned for inputs in sets], sets[0].state)


def in_place(sets: Sequence[Inputs], direction: str) -> Prepared:
    """Only reads and writes the state."""
    step = lambda learned, state: (0.999 * state, {})
    return prepare_in_place(step, [inputs.learned for inputs in sets], sets[0].state)


def implementations(
    problem: LinearProblem, options: argparse.Namespace, direction: str
) -> Iterator[Implementation]:
    yield from runner.ours(options, functools.partial(ours, problem))
    if problem.is_step:
        yield Implementation("in place", in_place, PEER, is_checked=False)
    elif jax.default_backend() == "cpu":
        plain = problems.plain(problem)
        over_time = lambda sets, direction: prepare(problems.directed(plain, direction), sets)
        yield Implementation("lax.scan", over_time, PEER)


# Measuring


def least_bytes(inputs: Inputs, direction: str) -> int:
    """The bytes of reading every input once and writing every result once."""
    learned, out = nbytes(inputs.learned), nbytes(inputs.cotangent)
    return 2 * learned + out if direction == BOTH else learned + out + 2 * nbytes(inputs.state)


def complete(problem: Any, inputs: Inputs, direction: str, rows: list[Row]) -> None:
    runner.rate(rows, bytes=least_bytes(inputs, direction))


def errors(
    problem: LinearProblem, inputs: Inputs, row: Row, results: Arrays, expected: Mapping[str, Array]
) -> runner.Errors:
    return runner.errors_of(problem.dtype, problems.of_part(problem, results, expected), expected)


TABLES = runner.Tables(
    ("problem", "implementation", "platform", "ms", "spread", "TB/s", "temporary", "ratio", "error"),
    "temporary: memory over inputs and results; ratio: speed over the fastest peer's",
    "Speed of the linear-time family over its peers",
    (*DIRECTIONS, STEP),
)
FAMILY = runner.Family(
    "linear",
    __doc__,
    problems.TINY,
    problems.CPU,
    problems.ANCHORS + problems.LONG + problems.STEPS,
    problems.make_inputs,
    implementations,
    problems.expected_results,
    TABLES,
    "The linear-time family",
    peers=torch_peers,
    errors=errors,
    complete=complete,
    extremes=(runner.MEMORY,),
    packages=peers.PACKAGES,
    apart=lambda problem: problem.member,
)
