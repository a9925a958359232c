"""Platform `triton`: the host side. Configurations, support, and the launches of forward and backward."""

import dataclasses
from typing import Any

from jax import Array

from ....core.platforms import kernels_unavailable
from ....dispatch import BOTH, DeviceFacts, FORWARD, Problem
from ....launch import Launcher, NOTHING, Options, result, result_like
from ....launch.sizes import cdiv, padded
from ...triton.tile_sizes import DEEP, NormTile, tile_pairs
from ..spec import COPIES, ResidualArrays, ResidualSpec
from . import kernels

OPAQUE = True
PARTS = {"forward": FORWARD, "backward": BOTH}
"""The fields of a configuration that are tuned one after the other, and whether only the forward pass is timed."""
MAX_FEATURES = 16384


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    forward: NormTile
    backward: NormTile


config_type = TritonConfig
unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if problem.dtype("x") == "float64":
        return "takes float32, float16 and bfloat16, not float64"
    if problem.dim("F") > MAX_FEATURES:
        return f"takes up to {MAX_FEATURES} features, not {problem.dim('F')}"
    return None


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first."""
    rows, item = problem.dim("B") * problem.dim("M"), 4 if problem.dtype("x") == "float32" else 2
    first = (DEEP,) if padded(problem.dim("F"), 1) == 1024 else ()
    tiles = tile_pairs(device, rows, problem.dim("M"), problem.dim("F"), item, first)
    return list(dict.fromkeys(TritonConfig(*pair) for pair in tiles))


def forward(
    arrays: ResidualArrays,
    spec: ResidualSpec,
    config: TritonConfig,
    *,
    save: bool = True,
) -> dict[str, Array]:
    """The results, of which the backward reads the sum."""
    tile, (batch, rows, _) = config.forward, arrays.x.shape
    total = batch * rows
    results = {"out": result_like(arrays.x)}
    results["sum"] = NOTHING if arrays.branch is None else result_like(arrays.x)
    launch = _launcher(arrays._asdict(), arrays, spec, tile)
    programs, has = cdiv(total, tile.block_m), arrays.branch is not None
    found = launch(kernels.forward_kernel, Options(tile.num_warps), results, programs, rows=total, BRANCH=has)
    outs = dict.fromkeys(COPIES[: spec.readers], found["out"])
    return outs | {"sum": arrays.x if arrays.branch is None else found["sum"]}


def backward(
    arrays: ResidualArrays,
    spec: ResidualSpec,
    config: TritonConfig,
    saved: dict[str, Array],
    cotangents: dict[str, Array],
) -> dict[str, Array]:
    """All gradients; that of the weight is per batch row and summed in a fixed order."""
    tile, (batch, rows, features) = config.backward, arrays.x.shape
    chunks = cdiv(rows, tile.block_m * tile.turns)
    given = {"sum": saved["sum"], "weight": arrays.weight}
    results = _launcher(given, arrays, spec, tile)(
        kernels.backward_kernel,
        Options(tile.num_warps),
        {
            "dx": result_like(arrays.x),
            "partial": NOTHING if arrays.weight is None else result(batch, chunks, features),
        },
        chunks * batch,
        {f"d{name}": cotangents.get(name) for name in (*COPIES, "sum")},
        READERS=spec.readers,
        TURNS=tile.turns,
        STAGES=tile.num_stages,
    )
    grads = {"x": results["dx"]}
    if arrays.branch is not None:
        grads["branch"] = results["dx"]
    if arrays.weight is not None:
        grads["weight"] = results["partial"].sum(1)
    return grads


def _launcher(given: dict[str, Any], arrays: ResidualArrays, spec: ResidualSpec, tile: NormTile) -> Launcher:
    _, rows, features = arrays.x.shape
    numbers = {
        "M": rows,
        "F": features,
        "EPS": spec.eps,
        "WEIGHT": arrays.weight is not None,
        "MAPPED": arrays.weight is not None and arrays.weight.ndim == 2,
        "BM": tile.block_m,
        "BF": padded(features, 1),
    }
    return Launcher("residual", given, numbers, arrays.x)
