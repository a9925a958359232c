"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for checking."""

import functools

from jax import Array

from ..dispatch import DeviceFacts, Problem
from ..launch import interpreter_unavailable, run
from . import triton
from .spec import ScanArrays, ScanSpec, StepArrays
from .triton import config_type as config_type
from .triton import PARTS as PARTS
from .triton import ScanTile, TritonConfig
from .triton import unsupported as unsupported
from .triton_step import StepTile

OPAQUE = True
VERSION = 1
NOTE = "interpreted on the host, program by program: for checking, not for speed"
_CONFIG = TritonConfig(8, ScanTile(32, 1, 6, unroll=2), ScanTile(32, 1, 6), StepTile(4, 1))
_execute = functools.partial(run, interpret=True)


def unavailable(device: DeviceFacts) -> str | None:
    return interpreter_unavailable()


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return _CONFIG


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    return [_CONFIG]


def forward(
    arrays: ScanArrays, spec: ScanSpec, config: TritonConfig, *, save: bool = True
) -> dict[str, Array]:
    return triton.forward(arrays, spec, config, save=save, execute=_execute)


def backward(
    arrays: ScanArrays, spec: ScanSpec, config: TritonConfig, saved: Array, dout: Array, dfinal_state: Array
) -> dict[str, Array]:
    return triton.backward(arrays, spec, config, saved, dout, dfinal_state, execute=_execute)


def step(arrays: StepArrays, spec: ScanSpec, config: TritonConfig) -> tuple[Array, Array]:
    return triton.step(arrays, spec, config, execute=_execute)
