"""Platform `triton`: the host side. Configurations, support, and the launch."""

import dataclasses
from typing import Any

from ....core import Named
from ....core.by_example import by_example, gradients_by
from ....core.platforms import Interpreted, kernels_unavailable
from ....dispatch import DeviceFacts, FORWARD, Problem
from ....launch import gluon_unavailable, Launcher, NOTHING, result
from ....launch.fields import Checked, Float32Dot
from ....launch.sizes import too_large
from ....normalization.spec import NormArrays, NormSpec
from ....normalization.triton import compiled as norms
from ....quantised.format import form_of
from ...triton.call import ACTIVATIONS, OPERANDS
from .. import xla
from ..spec import BIASES, CODED, is_of_many, MatmulArrays, MatmulSpec, RESULTS, RIGHTS
from . import kernel, many
from .tile_sizes import programs_of, shared_memory, tiles, unit_of
from .tile_sizes import RowsTile as RowsTile

OPAQUE = True
PARTS = {"tile": FORWARD}
_RANKS: dict[str, int] = dict.fromkeys(RIGHTS, 2) | dict.fromkeys((*BIASES, "norm"), 1)
_RANKS |= {name: rank for fields in CODED for name, rank in zip(fields, (2, 2, 2, 0))}
"""Of the arrays that all rows share."""


@dataclasses.dataclass(frozen=True)
class TritonConfig(Checked):
    tile: RowsTile
    norm_apart: bool = False
    """Whether the norm is a launch of its own, rather than computed by every program for itself."""
    float32_dot: Float32Dot = "tf32x3"
    fast_sigmoid: bool = True
    """Whether the activation uses NVIDIA's approximate instructions (error 2e-7)."""
    floats_apart: bool = False
    """Whether a kernel makes floats of quantised weights first, by which XLA multiplies."""


config_type = TritonConfig
unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if problem.dtype("x") == "float64":
        return "takes float32, float16 and bfloat16, not float64"
    word = problem.flag("weights")
    if word is not None:
        form, features = form_of(str(word)), problem.dim("K")
        each = 32 // form.bits
        if features % each or (form.block[1] < features and form.block[1] % each):
            return f"reads words of {each} codes, of which neither {features} features nor blocks of {form.block[1]} are a multiple"
    return None


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first."""
    # Of these, Triton's kernel is for few rows.
    coded = problem.flag("weights") is not None and problem.dim("B") * problem.dim("M") > 4
    floats = TritonConfig(RowsTile(64, 64, 64, 4, 3), floats_apart=True)
    ranked = (
        [TritonConfig(tile) if tile else floats for tile in many.ranked(problem, device)] if coded else []
    )
    if is_of_many(problem):
        return ranked
    hopper = [config for config in ranked if config is not floats]
    nvidia = device.vendor == "nvidia"
    # With one row, a program's norm costs less than a launch. It leaves rows unscaled, which float16 may not hold.
    most = 2 if problem.flag("weights") is None else 1
    few = problem.dim("B") * problem.dim("M") <= most and problem.dtype("x") != "float16"
    apart = bool(problem.flag("norm")) and not few
    precision = "tf32x3" if nvidia else "ieee"
    of_few = [TritonConfig(tile, apart, precision, nvidia) for tile in tiles(problem, device)]
    return hopper + of_few if coded and many.is_preferred(problem) else of_few + hopper


def config_unsupported(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str | None:
    """The reason why rows are not normalised before they are rounded, or the tile cannot fit the device's shared memory, by an estimate."""
    tile = config.tile
    if problem.flag("weights") is None and (config.floats_apart or tile.hopper_programs):
        return "floats_apart and hopper_programs are for quantised weights"
    if config.floats_apart:
        return None
    if tile.hopper_programs:
        reason = gluon_unavailable(device) or many.unfit(problem, tile)
        return reason and f"the kernel with hopper_programs={tile.hopper_programs} {reason}"
    if problem.flag("norm") and problem.dtype("x") == "float16" and not config.norm_apart:
        return "norm_apart=False leaves rows unscaled, which may be too large for float16"
    if problem.flag("weights") is None:
        if tile.split_k > 1:
            return "split_k is for quantised weights"
    elif tile.block_m > 1 and problem.flag("norm") and not config.norm_apart:
        return "norm_apart=False is for single rows where weights are quantised"
    sizes = f"{tile.block_m}x{tile.block_n}x{tile.block_k}"
    return too_large("tile", sizes, tile.num_stages, shared_memory(tile, problem), device)


