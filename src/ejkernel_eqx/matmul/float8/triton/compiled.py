"""Platform `triton`: the host side. Configurations, support, and the launches."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....core.by_example import by_example
from ....core.platforms import kernels_unavailable
from ....dispatch import DeviceFacts, FORWARD, Problem
from ....launch import gluon_unavailable, Launcher, result
from ....launch.fields import check_fields
from ....launch.sizes import cdiv, too_large
from .. import xla
from ..core import problem_of
from ..spec import GROUP, ScaledArrays, ScaledSpec
from . import kernel
from .tile_sizes import not_chosen, programs_of, shared_memory, SMALLEST, tile_unfit, tiles, unfit
from .tile_sizes import ScaledTile as ScaledTile

OPAQUE = True
PARTS = {"tile": FORWARD}
_RANKS = {"codes": 3, "scales": 2, "x_scale": 0}


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    tile: ScaledTile

    __post_init__ = check_fields


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The tile of the kernel that quantises."""

    block_m: int = 32
    num_warps: int = 4


config_type = TritonConfig


def unavailable(device: DeviceFacts) -> str | None:
    reason = kernels_unavailable(device)
    if reason is None and (device.vendor != "nvidia" or device.capability < (8, 9)):
        return f"needs NVIDIA's compute capability 8.9 or newer, the device has {device.compute_capability or 'none'}"
    return reason


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if "float64" in dict(problem.dtypes).values():
        return "takes float32, float16 and bfloat16, not float64"
    return None


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first."""
    return [TritonConfig(tile) for tile in tiles(problem, device)]


def config_unsupported(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str | None:
    """The reason why Hopper's kernel cannot run, or the tile cannot fit the device's shared memory, by an estimate."""
    tile = config.tile
    if tile.hopper_programs:
        reason = gluon_unavailable(device) or unfit(problem) or tile_unfit(tile)
        if reason is not None:
            return f"tile with hopper_programs={tile.hopper_programs} {reason}"
    sizes = f"{tile.block_m}x{tile.block_n}x{GROUP}"
    reason = too_large("tile", sizes, tile.num_stages, shared_memory(tile), device)
    return None if tile == SMALLEST else reason


def remark(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str:
    """The reason why the product runs in Triton's kernel on Hopper."""
    if config.tile.hopper_programs or device.vendor != "nvidia" or device.capability != (9, 0):
        return ""
    reason = not_chosen(problem, device)
    return f"Triton's kernel, not Hopper's, which {reason}" if reason else ""


def forward(
    arrays: ScaledArrays, spec: ScaledSpec, config: TritonConfig, *, save: bool = True
) -> dict[str, Array]:
    """The result. The backward needs the arguments only."""
    return by_example(lambda arrays: _forward(arrays, spec, config), arrays, _RANKS)


def _forward(arrays: ScaledArrays, spec: ScaledSpec, config: TritonConfig) -> dict[str, Array]:
    batch, rows, features = arrays.x.shape
    blocks, height, _ = arrays.codes.shape
    tile, count = config.tile, batch * rows
    numbers: dict[str, Any] = {
        "M": count,
        "K": features,
        "N": blocks * height,
        "R": height,
        "G": arrays.scales.shape[1],
        "COLUMNS": spec.columns,
        "GROUPED": arrays.x_scale is None,
        "GROUP": GROUP,
    }
    launch = Launcher("float8", arrays._asdict(), numbers, arrays.scales)
    groups, quantise = cdiv(features, GROUP), _Rows()
    outputs = {
        "rounded": result(count, features, dtype=jnp.float8_e4m3fn),
        "rounded_scales": result(groups, count) if arrays.x_scale is None else result(1),
    }
    made = launch(kernel.quantise_kernel, quantise, outputs, groups * cdiv(count, quantise.block_m))
    multiply = kernel.scaled_kernel
    if tile.hopper_programs:
        reason = unfit(problem_of("scaled_matmul", arrays, spec)) or tile_unfit(tile)
        if reason is not None:
            raise ValueError(
                f"config: expected hopper_programs=0 in tile, received {tile.hopper_programs}: Hopper's kernel {reason}."
            )
        from .hopper_kernel import hopper_scaled_kernel as multiply
    out = result(batch, rows, blocks, height, dtype=jnp.dtype(spec.out_dtype))
    programs = programs_of(count, blocks * height, tile)
    return launch(multiply, tile, {"out": out}, programs, made, name="scaled_kernel")


def backward(
    arrays: ScaledArrays, spec: ScaledSpec, config: TritonConfig, saved: Any, cotangents: dict[str, Array]
) -> dict[str, Array]:
    """The gradient of the rows by XLA: a product without rounding, in their precision."""
    out, pull = jax.vjp(lambda x: xla.apply(arrays._replace(x=x), spec)["out"], arrays.x)
    return {"x": pull(cotangents["out"].astype(out.dtype))[0]}
