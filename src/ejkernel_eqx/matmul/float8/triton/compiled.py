"""Platform `triton`: the host side. Configurations, support, and the launches."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....core import Named
from ....core.by_example import by_example
from ....core.platforms import Interpreted, kernels_unavailable
from ....dispatch import DeviceFacts, Problem
from ....launch import gluon_unavailable, Launcher, NOTHING, result
from ....launch.sizes import cdiv, padded, too_large
from ...triton.compiled import MAX_GROUPS
from .. import xla
from ..core import problem_of
from ..spec import GROUP, rows_of_block, ScaledArrays, ScaledSpec
from . import kernel
from .tile_sizes import not_chosen, shared_memory, SMALLEST, tiles, unfit
from .tile_sizes import ScaledTile as ScaledTile

OPAQUE = True
config_type = ScaledTile
candidates = tiles
_RANKS = {"codes": 3, "scales": 2, "x_scale": 0, "floats": 2}
_QUANTISE, _BLOCKS = ScaledTile(32, GROUP, 4, 1), ScaledTile(GROUP, GROUP, 8, 1)
"""The tiles of the kernels that quantise."""


def unavailable(device: DeviceFacts) -> str | None:
    reason = kernels_unavailable(device)
    if reason is None and (device.vendor != "nvidia" or device.capability < (8, 9)):
        return f"needs NVIDIA's compute capability 8.9 or newer, the device has {device.compute_capability or 'none'}"
    return reason


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if "float64" in dict(problem.dtypes).values():
        return "takes float32, float16 and bfloat16, not float64"
    if (weights := dict(problem.dims).get("E", 0)) > MAX_GROUPS:
        return f"takes up to {MAX_GROUPS} groups, not {weights}"
    return None


def default_config(problem: Problem, device: DeviceFacts) -> ScaledTile:
    return tiles(problem, device)[0]


def config_unsupported(config: ScaledTile, problem: Problem, device: DeviceFacts) -> str | None:
    """The reason why Hopper's kernel cannot run, or the tile cannot fit the device's shared memory, by an estimate."""
    if config.hopper_programs:
        reason = gluon_unavailable(device) or unfit(problem, config)
        if reason is not None:
            return f"the kernel with hopper_programs={config.hopper_programs} {reason}"
    sizes = f"{config.block_m}x{config.block_n}x{GROUP}"
    reason = too_large("the kernel", sizes, config.num_stages, shared_memory(config), device)
    return None if config == SMALLEST else reason


def remark(config: ScaledTile, problem: Problem, device: DeviceFacts) -> str:
    """The reason why the product runs in Triton's kernel on Hopper."""
    if config.hopper_programs or device.vendor != "nvidia" or device.capability != (9, 0):
        return ""
    reason = not_chosen(problem, device)
    return f"Triton's kernel, not Hopper's, which {reason}" if reason else ""


def forward(arrays: ScaledArrays, spec: ScaledSpec, config: ScaledTile, *, save: bool = True) -> Named:
    """The result. The backward needs the arguments only."""
    ranks = _RANKS if arrays.sizes is None else _RANKS | {"codes": 4, "scales": 3}
    return by_example(lambda arrays: _forward(arrays, spec, config), arrays, ranks)


