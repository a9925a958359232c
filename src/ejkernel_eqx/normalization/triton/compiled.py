"""Platform `triton`: the host side. Configurations, support, and the launches of forward and backward."""

import dataclasses
import math

from ...core import Named
from ...core.platforms import Interpreted, kernels_unavailable
from ...dispatch import BOTH, DeviceFacts, FORWARD, Problem
from ...launch import Launcher, NOTHING, Options, result, result_like
from ...launch.sizes import cdiv, padded
from ..spec import COPIES, NormArrays, NormSpec
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
    """Whether the gate, if there is one, uses NVIDIA's approximate instructions (error 2e-7)."""


config_type = TritonConfig
unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if "float64" in dict(problem.dtypes).values():
        return "takes float32, float16 and bfloat16, not float64"
    if problem.dim("F") > MAX_FEATURES:
        groups = "groups of " if "G" in dict(problem.dims) else ""
        return f"takes {groups}up to {MAX_FEATURES} features, not {problem.dim('F')}"
    return None


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first."""
    fast = device.vendor == "nvidia"
    pairs = tile_pairs(problem, device)
    return list(dict.fromkeys(TritonConfig(*pair, fast_sigmoid=fast) for pair in pairs))


def forward(arrays: NormArrays, spec: NormSpec, config: TritonConfig, *, save: bool = True) -> Named:
    """The results, of which the backward reads the sum."""
    tile, like, has_branch = config.forward, result_like(arrays.x), arrays.branch is not None
    rows = math.prod(arrays.x.shape[:-1])
    made = _launcher(arrays, spec, config, tile)(
        kernels.forward_kernel,
        Options(tile.num_warps),
        {"out": like, "sum": like if has_branch else NOTHING},
        cdiv(rows, tile.block_m),
        rows=rows,
        BRANCH=has_branch,
    )
    # Without a branch the sum is x itself, which is not copied.
    return spec.results(made["out"], made["sum"] if has_branch else arrays.x)


def backward(
    arrays: NormArrays, spec: NormSpec, config: TritonConfig, saved: Named, cotangents: Named
) -> Named:
    """All gradients; that of the weight is per batch row and summed in a fixed order."""
    tile, (batch, rows, *groups, features) = config.backward, arrays.x.shape
    # Each program writes a sum of its own for the weight, so that results need no atomics.
    chunks = cdiv(rows, tile.block_m * tile.turns)
    z, weight = arrays.z, arrays.weight
    made = _launcher(arrays._replace(x=saved.get("sum", arrays.x)), spec, config, tile)(
        kernels.backward_kernel,
        Options(tile.num_warps),
        {
            "dx": result_like(arrays.x),
            "dz": NOTHING if z is None else result_like(z),
            "partial": NOTHING if weight is None else result(batch, chunks, *groups, features),
        },
        math.prod(groups) * chunks * batch,
        {f"d{name}": cotangents.get(name) for name in (*COPIES, "sum")},
        READERS=spec.readers,
        TURNS=tile.turns,
        STAGES=tile.num_stages,
    )
    # A sum passes its gradient on to both of its terms, so x and the branch share one array.
    grads = {"x": "dx", "z": "dz", "branch": "dx", "weight": "partial"}
    grads = {name: made[of] for name, of in grads.items() if getattr(arrays, name) is not None}
    return grads if weight is None else grads | {"weight": grads["weight"].sum(1)}


def _launcher(arrays: NormArrays, spec: NormSpec, config: TritonConfig, tile: NormTile) -> Launcher:
    _, rows, *groups, features = arrays.x.shape
    numbers = {
        "M": rows,
        "G": math.prod(groups),
        "F": features,
        "EPS": spec.eps,
        "GATE": 0 if arrays.z is None else _GATES[spec.activation],
        "NORM_FIRST": spec.norm_before_gate,
        "WEIGHT": arrays.weight is not None,
        "MAPPED": arrays.weight is not None and arrays.weight.ndim == arrays.x.ndim - 1,
        "FAST": config.fast_sigmoid,
        "BM": tile.block_m,
        "BF": padded(features, 1),
    }
    family = "residual" if spec.readers else "normalization"
    return Launcher(family, arrays._asdict(), numbers, arrays.x)


_SMALL = NormTile(4, 4), NormTile(2, 4, 2)
interpreted = Interpreted(__name__, TritonConfig(*_SMALL, fast_sigmoid=False))
"""The same kernels on the host, with tiles for small arrays: platform `triton-interpret`."""
