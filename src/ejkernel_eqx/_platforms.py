"""What the platforms of a `Family` have in common: plain XLA, interpreted Triton, and their registration."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from .dispatch import Backend, DeviceFacts, Implementation, kernel_registry, Platform, Problem
from .launch import interpreter_unavailable, run, triton_unavailable

Named = dict[str, Array]

# Highest priority first where it supports the request; below zero: only when asked for by name.
_PLATFORMS = (
    (Platform.TRITON, Backend.GPU, 30, "triton"),
    (Platform.XLA, Backend.ANY, 10, "xla:platform"),
    (Platform.TRITON_INTERPRET, Backend.ANY, -10, "triton_interpret:platform"),
)


def register(operation: str, core: str, package: str) -> None:
    """Registers an operation whose platforms are modules of `package`, each imported when it is first looked up."""
    for platform, backend, priority, target in _PLATFORMS:
        kernel_registry.add(
            Implementation(
                operation,
                platform,
                backend,
                priority,
                core,
                f"{package}.{target}",
                f"{package}.workload:workload",
            )
        )


def kernels_unavailable(device: DeviceFacts) -> str | None:
    """Why Triton kernels cannot run on the device."""
    if device.vendor == "nvidia" and device.capability < (8, 0):
        return f"needs compute capability 8.0 or newer, the device has {device.compute_capability or 'none'}"
    return triton_unavailable()


@dataclasses.dataclass(frozen=True)
class NoChoice:
    """The configuration of a platform that has nothing to choose."""


class Plain:
    """Platform `xla` of a family: a function `(arrays, spec) -> results` that XLA fuses. Nothing but the arrays is kept for its gradient."""

    VERSION = 1
    config_type = NoChoice

    def __init__(self, function: Callable[[Any, Any], Named]):
        self._function = jax.checkpoint(function, static_argnums=1)

    def unsupported(self, problem: Problem, device: DeviceFacts) -> str | None:
        """Why this platform cannot serve the problem: it serves all."""
        return None

    def default_config(self, problem: Problem, device: DeviceFacts) -> NoChoice:
        return NoChoice()

    def candidates(self, problem: Problem, device: DeviceFacts) -> list[NoChoice]:
        return [NoChoice()]

    def apply(self, arrays: Any, spec: Any, config: NoChoice) -> Named:
        return self._function(arrays, spec)


class Interpreted:
    """Platform `triton-interpret` of a family: the kernels of its Triton platform, interpreted on the host. Slow; for checking."""

    OPAQUE = True
    VERSION = 1
    NOTE = "interpreted on the host, program by program: for checking, not for speed"

    def __init__(self, triton: Any, config: Any):
        """`triton` is the module of the Triton platform, `config` one of its configurations, with small tiles."""
        self._triton, self._config = triton, config
        self.config_type = triton.config_type
        self.unsupported = triton.unsupported

    def unavailable(self, device: DeviceFacts) -> str | None:
        return interpreter_unavailable()

    def default_config(self, problem: Problem, device: DeviceFacts) -> Any:
        return self._config

    def candidates(self, problem: Problem, device: DeviceFacts) -> list[Any]:
        return [self._config]

    def forward(self, arrays: Any, spec: Any, config: Any) -> Named:
        return self._triton.forward(arrays, spec, config, execute=_interpret)

    def backward(self, arrays: Any, spec: Any, config: Any, cotangents: Named) -> Named:
        return self._triton.backward(arrays, spec, config, cotangents, execute=_interpret)


_interpret = functools.partial(run, interpret=True)
