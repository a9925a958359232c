"""Platform `triton`: support, configurations, and the choice of kernels for a call."""

import dataclasses
from types import ModuleType
from typing import Any

from jax import Array, lax

from ...core.platforms import kernels_unavailable
from ...dispatch import BOTH, DeviceFacts, FORWARD, Problem
from ...launch import Execute, run
from ..spec import KEY, RecurrenceArrays, RecurrenceSpec, StepArrays, StepSpec, VALUE
from . import delta_host, delta_tile_sizes, key_host, linear_host, step_kernel, tile_sizes
from .tile_sizes import TritonConfig

OPAQUE = True
VERSION = 2
MAX_HEAD_DIM = 256
PARTS = {
    "chunk_size": BOTH,
    "splits": BOTH,
    "scores": FORWARD,
    "wy": BOTH,
    "states": BOTH,
    "out": FORWARD,
    "dstates": BOTH,
    "gradients": BOTH,
}
"""The fields of a configuration that are tuned one after the other, and whether only the forward pass is timed."""
config_type = TritonConfig
config_unsupported = tile_sizes.config_unsupported


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return _tiles(problem).default_config(problem, device)


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    return _tiles(problem).candidates(problem, device)


def adapted(config: TritonConfig, problem: Problem, device: DeviceFacts) -> TritonConfig:
    """Keeps the tiles, except for the single kernel that computes the outputs: whether it is used, and with which tile, depends on the
    number of programs, as do the splits of sequences."""
    fit = default_config(problem, device)
    if config.single or fit.single:
        config = dataclasses.replace(config, single=fit.single, out=fit.out)
    return dataclasses.replace(config, splits=fit.splits)


def _tiles(problem: Problem) -> ModuleType:
    return delta_tile_sizes if problem.flag("delta") and not problem.flag("step") else tile_sizes


unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if problem.dtype("qkv") == "float64" or problem.dtype("state") == "float64":
        return "takes float32, float16 and bfloat16, not float64"
    if problem.flag("step"):
        return None
    if problem.flag("decay") == VALUE:
        return "does not support a decay per value channel"
    if problem.flag("delta") and problem.flag("skip"):
        return "does not support a skip with delta rules"
    if problem.dim("D") > MAX_HEAD_DIM:
        return f"takes key dims up to {MAX_HEAD_DIM}, not D {problem.dim('D')}"
    return None


def _member(spec: RecurrenceSpec) -> ModuleType:
    return delta_host if spec.delta else key_host if spec.decay == KEY else linear_host


def saved_axes(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> dict[str, tuple[str, ...]]:
    """The axes, after the leading one, of the residuals that the forward pass keeps for the backward pass."""
    return _member(spec).saved_axes(arrays, spec)


def forward(
    arrays: RecurrenceArrays,
    spec: RecurrenceSpec,
    config: TritonConfig,
    *,
    save: bool = True,
    execute: Execute = run,
) -> dict[str, Array]:
    """`out`, `final_state` and the residuals of `saved_axes`, from arrays with one leading axis. Saving costs no time, since one kernel
    passes the residuals to the next anyway."""
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
    """Gradients of all float arrays of the call; bitwise repeatable, as every sum has a fixed order."""
    # States are computed again from the arrays alone. Bound to the cotangents, so that no compiler does so early and holds them until here.
    arrays, saved, cotangents = lax.optimization_barrier((arrays, saved, cotangents))
    dout, dfinal_state = cotangents["out"], cotangents["final_state"]
    return _member(spec).backward(arrays, spec, config, saved, dout, dfinal_state, execute=execute)


def step(arrays: StepArrays, spec: StepSpec, config: Any, *, execute: Execute = run) -> tuple[Array, Array]:
    """Processes one token per row."""
    return step_kernel.step(arrays, spec, config, execute=execute)
