"""Platform `triton`: the host side. Configurations, support, and the launches of forward and backward."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...core.platforms import kernels_unavailable
from ...dispatch import BOTH, DeviceFacts, FORWARD, Problem
from ...launch import Launch, run
from ..spec import NormArrays, NormSpec
from . import kernels

OPAQUE = True
PARTS = {"forward": FORWARD, "backward": BOTH}
"""The fields of a configuration that are tuned one after the other, and whether the forward pass alone decides."""
MAX_FEATURES = 16384
_GATES = {"silu": 1, "sigmoid": 2}


@dataclasses.dataclass(frozen=True)
class NormTile:
    """A program takes `block_m` rows (a power of two); the backward `turns` times, of which it loads `num_stages` at once."""

    block_m: int
    num_warps: int
    turns: int = 1
    num_stages: int = 1

    def __post_init__(self):
        if not isinstance(self.block_m, int) or self.block_m < 1 or self.block_m & (self.block_m - 1):
            raise ValueError(f"NormTile.block_m: expected a power of two, received {self.block_m!r}.")
        counts = (self.turns, self.num_stages)
        if self.num_warps not in (1, 2, 4, 8, 16) or any(not isinstance(n, int) or n < 1 for n in counts):
            raise ValueError(
                f"NormTile: expected num_warps 1, 2, 4, 8 or 16 and turns and num_stages from 1, received {self.num_warps!r} and {counts}."
            )


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    forward: NormTile
    backward: NormTile
    fast_sigmoid: bool = True
    """The gate by NVIDIA's approximate instructions (error 2e-7)."""


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


# Elements of a forward program and of one of its threads; of the backward the elements of a thread (and of a program, where a row is
# narrow), how many turns' loads are under way, and programs a multiprocessor. Best first, as measured on an H200.
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
    sizes = _NARROW if _padded(problem.dim("F")) <= 1024 else _WIDE
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
    width = _padded(problem.dim("F"))
    first, second = (max(1, elements // width) for elements in (forward, backward))
    rows = problem.dim("B") * problem.dim("M") * problem.dim("G")
    turns = rows // (second * programs * max(device.num_multiprocessors, 1))
    turns = max(1, min(turns, math.ceil(problem.dim("M") / second)))
    # What is loaded ahead of its turn waits in shared memory: at most two fifths of it.
    loads = 3 * second * width * (4 if problem.dtype("x") == "float32" else 2)
    ahead_of = min(stages, turns, 1 + 2 * (device.shared_memory or 49_152) // (5 * loads))
    return TritonConfig(
        NormTile(first, _warps(first * width, ahead)),
        NormTile(second, _warps(second * width, each), turns, max(1, ahead_of)),
        fast_sigmoid=device.vendor == "nvidia",
    )


def _warps(elements: int, each: int) -> int:
    return max(1, min(16, elements // (32 * each)))


def _padded(features: int) -> int:
    return 1 << max(features - 1, 0).bit_length()


Execute = Callable[[Launch, dict[str, Array]], dict[str, Array]]


def forward(
    arrays: NormArrays, spec: NormSpec, config: TritonConfig, *, save: bool = True, execute: Execute = run
) -> dict[str, Array]:
    """The results; nothing is saved."""
    tile, (batch, rows, groups, _) = config.forward, arrays.x.shape
    total = batch * rows * groups
    results = execute(
        *_launch(
            kernels.forward_kernel,
            arrays,
            spec,
            config,
            tile,
            inputs=_inputs(arrays),
            outputs={"out_ptr": jax.ShapeDtypeStruct(arrays.x.shape, arrays.x.dtype)},
            scalars={"rows": total, "M": rows},
            programs=math.ceil(total / tile.block_m),
        )
    )
    return {"out": results["out_ptr"]}


def backward(
    arrays: NormArrays,
    spec: NormSpec,
    config: TritonConfig,
    saved: dict[str, Array],
    cotangents: dict[str, Array],
    *,
    execute: Execute = run,
) -> dict[str, Array]:
    """All gradients; that of the weight of each batch row, summed in one order."""
    tile, (batch, rows, groups, features) = config.backward, arrays.x.shape
    chunks = math.ceil(rows / (tile.block_m * tile.turns))
    z, weight = arrays.z, arrays.weight
    nothing = jax.ShapeDtypeStruct((1,), jnp.float32)
    shares = jax.ShapeDtypeStruct((batch, chunks, groups, features), jnp.float32)
    results = execute(
        *_launch(
            kernels.backward_kernel,
            arrays,
            spec,
            config,
            tile,
            inputs=_inputs(arrays) | {"dout_ptr": cotangents["out"]},
            outputs={
                "dx_ptr": jax.ShapeDtypeStruct(arrays.x.shape, arrays.x.dtype),
                "dz_ptr": nothing if z is None else jax.ShapeDtypeStruct(z.shape, z.dtype),
                "partial_ptr": nothing if weight is None else shares,
            },
            scalars={"M": rows},
            programs=groups * chunks * batch,
            TURNS=tile.turns,
            STAGES=tile.num_stages,
        )
    )
    grads = {"x": results["dx_ptr"]}
    if z is not None:
        grads["z"] = results["dz_ptr"]
    if weight is not None:
        grads["weight"] = results["partial_ptr"].sum(1)
    return grads


def _inputs(arrays: NormArrays) -> dict[str, Array]:
    """What a call does not have is never read: the rows stand in for it."""
    x = arrays.x
    return {
        "x_ptr": x,
        "z_ptr": x if arrays.z is None else arrays.z,
        "weight_ptr": x if arrays.weight is None else arrays.weight,
    }


def _launch(
    kernel: Any,
    arrays: NormArrays,
    spec: NormSpec,
    config: TritonConfig,
    tile: NormTile,
    *,
    inputs: dict[str, Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    scalars: dict[str, int],
    programs: int,
    **constants: Any,
) -> tuple[Launch, dict[str, Array]]:
    groups, features = arrays.x.shape[-2:]
    launch = Launch(
        kernel=kernel,
        inputs={name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in inputs.items()},
        outputs=outputs,
        scalars=scalars,
        constants={
            "G": groups,
            "F": features,
            "EPS": spec.eps,
            "GATE": 0 if arrays.z is None else _GATES[spec.activation],
            "NORM_FIRST": spec.norm_before_gate,
            "WEIGHT": arrays.weight is not None,
            "MAPPED": arrays.weight is not None and arrays.weight.ndim == 3,
            "FAST": config.fast_sigmoid,
            "BM": tile.block_m,
            "BF": _padded(features),
            **constants,
        },
        grid=(programs,),
        num_warps=tile.num_warps,
        name=f"ejkernel_eqx.normalization.{kernel.fn.__name__}",
    )
    return launch, inputs
