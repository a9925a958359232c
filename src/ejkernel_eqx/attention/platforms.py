"""The implementations of the online-softmax core: names only, each imported when it is first looked up."""

from ..dispatch import Backend, Implementation, kernel_registry, Platform

CORE = "attention"
_HERE = __package__

_WORKLOAD = f"{_HERE}.workload:workload"

# Highest priority first where it supports the request; below zero: only when asked for by name.
_PLATFORMS = (
    (Platform.CUDA, Backend.GPU, 40, f"{_HERE}.cudnn"),
    (Platform.TRITON, Backend.GPU, 30, f"{_HERE}.triton"),
    (Platform.XLA, Backend.ANY, 10, f"{_HERE}.xla"),
    (Platform.TRITON_INTERPRET, Backend.ANY, -10, f"{_HERE}.triton_interpret"),
)


def register(operation: str, *platforms: Platform, tunable: bool = True) -> None:
    """Registers an operation of this core on `platforms`, by default on all of them."""
    for platform, backend, priority, target in _PLATFORMS:
        if not platforms or platform in platforms:
            # cuDNN tunes itself.
            workload = _WORKLOAD if tunable and platform is not Platform.CUDA else None
            kernel_registry.add(
                Implementation(operation, platform, backend, priority, CORE, target, workload)
            )
