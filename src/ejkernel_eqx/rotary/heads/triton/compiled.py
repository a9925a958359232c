"""Platform `triton`: the host side. Configurations, support, and the launch."""

import dataclasses

from ....core import Named
from ....core.by_example import by_example, gradients_by
from ....core.platforms import Interpreted, kernels_unavailable
from ....dispatch import DeviceFacts, FORWARD, Problem
from ....launch import Launcher, result_like
from ....launch.fields import Checked, Power, Warps
from ....launch.sizes import cdiv, padded
from .. import xla
from ..spec import HeadsArrays, HeadsSpec
from . import kernel

OPAQUE = True
PARTS = {"tile": FORWARD}
MAX_FEATURES = 1024


@dataclasses.dataclass(frozen=True)
class HeadsTile(Checked):
    """A program rotates `block_h` heads of a token."""

    block_h: Power
    num_warps: Warps


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    tile: HeadsTile


config_type = TritonConfig
unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if problem.dtype("q") == "float64":
        return "takes float32, float16 and bfloat16, not float64"
    if problem.dim("D") > MAX_FEATURES:
        return f"takes heads of up to {MAX_FEATURES} features, not {problem.dim('D')}"
    return None


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first."""
    most = padded(problem.dim("Hq"), 1)
    sizes = ((1, 1), (4, 1), (8, 4)) if problem.dim("B") * problem.dim("T") <= 64 else ((8, 4), (4, 1))
    return list(dict.fromkeys(TritonConfig(HeadsTile(min(h, most), warps)) for h, warps in sizes))


def forward(arrays: HeadsArrays, spec: HeadsSpec, config: TritonConfig, *, save: bool = True) -> Named:
    """Rotated queries and keys. The backward needs the arguments only."""
    return by_example(lambda arrays: _forward(arrays, spec, config), arrays, {"q_norm": 1, "k_norm": 1})


def _forward(arrays: HeadsArrays, spec: HeadsSpec, config: TritonConfig) -> Named:
    (batch, tokens, queries, features), keys, pairs = arrays.q.shape, arrays.k.shape[-2], arrays.cos.shape[-1]
    numbers = {
        "T": batch * tokens,
        "HQ": queries,
        "HK": keys,
        "D": features,
        "R": pairs,
        "INTERLEAVED": spec.interleaved,
        "NORM": spec.eps is not None,
        "Q_WEIGHT": arrays.q_norm is not None,
        "K_WEIGHT": arrays.k_norm is not None,
        "EPS": spec.eps or 0.0,
        "BLOCK_R": padded(pairs, 1),
        "BLOCK_P": padded(features - 2 * pairs, 1),
    }
    launch = Launcher("rotary", arrays._asdict(), numbers, arrays.q)
    groups = cdiv(queries, config.tile.block_h) + cdiv(keys, config.tile.block_h)
    outputs = {"out": result_like(arrays.q), "k_out": result_like(arrays.k)}
    return launch(kernel.heads_kernel, config.tile, outputs, batch * tokens * groups)


# By XLA.
backward = gradients_by(xla.apply)


interpreted = Interpreted(__name__, TritonConfig(HeadsTile(2, 4)))
"""The same kernels on the host, with tiles for small arrays: platform `triton-interpret`."""
