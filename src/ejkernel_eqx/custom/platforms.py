"""Registry entries of a user's kernel: for every platform it implements, the hooks answered by its class."""

import dataclasses
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import Array

from ..core.platforms import Interpreted, kernels_unavailable, NoConfig
from ..dispatch import Backend, DeviceFacts, Platform, Problem
from ..launch import interpreter_unavailable, Launch, run

Execute = Callable[[Launch, dict[str, Array]], dict[str, Array]]

# Backend and priority of each platform: the highest that supports the request comes first; below zero only if requested by name.
PLATFORMS = {
    Platform.CUDA: (Backend.GPU, 40),
    Platform.TRITON: (Backend.GPU, 30),
    Platform.PALLAS: (Backend.TPU, 20),
    Platform.XLA: (Backend.ANY, 10),
    Platform.TRITON_INTERPRET: (Backend.ANY, -10),
}


@dataclasses.dataclass(frozen=True)
class TritonLauncher:
    """Launches the Triton kernels of one call: on the device, interpreted, or only recorded for a compiler.

    `run_triton` and `grad_triton` receive it as `launch`.
    """

    operation: str
    execute: Execute

    def __call__(
        self,
        kernel: Any,
        *,
        grid: tuple[int, ...],
        inputs: Mapping[str, Array],
        outputs: Mapping[str, jax.ShapeDtypeStruct],
        scalars: Mapping[str, int] | None = None,
        constants: Mapping[str, Any] | None = None,
        **options: int,
    ) -> dict[str, Array]:
        """**Arguments:**

        - `kernel`: a `@triton.jit` function that takes inputs and scalars first, then outputs, then `tl.constexpr` constants.
        - `grid`: number of programs along one to three axes; at most 65,535 along the second and third.
        - `inputs`, `outputs`: maps parameter names to arrays, and to the shapes and dtypes of newly allocated arrays.
        - `scalars`: run-time integers. `constants`: the `tl.constexpr` parameters, including floats.
        - `options`: `num_warps` (4), `num_stages` (2), `max_registers` (0: the compiler's choice).

        **Returns:** the outputs by parameter name.
        """
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in inputs.items()}
        name = f"{self.operation}.{getattr(kernel, '__name__', type(kernel).__name__)}"
        given = (dict(outputs), dict(scalars or {}), dict(constants or {}))
        compiled: dict[str, Any] = dict(options)
        return self.execute(Launch(kernel, shapes, *given, grid, name=name, **compiled), dict(inputs))


@dataclasses.dataclass(frozen=True)
class CustomPlatform:
    """One platform of one kernel class, with the `dispatch.PlatformHooks`."""

    kernel: Any
    platform: Platform

    @property
    def written_as(self) -> Platform:
        """The platform whose methods run: the interpreter runs the Triton kernels."""
        return Platform.TRITON if self.platform is Platform.TRITON_INTERPRET else self.platform

    @property
    def config_type(self) -> type:
        declared = {Platform(name): cls for name, cls in self.kernel.config_types.items()}
        return declared.get(self.written_as, NoConfig)

    @property
    def OPAQUE(self) -> bool:
        """Returns whether the compiler cannot see into it."""
        return self.platform is not Platform.XLA

    @property
    def VERSION(self) -> int:
        return self.kernel.version

    @property
    def SOURCE(self) -> str | None:
        return source_digest(self.kernel)

    @property
    def NOTE(self) -> str:
        return Interpreted.NOTE if self.platform is Platform.TRITON_INTERPRET else ""

    @property
    def execute(self) -> Execute:
        """The function that runs launches of this platform."""
        return functools.partial(run, interpret=self.platform is Platform.TRITON_INTERPRET)

    def method(self, kind: str) -> Callable[..., Any] | None:
        """The class's function for this platform: `run` or `grad`."""
        return getattr(self.kernel, f"{kind}_{self.written_as.value}", None)

    def unavailable(self, device: DeviceFacts) -> str | None:
        if self.platform is Platform.TRITON_INTERPRET:
            return interpreter_unavailable()
        return kernels_unavailable(device) if self.platform is Platform.TRITON else None

    def unsupported(self, problem: Problem, device: DeviceFacts) -> str | None:
        return self._instance(problem).unsupported(self.written_as, problem, device)

    def default_config(self, problem: Problem, device: DeviceFacts) -> Any:
        if self.config_type is NoConfig:
            return NoConfig()
        return self._checked(self._instance(problem).default_config(self.written_as, problem, device))

    def candidates(self, problem: Problem, device: DeviceFacts) -> list[Any]:
        default = self.default_config(problem, device)
        if self.config_type is NoConfig:
            return [default]
        listed = self._instance(problem).candidates(self.written_as, problem, device)
        return list(dict.fromkeys((default, *map(self._checked, listed))))

    def config_unsupported(self, config: Any, problem: Problem, device: DeviceFacts) -> str | None:
        return self._instance(problem).config_unsupported(self.written_as, config, problem, device)

    def _instance(self, problem: Problem) -> Any:
        return self.kernel._of_fields(problem.flags)

    def _checked(self, config: Any) -> Any:
        if isinstance(config, self.config_type):
            return config
        raise ValueError(
            f"{self.kernel.__name__}: default_config and candidates for platform {self.written_as.value!r}: expected "
            f"{self.config_type.__name__}, received {config!r}; return an instance of config_types[{self.written_as.value!r}]."
        )


@functools.lru_cache(maxsize=256)
def source_digest(kernel: type) -> str | None:
    """A digest of the module that defines a kernel class, if its source is available; tuning results of other sources are invalid."""
    try:
        text = inspect.getsource(sys.modules[kernel.__module__])
    except (KeyError, OSError, TypeError):
        return None
    return hashlib.sha256(text.encode()).hexdigest()[:12]
