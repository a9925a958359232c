"""Platform `triton`: the host side. Configurations, support, and the launches of forward and backward."""

import dataclasses

from jax import Array

from ...core.platforms import kernels_unavailable
from ...dispatch import BOTH, DeviceFacts, FORWARD, Problem
from ...launch import Launcher, NOTHING, Options, result, result_like
from ...launch.sizes import cdiv, padded
from ..spec import NormArrays, NormSpec
from . import kernels
from .tile_sizes import NormTile as NormTile
from .tile_sizes import tile_pairs

OPAQUE = True
PARTS = {"forward": FORWARD, "backward": BOTH}
"""The fields of a configuration that are tuned one after the other, and whether only the forward pass is timed."""
MAX_FEATURES = 16384
_GATES = {"silu": 1, "sigmoid": 2}


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


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first."""
    rows = problem.dim("B") * problem.dim("M") * problem.dim("G")
    item = 4 if problem.dtype("x") == "float32" else 2
    tiles = tile_pairs(device, rows, problem.dim("M"), problem.dim("F"), item)
    fast = device.vendor == "nvidia"
    return list(dict.fromkeys(TritonConfig(*pair, fast_sigmoid=fast) for pair in tiles))


def forward(
    arrays: NormArrays, spec: NormSpec, config: TritonConfig, *, save: bool = True
) -> dict[str, Array]:
    """The results; nothing is saved."""
    tile, (batch, rows, groups, _) = config.forward, arrays.x.shape
    total = batch * rows * groups
    launch = _launcher(arrays, spec, config, tile)
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
) -> dict[str, Array]:
    """All gradients; that of the weight is per batch row and summed in a fixed order."""
    tile, (batch, rows, groups, features) = config.backward, arrays.x.shape
    chunks = cdiv(rows, tile.block_m * tile.turns)
    z, weight = arrays.z, arrays.weight
    results = _launcher(arrays, spec, config, tile)(
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


def _launcher(arrays: NormArrays, spec: NormSpec, config: TritonConfig, tile: NormTile) -> Launcher:
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
    return Launcher("normalization", arrays._asdict(), numbers, arrays.x)
