"""Platform `triton`: which kernels a call takes, which it cannot, and with which configuration."""

import dataclasses
from types import ModuleType
from typing import Any

from jax import Array

from ...core.platforms import kernels_unavailable
from ...dispatch import BOTH, DeviceFacts, FORWARD, Problem
from ...launch import Execute, run
from ..spec import KEY, RecurrenceArrays, RecurrenceSpec, StepArrays, StepSpec, VALUE
from . import delta_host, delta_tile_sizes, key_host, linear_host, step_kernel, tile_sizes
from .tile_sizes import TritonConfig

OPAQUE = True
MAX_HEAD_DIM = 256
PARTS = {
    "chunk_size": BOTH,
    "scores": FORWARD,
    "wy": BOTH,
    "states": BOTH,
    "out": FORWARD,
    "dstates": BOTH,
    "gradients": BOTH,
}
"""The fields of a configuration that are tuned one after the other, and whether the forward pass alone decides."""
config_type = TritonConfig
config_unsupported = tile_sizes.config_unsupported


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return _tiles(problem).default_config(problem, device)


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    return _tiles(problem).candidates(problem, device)


def adapted(config: TritonConfig, problem: Problem, device: DeviceFacts) -> TritonConfig:
    """The tiles stay, but for those of one kernel that makes the outputs: whether it is enough, and with which, depends on how many programs
    there are."""
    fit = default_config(problem, device)
    if config.single or fit.single:
        config = dataclasses.replace(config, single=fit.single, out=fit.out)
    return config


def _tiles(problem: Problem) -> ModuleType:
    return delta_tile_sizes if problem.flag("delta") and not problem.flag("step") else tile_sizes


unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if problem.dtype("qkv") == "float64" or problem.dtype("state") == "float64":
        return "takes float32, float16 and bfloat16, not float64"
    if problem.flag("step"):
        return None
    if problem.flag("decay") == VALUE:
        return "has no decay of value channels"
    if problem.flag("delta") and problem.flag("skip"):
        return "has no skip for delta rules"
    if problem.dim("D") > MAX_HEAD_DIM:
        return f"takes key dims up to {MAX_HEAD_DIM}, not D {problem.dim('D')}"
    return None


def _member(spec: RecurrenceSpec) -> ModuleType:
    return delta_host if spec.delta else key_host if spec.decay == KEY else linear_host


def saved_axes(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> dict[str, tuple[str, ...]]:
    """The axes, behind the leading one, of what the forward pass keeps for the backward pass."""
    return _member(spec).saved_axes(arrays, spec)


def forward(
    arrays: RecurrenceArrays,
    spec: RecurrenceSpec,
    config: TritonConfig,
    *,
    save: bool = True,
    execute: Execute = run,
) -> dict[str, Array]:
    """`out`, `final_state` and what `saved_axes` names, from arrays with one leading axis. It takes no time to save: the kernels hand it on."""
    return _member(spec).forward(arrays, spec, config, execute=execute)


def backward(
    arrays: RecurrenceArrays,
    spec: RecurrenceSpec,
    config: TritonConfig,
    saved: dict[str, Array],
    cotangents: dict[str, Array],
    *,
    execute: Execute = run,
) -> dict[str, Array]:
    """The gradients of the float arrays that are given; bitwise repeatable, as every sum has one fixed order."""
    dout, dfinal_state = cotangents["out"], cotangents["final_state"]
    return _member(spec).backward(arrays, spec, config, saved, dout, dfinal_state, execute=execute)


def step(arrays: StepArrays, spec: StepSpec, config: Any, *, execute: Execute = run) -> tuple[Array, Array]:
    """One token of every row."""
    return step_kernel.step(arrays, spec, config, execute=execute)
