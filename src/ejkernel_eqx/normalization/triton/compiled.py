"""Platform `triton`: the host side. Configurations, support, and the launches of forward and backward."""

import dataclasses

from jax import Array

from ...core.platforms import kernels_unavailable
from ...dispatch import BOTH, DeviceFacts, FORWARD, Problem
from ...launch import Execute, Launcher, NOTHING, Options, result, result_like, run
from ...launch.fields import check_fields, Count, Power, Warps
from ...launch.sizes import cdiv, padded, shared_memory_of
from ..spec import NormArrays, NormSpec
from . import kernels

OPAQUE = True
PARTS = {"forward": FORWARD, "backward": BOTH}
"""The fields of a configuration that are tuned one after the other, and whether only the forward pass is timed."""
MAX_FEATURES = 16384
_GATES = {"silu": 1, "sigmoid": 2}


@dataclasses.dataclass(frozen=True)
class NormTile:
    """A program processes `block_m` rows (a power of two); in the backward, `turns` times, with `num_stages` turns loaded at once."""

    block_m: Power
    num_warps: Warps
    turns: Count = 1
    num_stages: Count = 1

    __post_init__ = check_fields


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    forward: NormTile
    backward: NormTile
    fast_sigmoid: bool = True
    """Whether the gate uses NVIDIA's approximate instructions (error 2e-7)."""


config_type = TritonConfig
unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if "float64" in dict(problem.dtypes).values():
        return "takes float32, float16 and bfloat16, not float64"
    if problem.dim("F") > MAX_FEATURES:
        return f"takes groups of up to {MAX_FEATURES} features, not {problem.dim('F')}"
    return None


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return candidates(problem, device)[0]


# Forward: elements per program and per thread. Backward: elements per thread (and per program, if rows are narrow), the number of turns
# loaded ahead, and programs per multiprocessor. Best first, as measured on an H200.
_NARROW = (
    (4096, 32, 512, 16, 2, 16),
    (2048, 16, 512, 16, 3, 16),
    (4096, 16, 1024, 16, 1, 8),
    (8192, 32, 512, 8, 3, 16),
)
_WIDE = (
    (4096, 32, 4096, 8, 4, 2),
    (8192, 32, 4096, 8, 3, 4),
    (4096, 16, 4096, 16, 3, 4),
    (8192, 16, 4096, 32, 2, 4),
)


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first."""
    sizes = _NARROW if problem.dim("F") <= 1024 else _WIDE
    return list(dict.fromkeys(_config(problem, device, *size) for size in sizes))


def _config(
    problem: Problem,
    device: DeviceFacts,
    forward: int,
    ahead: int,
    backward: int,
    each: int,
    stages: int,
    programs: int,
) -> TritonConfig:
    width = padded(problem.dim("F"), 1)
    first, second = (max(1, elements // width) for elements in (forward, backward))
    rows = problem.dim("B") * problem.dim("M") * problem.dim("G")
    turns = rows // (second * programs * max(device.num_multiprocessors, 1))
    turns = max(1, min(turns, cdiv(problem.dim("M"), second)))
    # Data loaded ahead of its turn waits in shared memory, in at most two fifths of it.
    loads = 3 * second * width * (4 if problem.dtype("x") == "float32" else 2)
    ahead_of = min(stages, turns, 1 + 2 * shared_memory_of(device) // (5 * loads))
    return TritonConfig(
        NormTile(first, _warps(first * width, ahead)),
        NormTile(second, _warps(second * width, each), turns, max(1, ahead_of)),
        fast_sigmoid=device.vendor == "nvidia",
    )


def _warps(elements: int, each: int) -> int:
    return max(1, min(16, elements // (32 * each)))


def forward(
    arrays: NormArrays, spec: NormSpec, config: TritonConfig, *, save: bool = True, execute: Execute = run
) -> dict[str, Array]:
    """The results; nothing is saved."""
    tile, (batch, rows, groups, _) = config.forward, arrays.x.shape
    total = batch * rows * groups
    launch = _launcher(arrays, spec, config, tile, execute)
    programs = cdiv(total, tile.block_m)
    return launch(
        kernels.forward_kernel, Options(tile.num_warps), {"out": result_like(arrays.x)}, programs, rows=total
    )


def backward(
    arrays: NormArrays,
    spec: NormSpec,
    config: TritonConfig,
    saved: dict[str, Array],
    cotangents: dict[str, Array],
    *,
    execute: Execute = run,
) -> dict[str, Array]:
    """All gradients; that of the weight is per batch row and summed in a fixed order."""
    tile, (batch, rows, groups, features) = config.backward, arrays.x.shape
    chunks = cdiv(rows, tile.block_m * tile.turns)
    z, weight = arrays.z, arrays.weight
    results = _launcher(arrays, spec, config, tile, execute)(
        kernels.backward_kernel,
        Options(tile.num_warps),
        {
            "dx": result_like(arrays.x),
            "dz": NOTHING if z is None else result_like(z),
            "partial": NOTHING if weight is None else result(batch, chunks, groups, features),
        },
        groups * chunks * batch,
        {"dout": cotangents["out"]},
        TURNS=tile.turns,
        STAGES=tile.num_stages,
    )
    grads = {"x": results["dx"]}
    if z is not None:
        grads["z"] = results["dz"]
    if weight is not None:
        grads["weight"] = results["partial"].sum(1)
    return grads


def _launcher(
    arrays: NormArrays, spec: NormSpec, config: TritonConfig, tile: NormTile, execute: Execute
) -> Launcher:
    rows, groups, features = arrays.x.shape[1:]
    numbers = {
        "M": rows,
        "G": groups,
        "F": features,
        "EPS": spec.eps,
        "GATE": 0 if arrays.z is None else _GATES[spec.activation],
        "NORM_FIRST": spec.norm_before_gate,
        "WEIGHT": arrays.weight is not None,
        "MAPPED": arrays.weight is not None and arrays.weight.ndim == 3,
        "FAST": config.fast_sigmoid,
        "BM": tile.block_m,
        "BF": padded(features, 1),
    }
    return Launcher("normalization", arrays._asdict(), numbers, arrays.x, execute)
