"""Platform `triton`: the host side. Configurations, support, and the launches of forward and backward."""

import jax.numpy as jnp
from jax import Array

from ...core.platforms import Interpreted, kernels_unavailable
from ...dispatch import BOTH, DeviceFacts, FORWARD, Problem
from ...launch import NOTHING, result
from ...launch.sizes import rows_of, too_large
from ..spec import alike, columns, GroupedArrays, GroupedSpec, HALVES, INTERLEAVED, PAIR
from ..spec import saved_axes as saved_axes
from .backward import backward as backward
from .call import ACTIVATIONS, grouped, launcher, stored_numbers
from .call import TritonConfig as TritonConfig
from .hopper import tile_sizes as hopper
from .tile_sizes import blocks_unfit, narrow_unfit, shared_memory, SMALLEST, tiles
from .tile_sizes import GroupedTile as GroupedTile

OPAQUE = True
PARTS = {"forward": FORWARD, "lhs": "lhs", "rhs": BOTH}
"""The fields of a configuration that are tuned one after the other, and what decides."""
KERNELS = tuple(PARTS)
MAX_GROUPS = 1023
_KINDS = {None: 0, PAIR: 1, HALVES: 2, INTERLEAVED: 3}


config_type = TritonConfig
unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    dtypes = dict(problem.dtypes)
    if "float64" in dtypes.values():
        return "takes float32, float16 and bfloat16, not float64"
    if (reason := blocks_unfit(problem)) is not None:
        return reason
    if problem.dim("E") > MAX_GROUPS:
        return f"takes up to {MAX_GROUPS} groups, not {problem.dim('E')}"
    is_stored = dtypes["rhs"] == "float8_e4m3fn" and not problem.flag("format")
    if is_stored and device.vendor == "nvidia" and device.capability < (8, 9):
        return (
            "takes right sides in float8_e4m3fn from compute capability 8.9 on, the device has "
            f"{device.compute_capability or 'none'}; float8_e5m2 and int8 it has"
        )
    return None


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first."""
    nvidia = device.vendor == "nvidia"
    precision = "tf32x3" if nvidia else "ieee"
    columns = [hopper.tiles(kernel, problem, device) + row for kernel, row in tiles(problem, device).items()]
    rows = rows_of(columns)
    return [TritonConfig(forward, lhs, rhs, precision, nvidia) for forward, lhs, rhs in rows]


def config_unsupported(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str | None:
    """The reason why the tiles cannot fit the device's shared memory, by an estimate. For the smallest tile only the compiler knows. And
    why not Hopper's kernels."""
    for kernel in KERNELS:
        tile = getattr(config, kernel)
        if (reason := narrow_unfit(kernel, tile, problem)) is not None:
            return f"{kernel} with block_m={tile.block_m} {reason}"
        needed = shared_memory(kernel, tile, problem, device)
        if tile.hopper_programs:
            reason = hopper.unfit(kernel, problem, device) or hopper.tile_unfit(kernel, tile, problem)
            if reason is not None:
                return f"{kernel} with hopper_programs={tile.hopper_programs} {reason}"
            needed = hopper.shared_memory(kernel, tile, problem)
        sizes = f"{tile.block_m}x{tile.block_n}x{tile.block_k}"
        reason = too_large(kernel, sizes, tile.num_stages, needed, device)
        # An estimate must not rule out the smallest tile, or no configuration might be left.
        if reason is not None and tile != SMALLEST:
            return reason
    return None


def remark(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str:
    """The parts that run in Triton's kernels on Hopper, and why."""
    # Only a device that could run Hopper's kernels needs to know why they are not used.
    if device.vendor != "nvidia" or device.capability != (9, 0):
        return ""
    reasons: dict[str, list[str]] = {}
    for kernel in KERNELS:
        if not getattr(config, kernel).hopper_programs:
            reasons.setdefault(hopper.not_chosen(kernel, problem, device), []).append(kernel)
    return "; ".join(
        f"{', '.join(kernels)}: Triton's kernel, not Hopper's, which {reason}"
        for reason, kernels in reasons.items()
    )


def forward(
    arrays: GroupedArrays,
    spec: GroupedSpec,
    config: TritonConfig,
    *,
    save: bool = True,
) -> dict[str, Array]:
    """The result and, for an activation, the products before it in the dtype of the left side."""
    arrays = alike(arrays)
    hopper.check(("forward",), config, arrays, spec)
    batch, inner = arrays.lhs.shape[0], arrays.lhs.shape[-1]
    width = arrays.right.shape[-2 if spec.transpose_rhs else -1]
    out = (batch, arrays.num_rows, columns(width, spec))
    saved = dict.fromkeys(spec.saved if save else (), result(*out, dtype=arrays.lhs.dtype))
    outputs = {"out": result(*out, dtype=jnp.dtype(spec.out_dtype)), "gate": NOTHING, "up_z": NOTHING} | saved
    launch = launcher(arrays, config)
    results = grouped(
        launch,
        config.forward,
        outputs,
        K=inner,
        W=width,
        N=out[-1],
        KIND=_KINDS[spec.gated],
        TRANSPOSED=spec.transpose_rhs,
        GATHERED=arrays.rows is not None,
        BIAS=arrays.bias is not None,
        UP_BIAS=arrays.up_bias is not None,
        SCALE=arrays.stored is not None,
        **stored_numbers(arrays, spec),
        ACTIVATION=ACTIVATIONS[spec.activation],
        ALPHA=spec.alpha,
        LIMIT=spec.limit or 0.0,
        UP_SHIFT=spec.up_shift,
        SAVE=bool(saved),
        name="forward_kernel",
    )
    return {name: results[name] for name in ("out", *saved)}


_TILE = GroupedTile(16, 16, 16, 4, 2, 2)
interpreted = Interpreted(__name__, TritonConfig(_TILE, _TILE, _TILE, "ieee"), fast_sigmoid=False)
"""The same kernels on the host, with tiles for small arrays: platform `triton-interpret`."""
