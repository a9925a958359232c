"""Platform `triton-interpret`: the Triton kernels themselves, interpreted on the host. Slow; for checking."""

import dataclasses
import functools

from jax import Array

from ..dispatch import DeviceFacts, Problem
from ..launch import interpreter_unavailable, run
from . import triton
from .spec import AttentionArrays, AttentionGrads, AttentionSpec
from .triton import config_type as config_type
from .triton import TileConfig, TritonConfig
from .triton import unsupported as unsupported

OPAQUE = True
VERSION = 1
NOTE = "interpreted on the host, program by program: for checking, not for speed"
_TILE = TileConfig(32, 32, 4, 1)
_execute = functools.partial(run, interpret=True)


def unavailable(device: DeviceFacts) -> str | None:
    return interpreter_unavailable()


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return TritonConfig(_TILE, _TILE, _TILE)


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    return [default_config(problem, device)]


def forward(arrays: AttentionArrays, spec: AttentionSpec, config: TritonConfig) -> tuple[Array, Array]:
    return triton.forward(arrays, spec, _portable(config), execute=_execute)


def backward(
    arrays: AttentionArrays,
    spec: AttentionSpec,
    config: TritonConfig,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
) -> AttentionGrads:
    return triton.backward(arrays, spec, _portable(config), out, lse, dout, dlse, execute=_execute)


def _portable(config: TritonConfig) -> TritonConfig:
    return dataclasses.replace(config, fast_tanh=False, float32_dot="ieee")
