"""The linear-time family in PyTorch: flash-linear-attention and mamba_ssm, if installed."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from benchmarks import peers_tuning, turns
from benchmarks.comparison import Implementation, is_installed
from benchmarks.linear_problems import Inputs, LinearProblem
from benchmarks.measure import torch_work
from benchmarks.prepare import Prepared

Tensors = dict[str, Any]

_SCAN = "selective_scan_cuda"
"""The part of mamba_ssm in CUDA, which a build for Triton alone lacks."""


class Peer(NamedTuple):
    """An implementation of a member: a function of the tensors by name that returns the output. It takes the `swapped` ones, and gives the output
    if any is, with tokens last, as in the layers that it is for."""

    name: str
    package: str
    run: Callable[[Tensors], Any]
    swapped: tuple[str, ...] = ()

    @property
    def is_triton(self) -> bool:
        return self.package != _SCAN


def _gla(x: Tensors) -> Any:
    from fla.ops.gla import chunk_gla

    return chunk_gla(**x)[0]


def _lightning(x: Tensors) -> Any:
    from fla.ops.lightning_attn import chunk_lightning_attn

    return chunk_lightning_attn(**x, layer_idx=0, num_layers=24)[0]


def _scalar_decay(x: Tensors) -> Any:
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(**x)[0]


def _kda(x: Tensors) -> Any:
    from fla.ops.kda import chunk_kda

    return chunk_kda(**x)[0]


def _kda_bounded(x: Tensors) -> Any:
    from fla.ops.kda import chunk_kda

    return chunk_kda(**x, safe_gate=True)[0]


def _gated_delta(x: Tensors) -> Any:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(**x)[0]


def _ssd(chunk_size: int) -> Callable[[Tensors], Any]:
    def run(x: Tensors) -> Any:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        return mamba_chunk_scan_combined(**x, chunk_size=chunk_size, dt_softplus=True)

    return run


def _scan(x: Tensors) -> Any:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    named = {"u": x["x"], "delta": x["dt"], "delta_bias": x["dt_bias"], "D": x["D"]}
    return selective_scan_fn(**named, A=x["A"], B=x["B"], C=x["C"], z=x["z"], delta_softplus=True)


# Of several, the first is the fastest forward at the anchors.
PEERS: dict[str, tuple[Peer, ...]] = {
    "GLA": (Peer("fla", "fla", _gla),),
    "lightning": (Peer("fla", "fla", _lightning),),
    "scalar decay": (Peer("fla", "fla", _scalar_decay),),
    "KDA": (Peer("fla, g >= -5", "fla", _kda_bounded), Peer("fla", "fla", _kda)),
    "gated delta rule": (Peer("fla", "fla", _gated_delta),),
    "SSD": (
        Peer("mamba_ssm, chunk 256", "mamba_ssm", _ssd(256)),
        Peer("mamba_ssm, chunk 128", "mamba_ssm", _ssd(128)),
    ),
    "selective scan": (Peer("mamba_ssm", _SCAN, _scan, ("x", "dt", "B", "C", "z")),),
}


_MODULES = {
    "fla": "fla.ops",
    "mamba_ssm": "mamba_ssm.ops.triton.ssd_combined",
    _SCAN: "mamba_ssm.ops.selective_scan_interface",
}
_USUAL = 4096


PACKAGES = ("torch", "fla", "mamba_ssm", _SCAN)


def missing() -> list[str]:
    """The packages required by peers that are not installed."""
    return [name for name in PACKAGES if not is_installed(name)]


def peers_of(problem: LinearProblem) -> Iterator[Peer]:
    """The installed peers that support many tokens of this member; of longer rows than the anchors', one of each package, the first."""
    absent = missing()
    found: set[str] = set()
    for peer in () if problem.is_step or "torch" in absent else PEERS.get(problem.member, ()):
        if peer.package not in absent and not (problem.T > _USUAL and peer.package in found):
            found.add(peer.package)
            yield peer


def load(peers: Iterable[Peer]) -> None:
    """Imports their packages, which takes seconds."""
    for peer in peers:
        importlib.import_module(_MODULES[peer.package])


def prepare(peer: Peer, sets: Sequence[Inputs], backward: bool) -> Prepared:
    """Computes once, on the same data."""
    import torch

    jax.block_until_ready(sets)

    names = tuple(sets[0].learned)
    swapped = {*peer.swapped, "out"} if peer.swapped else set()

    def tensors(inputs: Inputs) -> tuple[Any, ...]:
        named = {**inputs.learned, "out": inputs.cotangent}
        given = {name: torch.from_dlpack(x) for name, x in named.items()}
        *learned, cotangent = (
            x.transpose(1, 2).contiguous() if name in swapped else x.clone() for name, x in given.items()
        )
        return (*(x.requires_grad_(backward) for x in learned), cotangent)

    def run(*given: Any) -> tuple[Any, ...]:
        *learned, cotangent = given
        out = peer.run(dict(zip(names, learned)))
        return torch.autograd.grad(out, learned, cotangent) if backward else (out,)

    torch_sets = [tensors(inputs) for inputs in sets]
    if turns.are_shared():
        peers_tuning.tune_briefly()
    run(*torch_sets[0])  # it tunes itself, which may need more memory
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = run(*torch_sets[0])
    torch.cuda.synchronize()
    outputs = sum(x.numel() * x.element_size() for x in found)
    temporary = torch.cuda.max_memory_allocated() - before - outputs
    results = {
        name: jax.numpy.from_dlpack((x.transpose(1, 2) if name in swapped else x).detach().contiguous())
        for name, x in zip(names if backward else ("out",), found)
    }
    return Prepared(
        results,
        lambda runs: torch_work(run, torch_sets, runs),
        temporary_bytes=temporary,
    )


def implementations(peers: Iterable[Peer]) -> Iterator[Implementation]:
    """What is compared with ours."""
    for peer in peers:
        make = lambda sets, direction, peer=peer: prepare(peer, sets, direction != "forward")
        yield Implementation(peer.name, True, make)
