"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for checking."""

import dataclasses
import functools

from jax import Array

from ..dispatch import DeviceFacts, Problem
from ..launch import interpreter_unavailable, run
from . import triton
from .spec import RecurrenceArrays, RecurrenceSpec, StepArrays, StepSpec
from .triton import config_type as config_type
from .triton import saved_axes as saved_axes
from .triton import unsupported as unsupported
from .triton_config import Tile, TritonConfig

OPAQUE = True
VERSION = 1
NOTE = "interpreted on the host, program by program: for checking, not for speed"
_TILE = Tile(32, 32, 4, 1)
_execute = functools.partial(run, interpret=True)


def unavailable(device: DeviceFacts) -> str | None:
    return interpreter_unavailable()


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return TritonConfig(32, *[_TILE] * 6, float32_dot="ieee")


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    return [default_config(problem, device)]


def forward(arrays: RecurrenceArrays, spec: RecurrenceSpec, config: TritonConfig) -> dict[str, Array]:
    return triton.forward(arrays, spec, _portable(config), execute=_execute)


def backward(
    arrays: RecurrenceArrays,
    spec: RecurrenceSpec,
    config: TritonConfig,
    saved: dict[str, Array],
    dout: Array,
    dfinal_state: Array,
) -> dict[str, Array]:
    return triton.backward(arrays, spec, _portable(config), saved, dout, dfinal_state, execute=_execute)


def step(arrays: StepArrays, spec: StepSpec, config: TritonConfig) -> tuple[Array, Array]:
    return triton.step(arrays, spec, _portable(config), execute=_execute)


def _portable(config: TritonConfig) -> TritonConfig:
    return dataclasses.replace(config, float32_dot="ieee")
