"""The linear-time family compared with flash-linear-attention and mamba_ssm, if installed, and its decoding steps.

    python -m benchmarks linear --json linear.json --plot linear.png
    python -m benchmarks linear --problems 'KDA|gated' --time-limit 300
    python -m benchmarks linear --apart --problems 'B4 T4096|T65536' --json linear.json   # a process for each member
    python -m benchmarks linear --render linear.json --plot linear.png --markdown linear.md

The reference is the recurrence, token by token. Peers are timed as CUDA graphs, without Python's launch overhead. Steps update their state in
place and are compared with an XLA pass that reads and writes a state of that size in place; without a GPU, the peer is a `lax.scan` over time.
With `--apart` peers tune themselves briefly; with `--compile-peers` several processes compile what they tune before.
"""

import importlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from benchmarks import linear_problems as problems
from benchmarks import peers, prepare, runner
from benchmarks.linear_problems import Arrays, LinearProblem, PROBLEMS, STEP
from benchmarks.peers import SCAN, Tensors, TorchPeer
from benchmarks.prepare import BOTH, DIRECTIONS, Implementation, Inputs, nbytes, Others, PEER, Prepared, Row
from benchmarks.runner import Errors

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


TABLES = runner.Tables(
    (*runner.NAMES, "TB/s", "temporary", "ratio", "error"),
    "temporary: memory over inputs and results; ratio: speed over the fastest peer's",
    "Speed of the linear-time family over its peers",
    (*DIRECTIONS, STEP),
)


def in_place(sets: Sequence[Inputs], direction: str) -> Prepared:
    """Only reads and writes the state."""
    step = lambda learned, state: (0.999 * state, {})
    return prepare.ready_in_place(step, [inputs.learned for inputs in sets], sets[0].state)


class Linear(runner.Family):
    name, title, description, lists = "linear", "The linear-time family", __doc__, PROBLEMS
    groups = ("anchors", "long", "steps")
    tables, extremes, packages = TABLES, (runner.MEMORY,), peers.PACKAGES
    make_inputs = staticmethod(problems.make_inputs)
    expected = staticmethod(problems.expected_results)

    def ours(self, problem: LinearProblem, platform: Any) -> Callable[..., Any]:
        return problems.ours(problem, platform)

    def directed(
        self, problem: LinearProblem, forward: Callable[..., Any], direction: str
    ) -> Callable[[Inputs], Arrays]:
        return problems.directed(forward, direction)

    def ready(self, problem: LinearProblem, platform: Any, sets: Sequence[Any], direction: str) -> Prepared:
        if not problem.is_step:
            return super().ready(problem, platform, sets, direction)
        function = self.ours(problem, platform)

        def step(learned: Arrays, state: Any) -> tuple[Any, Arrays]:
            out, state = function(learned, state)
            return state, {"out": out}

        return prepare.ready_in_place(step, [inputs.learned for inputs in sets], sets[0].state)

    def beside(self, problem: LinearProblem, options: Namespace, direction: str) -> Others:
        if problem.is_step:
            yield Implementation("in place", in_place, PEER, is_checked=False)
        elif jax.default_backend() == "cpu":
            yield self.in_jax(problem, "lax.scan", problems.plain(problem))

    def peers(self, problem: LinearProblem) -> Iterator[TorchPeer]:
        """The installed peers that support many tokens of this member; of longer rows than the anchors', one of each package, the first."""
        packages: set[str] = set()
        for peer in peers.installed(*(() if problem.is_step else PEERS[problem.member])):
            if not (problem.T > _USUAL and peer.package in packages):
                packages.add(peer.package)
                yield peer

    def errors(
        self, problem: LinearProblem, inputs: Any, row: Row, results: Arrays, expected: Arrays
    ) -> Errors:
        return runner.errors_of(problem.dtype, problems.of_part(problem, results, expected), expected)

    def complete(self, problem: Any, inputs: Inputs, direction: str, rows: list[Row]) -> None:
        """Bytes are those of reading every input once and writing every result once."""
        learned, out = nbytes(inputs.learned), nbytes(inputs.cotangent)
        more = learned if direction == BOTH else 2 * nbytes(inputs.state)
        runner.rate(rows, bytes=learned + out + more)

    def apart(self, problem: LinearProblem) -> str:
        return problem.member


FAMILY = Linear()