def _forward(arrays: ScaledArrays, spec: ScaledSpec, config: ScaledTile) -> Named:
    batch, rows, features = arrays.x.shape
    if spec.turned[0]:
        rows, features = features, rows
    if is_float := arrays.floats is not None:
        blocks, scales = _codes_of(arrays.floats[None], spec.turned[1], True)
        height = rows_of_block(blocks.shape[-2])
        arrays = arrays._replace(codes=blocks.reshape(-1, height, features), scales=scales, floats=None)
    assert arrays.codes is not None and arrays.scales is not None
    *_, blocks, height, _ = arrays.codes.shape
    count, groups, grouped = batch * rows, cdiv(features, GROUP), arrays.x_scale is None
    numbers = {"M": count, "K": features, "N": blocks * height, "R": height, "G": arrays.scales.shape[-1]}
    numbers |= {"COLUMNS": spec.columns, "GROUPED": grouped, "GROUP": GROUP}
    weights = 0 if arrays.sizes is None else arrays.sizes.shape[-1]
    numbers |= {"B": batch, "E": weights, "RAGGED": weights > 0, "BLOCK_E": padded(weights + 1)}
    # Rows that several weights multiply are rounded once: those launches have the same arguments.
    launch = Launcher("float8", arrays._asdict(), numbers, arrays.x)
    if spec.turned[0]:
        codes, scales = _codes_of(arrays.x, True, False)
        made = {"rounded": codes, "rounded_scales": scales}
    else:
        codes = result(count, features, dtype=jnp.float8_e4m3fn)
        outputs = {"rounded": codes, "rounded_scales": result(groups, count) if grouped else NOTHING}
        programs = groups * cdiv(count, _QUANTISE.block_m)
        made = launch(kernel.quantise_kernel, _QUANTISE, outputs, programs)
    multiply = kernel.scaled_kernel
    # Rows past the last group are tiles too.
    most = rows // config.block_m + min(weights + 1, rows) if weights else cdiv(count, config.block_m)
    programs = (batch if weights else 1) * most * cdiv(blocks * height, config.block_n)
    own = {"TILES": most}
    if config.hopper_programs:
        reason = unfit(problem_of("scaled_matmul", arrays, spec), config)
        if reason is not None:
            received = f"received {config.hopper_programs}: Hopper's kernel {reason}."
            raise ValueError(f"config: expected hopper_programs=0, {received}")
        from .hopper_kernel import hopper_scaled_kernel as multiply

        programs, own = config.hopper_programs, {}
    out = result(batch, rows, blocks, height, dtype=jnp.dtype(spec.out_dtype))
    results = launch(multiply, config, {"out": out}, programs, made, name="scaled_kernel", **own)
    return {"out": results["out"].reshape(batch, rows, -1)} if is_float else results


def _codes_of(x: Array, turned: bool, blocks: bool) -> tuple[Array, Array]:
    """Codes and scales of `x [B, N, K]`, or `[B, K, N]` if it is turned: `[B, N, K]` and, by row and group, `[groups, B N]`; by blocks, in bytes,
    `[N / R, groups]`."""
    batch, rows, features = x.shape
    if turned:
        rows, features = features, rows
    groups, height = cdiv(features, GROUP), rows_of_block(rows)
    numbers = {"B": batch, "N": rows, "K": features, "R": height, "TURNED": turned, "BLOCKS": blocks}
    tile = _BLOCKS if blocks else _QUANTISE
    scales = result(rows // height, groups) if blocks else result(groups, batch * rows)
    outputs = {"rounded": result(batch, rows, features, dtype=jnp.float8_e4m3fn), "rounded_scales": scales}
    launch = Launcher("float8", {"floats": x}, numbers | {"GROUP": GROUP}, x)
    made = launch(kernel.round_kernel, tile, outputs, batch * groups * cdiv(rows, tile.block_m))
    codes = made["rounded"]
    return (lax.bitcast_convert_type(codes, jnp.uint8) if blocks else codes), made["rounded_scales"]


def backward(
    arrays: ScaledArrays, spec: ScaledSpec, config: ScaledTile, saved: Any, cotangents: Named
) -> Named:
    """The gradient of the rows by XLA: a product without rounding, in their precision."""
    out, pull = jax.vjp(lambda x: xla.apply(arrays._replace(x=x), spec)["out"], arrays.x)
    return {"x": pull(cotangents["out"].astype(out.dtype))[0]}


interpreted = Interpreted(__name__, ScaledTile(32, 32, 4, 1))
"""The same kernels on the host, with tiles for small arrays: platform `triton-interpret`."""
