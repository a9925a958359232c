"""Common parts of the families' platforms: plain XLA, interpreted Triton and Pallas."""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from ..dispatch import DeviceFacts, hooks_of, PlatformHooks, Problem
from ..launch import executing, expect_launches, interpreter_unavailable, run, triton_unavailable

Named = dict[str, Array]


def kernels_unavailable(device: DeviceFacts) -> str | None:
    """The reason why Triton kernels cannot run on the device."""
    if device.vendor == "nvidia" and device.capability < (8, 0):
        return f"needs compute capability 8.0 or newer, the device has {device.compute_capability or 'none'}"
    reason = triton_unavailable()
    if reason is None and device.vendor == "nvidia":
        expect_launches()
    return reason


@dataclasses.dataclass(frozen=True)
class NoConfig:
    """The configuration of a platform without options."""


def supports_all(problem: Problem, device: DeviceFacts) -> str | None:
    """The reason why a platform cannot serve a problem, of one that serves all: none."""
    return None


class Plain(PlatformHooks):
    """Platform `xla` of a family: a function `(arrays, spec) -> results` that XLA fuses. Only the arrays are kept for its gradient."""

    config_type = NoConfig

    def __init__(self, function: Callable[[Any, Any], Named]):
        self._function = jax.checkpoint(function, static_argnums=1)

    def unsupported(self, problem: Problem, device: DeviceFacts) -> str | None:
        return None

    def default_config(self, problem: Problem, device: DeviceFacts) -> NoConfig:
        return NoConfig()

    def candidates(self, problem: Problem, device: DeviceFacts) -> list[NoConfig]:
        return [NoConfig()]

    def apply(self, arrays: Any, spec: Any, config: NoConfig) -> Named:
        return self._function(arrays, spec)


def _interpreted_pallas(*given: Any) -> Any:
    from ..launch import pallas  # imports all of Pallas

    return pallas.run(*given, interpret=True)


class Interpreted(PlatformHooks):
    """Platform `triton-interpret` of a family: `forward`, `backward` and `step` of its Triton platform, interpreted on the host. Slow; for
    testing. Limits, residuals and tuning are those of the Triton platform."""

    OPAQUE = True
    NOTE = "interpreted on the host: for testing, not for speed"
    execute = staticmethod(functools.partial(run, interpret=True))
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    step: Callable[..., Any]

    def __init__(self, compiled: Any, config: Any, **portable: Any):
        """`compiled` is the compiled platform, or the name of its module; `config` is one of its configurations with small tiles. In any
        configuration, fields that a host cannot support are replaced by the `portable` ones."""
        compiled = sys.modules[compiled] if isinstance(compiled, str) else compiled
        self.config, self._portable = dataclasses.replace(config, **portable), portable
        hooks = hooks_of(compiled)
        self.PARTS, self.config_type, self.unsupported = hooks.PARTS, hooks.config_type, hooks.unsupported
        if hasattr(compiled, "saved_axes"):
            self.saved_axes = compiled.saved_axes
        for name in ("forward", "backward", "step"):
            if hasattr(compiled, name):
                setattr(self, name, self._interpreted(getattr(compiled, name)))
        if hasattr(compiled, "write"):  # of pages, which no configuration concerns
            self.write = self._executed(compiled.write)

    def _executed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with its launches interpreted."""

        @functools.wraps(function)
        def call(*inputs: Any, **how: Any) -> Any:
            with executing(self.execute):
                return function(*inputs, **how)

        return call

    def _interpreted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with its launches interpreted, and `portable` fields in its configuration."""
        executed = self._executed(function)

        @functools.wraps(function)
        def call(arrays: Any, spec: Any, config: Any, *rest: Any, **how: Any) -> Any:
            changes = {name: x for name, x in self._portable.items() if getattr(config, name) != x}
            config = dataclasses.replace(config, **changes) if changes else config
            return executed(arrays, spec, config, *rest, **how)

        return call

    def unavailable(self, device: DeviceFacts) -> str | None:
        return interpreter_unavailable()

    def default_config(self, problem: Problem, device: DeviceFacts) -> Any:
        return self.config

    def candidates(self, problem: Problem, device: DeviceFacts) -> list[Any]:
        return [self.config]


class InterpretedPallas(Interpreted):
    """Platform `pallas-interpret` of a family: the same of its Pallas platform for TPU, by JAX's simulation of a TPU's memories, with races
    detected and memory poisoned. It needs nothing but JAX."""

    execute = staticmethod(_interpreted_pallas)

    def unavailable(self, device: DeviceFacts) -> str | None:
        return None
