"""The linear-time family in PyTorch: flash-linear-attention and mamba_ssm, if installed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from benchmarks.comparison import Implementation, is_installed
from benchmarks.linear_problems import Inputs, LinearProblem
from benchmarks.measure import torch_work
from benchmarks.prepare import Prepared

Tensors = dict[str, Any]


class Peer(NamedTuple):
    """An implementation of a member: a function of the tensors by name that returns the output."""

    name: str
    package: str
    run: Callable[[Tensors], Any]


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


PEERS: dict[str, tuple[Peer, ...]] = {
    "GLA": (Peer("fla", "fla", _gla),),
    "lightning": (Peer("fla", "fla", _lightning),),
    "scalar decay": (Peer("fla", "fla", _scalar_decay),),
    "KDA": (Peer("fla", "fla", _kda), Peer("fla, g >= -5", "fla", _kda_bounded)),
    "gated delta rule": (Peer("fla", "fla", _gated_delta),),
    "SSD": (
        Peer("mamba_ssm, chunk 256", "mamba_ssm", _ssd(256)),
        Peer("mamba_ssm, chunk 128", "mamba_ssm", _ssd(128)),
    ),
}


PACKAGES = ("torch", "fla", "mamba_ssm")


def missing() -> list[str]:
    """The packages required by peers that are not installed."""
    return [name for name in PACKAGES if not is_installed(name)]


def peers_of(problem: LinearProblem) -> Iterator[Peer]:
    """The installed peers that support many tokens of this member."""
    absent = missing()
    for peer in () if problem.is_step or "torch" in absent else PEERS.get(problem.member, ()):
        if peer.package not in absent:
            yield peer


def prepare(peer: Peer, sets: Sequence[Inputs], backward: bool) -> Prepared:
    """Computes once, on the same data."""
    import torch

    jax.block_until_ready(sets)

    def tensors(inputs: Inputs) -> tuple[Any, ...]:
        *learned, cotangent = (
            torch.from_dlpack(x).clone() for x in (*inputs.learned.values(), inputs.cotangent)
        )
        return (*(x.requires_grad_(backward) for x in learned), cotangent)

    names = tuple(sets[0].learned)

    def run(*given: Any) -> tuple[Any, ...]:
        *learned, cotangent = given
        out = peer.run(dict(zip(names, learned)))
        return torch.autograd.grad(out, learned, cotangent) if backward else (out,)

    torch_sets = [tensors(inputs) for inputs in sets]
    run(*torch_sets[0])  # it tunes itself, which may need more memory
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = run(*torch_sets[0])
    torch.cuda.synchronize()
    outputs = sum(x.numel() * x.element_size() for x in found)
    temporary = torch.cuda.max_memory_allocated() - before - outputs
    results = [jax.numpy.from_dlpack(x.detach().contiguous()) for x in found]
    return Prepared(
        dict(zip(names if backward else ("out",), results)),
        lambda runs: torch_work(run, torch_sets, runs),
        temporary_bytes=temporary,
    )


def implementations(peers: Iterable[Peer]) -> Iterator[Implementation]:
    """What is compared with ours."""
    for peer in peers:
        make = lambda sets, direction, peer=peer: prepare(peer, sets, direction != "forward")
        yield Implementation(peer.name, True, make)