def forward(arrays: MatmulArrays, spec: MatmulSpec, config: TritonConfig, *, save: bool = True) -> Named:
    """The results. The backward needs the arguments only."""
    return by_example(lambda arrays: _forward(arrays, spec, config), arrays, _RANKS)


def _forward(arrays: MatmulArrays, spec: MatmulSpec, config: TritonConfig) -> Named:
    batch, rows, features = arrays.x.shape
    if config.floats_apart or config.tile.hopper_programs:
        return many.multiply(arrays, spec, None if config.floats_apart else config.tile)
    if spec.eps is not None and config.norm_apart:
        norm = norms.TritonConfig(norms.NormTile(1, 4), norms.NormTile(1, 4))
        normed = norms.forward(
            NormArrays(arrays.x, weight=arrays.norm), NormSpec(eps=spec.eps, readers=1), norm
        )
        arrays, spec = arrays._replace(x=normed["out"], norm=None), dataclasses.replace(spec, eps=None)
    columns = [right.shape[0] for right in arrays.rights][: spec.count]
    form = spec.format
    numbers: dict[str, Any] = {
        "M": batch * rows,
        "K": features,
        "GATED": spec.gated,
        "NORM": spec.eps is not None,
        "NORM_WEIGHT": arrays.norm is not None,
        "EPS": spec.eps or 0.0,
        "RESIDUAL": arrays.residual is not None,
        "ACTIVATION": ACTIVATIONS[spec.activation],
        "ALPHA": spec.alpha,
        "LIMIT": spec.limit or 0.0,
        "UP_SHIFT": spec.up_shift,
        "FAST": config.fast_sigmoid,
        "OPERAND": OPERANDS[arrays.x.dtype.name],
        "PRECISION": config.float32_dot,
        "STAGES": config.tile.num_stages,
        "ZEROS": arrays.zeros is not None,
        "FACTOR": arrays.factor is not None,
    }
    unit = 0 if form is None else unit_of(form, features, config.tile.block_k)
    numbers |= many.constants_of(form, features, unit)
    numbers |= {f"N{i}": n for i, n in enumerate((*columns, 0, 0)[:3])}
    numbers |= {name.upper(): getattr(arrays, name) is not None for name in BIASES}
    outputs = {name: result(batch, rows, n, dtype=arrays.x.dtype) for name, n in zip(RESULTS, columns)}
    stored = dict(zip(RIGHTS, arrays.rights)) if form is not None else {}
    launch = Launcher("matmul", arrays._asdict() | stored, numbers, arrays.x)
    made = launch(
        kernel.rows_kernel,
        config.tile,
        dict.fromkeys(RESULTS, NOTHING) | outputs,
        programs_of(batch * rows, columns, config.tile),
    )
    return {name: made[name] for name in outputs}


# By XLA: few rows are for decoding, which has no gradients, and gradients of many are products.
backward = gradients_by(lambda arrays, spec: xla.apply(*many.with_floats(arrays, spec)))


_SMALL = TritonConfig(RowsTile(64, 16, 32, 4, 1), True)
interpreted = Interpreted(__name__, _SMALL, float32_dot="ieee", fast_sigmoid=False)
"""The same kernels on the host, with tiles for small arrays: platform `triton-interpret`."""
