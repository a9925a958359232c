"""Peers in PyTorch, as data: what they are called, which package they need, and how they compute a result."""

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import processes, report
from benchmarks.measure import torch_work
from benchmarks.prepare import FORWARD, Implementation, Inputs, PEER, Prepared

Tensors = dict[str, Any]
SCAN = "selective_scan_cuda"
"""The part of mamba_ssm in CUDA, which a build for Triton alone lacks."""
PACKAGES = ("torch", "fla", "mamba_ssm", SCAN)
_MODULES = {
    "fla": "fla.ops",
    "mamba_ssm": "mamba_ssm.ops.triton.ssd_combined",
    SCAN: "mamba_ssm.ops.selective_scan_interface",
}


class TorchPeer(NamedTuple):
    """An implementation in PyTorch.

    - `run(tensors)`: the output, from tensors by the names of what is learned and of constants.
    - `swapped`: what it takes with tokens last, as in the layers that it is for; if any is, the output too.
    - `gradients(tensors, cotangent, direction)`: the measured results, where they are not those of autograd.
    - `constants(tensors)`: the constants as it takes them, made outside the measured time.
    - `is_checked`: whether it computes the results of the problem.
    """

    name: str
    package: str
    run: Callable[[Tensors], Any]
    swapped: tuple[str, ...] = ()
    gradients: Callable[[Tensors, Any, str], Tensors] | None = None
    constants: Callable[[Tensors], Tensors] = lambda tensors: tensors
    is_checked: bool = True

    @property
    def is_triton(self) -> bool:
        return self.package in ("fla", "mamba_ssm")

    def load(self) -> None:
        """Imports its package, which takes seconds."""
        importlib.import_module(_MODULES.get(self.package, self.package))

    def results(self, learned: Tensors, constants: Tensors, cotangent: Any, direction: str) -> Tensors:
        import torch

        if direction != FORWARD and self.gradients is not None:
            with torch.no_grad():
                return self.gradients(learned | constants, cotangent, direction)
        out = self.run(learned | constants)
        if direction == FORWARD:
            return {"out": out}
        return dict(zip(learned, torch.autograd.grad(out, [*learned.values()], cotangent), strict=True))

    def call_empty(self, inputs: Any, direction: str) -> None:
        """Computes on memory without contents."""
        import torch

        def empty(x: Any) -> Any:
            return torch.empty(x.shape, dtype=getattr(torch, str(x.dtype)), device="cuda")

        learned = {name: empty(x).requires_grad_(direction != FORWARD) for name, x in inputs.learned.items()}
        self.results(learned, {}, empty(inputs.cotangent), direction)


def listed(family: str) -> dict[str, list[TorchPeer]]:
    """The peers of each member of a family, of `peers.toml`."""
    results: dict[str, list[TorchPeer]] = {}
    for entry in report.data("peers")[family]:
        run = functools.partial(_call, entry["function"], entry.get("names", {}), entry.get("options", {}))
        peer = TorchPeer(entry["name"], entry["package"], run, tuple(entry.get("swapped", ())))
        results.setdefault(entry["member"], []).append(peer)
    return results


def _call(function: str, names: Mapping[str, str], options: Mapping[str, Any], tensors: Tensors) -> Any:
    """The first result of a package's function."""
    module, name = function.rsplit(".", 1)
    named = {names.get(key, key): tensor for key, tensor in tensors.items()}
    result = getattr(importlib.import_module(module), name)(**named, **options)
    return result[0] if isinstance(result, tuple) else result


@functools.cache
def is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def installed(*peers: TorchPeer) -> Iterator[TorchPeer]:
    """The peers whose packages are installed."""
    yield from (peer for peer in peers if not is_missing("torch") and not is_missing(peer.package))


def implementation(peer: TorchPeer) -> Implementation:
    return Implementation(peer.name, functools.partial(_ready, peer), PEER, peer.is_checked)


def tensor(x: Any) -> Any:
    """A copy of a JAX array on the same device."""
    import torch

    return torch.from_dlpack(x).clone()


def _ready(peer: TorchPeer, sets: Sequence[Inputs], direction: str) -> Prepared:
    """Computes once, on the same data."""
    swapped = {*peer.swapped, "out"} if peer.swapped else set()
    swap = lambda name, x: x.transpose(1, 2) if name in swapped else x

    def tensors(inputs: Inputs) -> tuple[Any, ...]:
        learned = {name: swap(name, tensor(x)).contiguous() for name, x in inputs.learned.items()}
        learned = {name: x.requires_grad_(direction != FORWARD) for name, x in learned.items()}
        constants = peer.constants({name: tensor(x) for name, x in inputs.constants.items()})
        return learned, constants, swap("out", tensor(inputs.cotangent)).contiguous()

    return prepared(lambda *given: peer.results(*given, direction), sets, tensors, swap)


def prepared(
    run: Callable[..., Tensors],
    sets: Sequence[Any],
    tensors: Callable[[Any], tuple[Any, ...]],
    swap: Callable[[str, Any], Any] = lambda name, x: x,
) -> Prepared:
    """Prepares a function of tensors: the results by name of the first of the sets, and the most memory besides them."""
    import torch

    jax.block_until_ready(sets)
    torch_sets = [tensors(inputs) for inputs in sets]
    if processes.are_shared():
        processes.tune_briefly()
    run(*torch_sets[0])  # it tunes itself, which may need more memory
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run(*torch_sets[0])
    torch.cuda.synchronize()
    outputs = sum(x.numel() * x.element_size() for x in results.values())
    temporary = torch.cuda.max_memory_allocated() - before - outputs
    arrays = {name: jnp.from_dlpack(swap(name, x).detach().contiguous()) for name, x in results.items()}
    make = lambda runs: torch_work(run, torch_sets, runs)
    return Prepared(arrays, make, temporary_bytes=temporary)


@contextlib.contextmanager
def attention_backend(name: str) -> Iterator[None]:
    """One backend of PyTorch's attention alone."""
    from torch.nn.attention import sdpa_kernel, SDPBackend

    with sdpa_kernel(getattr(SDPBackend, name)):
        yield
