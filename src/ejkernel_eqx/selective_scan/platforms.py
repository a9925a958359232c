"""The implementations of the selective scan: names only, each imported when it is first looked up."""

from ..dispatch import Backend, Implementation, kernel_registry, Platform

CORE = "selective_scan"
_HERE = __package__

# Highest priority first where it supports the request; below zero: only when asked for by name.
_PLATFORMS = (
    (Platform.TRITON, Backend.GPU, 30, f"{_HERE}.triton"),
    (Platform.XLA, Backend.ANY, 10, f"{_HERE}.xla"),
    (Platform.TRITON_INTERPRET, Backend.ANY, -10, f"{_HERE}.triton_interpret"),
)


def register(operation: str) -> None:
    """Registers an operation of this core on all its platforms."""
    for platform, backend, priority, target in _PLATFORMS:
        kernel_registry.add(
            Implementation(operation, platform, backend, priority, CORE, target, f"{_HERE}.workload:workload")
        )
