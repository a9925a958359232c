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
from ..spec import ConvArrays, ConvSpec
from ..xla import entering, final_state, take_rows, valid
from . import kernels

OPAQUE = True
PARTS = {"forward": FORWARD, "backward": BOTH}
"""The fields of a configuration that are tuned one after the other, and whether the forward pass alone decides."""
MAX_WIDTH = 8


@dataclasses.dataclass(frozen=True)
class ConvTile:
    """A program's tile: `lanes` runs of `steps` tokens, `unroll` of which are loaded together, by `block_c` channels; all powers of two."""

    steps: int
    unroll: int
    lanes: int
    block_c: int
    num_warps: int

    def __post_init__(self):
        for name in ("steps", "unroll", "lanes", "block_c", "num_warps"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1 or size & (size - 1):
                raise ValueError(f"ConvTile.{name}: expected a power of two, received {size!r}.")
        if self.unroll > self.steps or self.num_warps > 16:
            raise ValueError(
                f"ConvTile: expected unroll <= steps and num_warps <= 16, received {self.unroll} > {self.steps} or {self.num_warps}."
            )


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    forward: ConvTile
    backward: ConvTile
    fast_sigmoid: bool = True
    """The activation by NVIDIA's approximate instructions (error 2e-7)."""


config_type = TritonConfig
unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if "float64" in (problem.dtype("x"), problem.dtype("weight")):
        return "takes float32, float16 and bfloat16, not float64"
    if problem.dim("W") > MAX_WIDTH:
        return f"takes widths up to {MAX_WIDTH}, not {problem.dim('W')}"
    return None


# The backward as measured on an H200, best first.
_TILES = (
    ((16, 8, 4, 128, 4), (32, 8, 4, 128, 4), (16, 8, 8, 128, 8), (32, 8, 8, 64, 4), (16, 16, 4, 128, 4), (8, 4, 8, 128, 4)),
    ((128, 4, 4, 128, 4), (64, 4, 2, 128, 2), (64, 4, 4, 128, 4), (64, 8, 4, 128, 4), (256, 4, 4, 128, 4), (64, 4, 8, 64, 4)),
)  # fmt: skip


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first."""
    tiles = (tuple(_fitted(ConvTile(*size), problem, device) for size in sizes) for sizes in _TILES)
    fast = device.vendor == "nvidia"
    forward, backward = tiles
    pairs = zip(forward, backward, strict=True)
    return list(dict.fromkeys(TritonConfig(first, second, fast) for first, second in pairs))


def _fitted(tile: ConvTile, problem: Problem, device: DeviceFacts) -> ConvTile:
    """No more channels than there are: lanes instead. Runs no longer than leave four programs a multiprocessor."""
    channels = max(16, 1 << (problem.dim("C") - 1).bit_length())
    spare = max(1, tile.block_c // channels)
    tile = dataclasses.replace(tile, block_c=tile.block_c // spare, lanes=tile.lanes * spare)

    def programs(steps: int) -> int:
        runs = math.ceil(problem.dim("T") / (steps * tile.lanes))
        return problem.dim("B") * runs * math.ceil(problem.dim("C") / tile.block_c)

    steps = tile.steps
    while steps > max(tile.unroll, 8) and programs(steps) < 4 * device.num_multiprocessors:
        steps //= 2
    return dataclasses.replace(tile, steps=steps)


Execute = Callable[[Launch, dict[str, Array]], dict[str, Array]]


def forward(
    arrays: ConvArrays, spec: ConvSpec, config: TritonConfig, *, save: bool = True, execute: Execute = run
) -> dict[str, Array]:
    """The results; nothing is saved."""
    call = _Call(_alike(arrays), spec, config.forward, config.fast_sigmoid, execute)
    outputs = {"out_ptr": jax.ShapeDtypeStruct(arrays.x.shape, arrays.x.dtype)}
    results = call(kernels.forward_kernel, call.inputs(), outputs)
    return {"out": results["out_ptr"], "final_state": final_state(arrays)}


def backward(
    arrays: ConvArrays,
    spec: ConvSpec,
    config: TritonConfig,
    saved: dict[str, Array],
    cotangents: dict[str, Array],
    *,
    execute: Execute = run,
) -> dict[str, Array]:
    """All gradients; those of weight and bias of each batch row, summed in one order."""
    arrays = _alike(arrays)
    call = _Call(arrays, spec, config.backward, config.fast_sigmoid, execute)
    batch, _, channels = arrays.x.shape
    width = arrays.weight.shape[-1]
    dout, dfinal = cotangents["out"], cotangents["final_state"]
    inputs = call.inputs() | {"leave_ptr": call.given("leave"), "dout_ptr": dout, "dfinal_ptr": dfinal}
    outputs = {
        "dx_ptr": jax.ShapeDtypeStruct(arrays.x.shape, arrays.x.dtype),
        "partial_ptr": jax.ShapeDtypeStruct((batch, call.runs, width + 1, channels), jnp.float32),
    }
    results = call(kernels.backward_kernel, inputs, outputs)
    sums = results["partial_ptr"].sum(1)  # [B, W + 1, C]
    grads = {"x": results["dx_ptr"], "weight": jnp.swapaxes(sums[:, :width], 1, 2)}
    if arrays.bias is not None:
        grads["bias"] = sums[:, width]
    if arrays.initial_state is not None:
        grads["initial_state"] = _initial_gradient(arrays, spec, dout, dfinal)
    return grads


def _initial_gradient(arrays: ConvArrays, spec: ConvSpec, dout: Array, dfinal: Array) -> Array:
    """From the first `W - 1` tokens of each sequence, and from its final state where it has fewer: a few rows, in XLA."""
    initial, places = entering(arrays), arrays.places
    held, length = initial.shape[-2], arrays.x.shape[-2]
    if held == 0:
        return initial
    near = jnp.arange(held, dtype=jnp.int32)[None, None]
    if places is None:
        spans = jnp.broadcast_to(jnp.array([0, length, 0, length], jnp.int32), (*initial.shape[:2], 4))
    else:
        spans = places.spans
    enter_first, enter_end, first, end = (spans[..., i : i + 1] for i in range(4))
    at = enter_first + near  # [B, N, K]
    real = (at < enter_end)[..., None]

    def head(x: Array) -> Array:
        if length == 0:
            return jnp.zeros(initial.shape, jnp.float32)
        flat = jnp.minimum(at, length - 1).reshape(at.shape[0], -1)
        tokens = flat if places is None else jnp.take_along_axis(places.order, flat, -1)
        return jnp.where(real, take_rows(x, tokens).reshape(initial.shape).astype(jnp.float32), 0.0)

    weight, behind = arrays.weight.astype(jnp.float32), head(arrays.x)
    bias = None if arrays.bias is None else arrays.bias.astype(jnp.float32)
    mapped = (0, None if bias is None else 0) if weight.ndim == 3 else (None, None)

    def outputs(initial: Array) -> Array:
        def of_row(initial: Array, behind: Array, weight: Array, bias: Array | None) -> Array:
            return valid(jnp.concatenate([initial, behind], -2), weight, bias, spec)

        return jax.vmap(of_row, in_axes=(0, 0, *mapped))(initial, behind, weight, bias)

    (grad,) = jax.vjp(outputs, initial.astype(jnp.float32))[1](head(dout))
    # What is left of the state in the final one has moved up by the length.
    size = enter_end - enter_first
    stays = (enter_first == first) & (enter_end == end) & (near >= size)
    moved = jnp.take_along_axis(dfinal, jnp.maximum(near - size, 0)[..., None], -2).astype(jnp.float32)
    return grad + jnp.where(stays[..., None], moved, 0.0)


def _alike(arrays: ConvArrays) -> ConvArrays:
    """Weight and bias both with a leading axis, or both without."""
    weight, bias, batch = arrays.weight, arrays.bias, arrays.x.shape[0]
    if bias is None or weight.ndim == bias.ndim + 1:
        return arrays
    if weight.ndim == 3:
        return arrays._replace(bias=jnp.broadcast_to(bias, (batch, *bias.shape)))
    return arrays._replace(weight=jnp.broadcast_to(weight, (batch, *weight.shape)))


@dataclasses.dataclass(frozen=True)
class _Call:
    """Launches the kernels of one call: fills in what they share."""

    arrays: ConvArrays
    spec: ConvSpec
    tile: ConvTile
    fast: bool
    execute: Execute

    @property
    def runs(self) -> int:
        return math.ceil(self.arrays.x.shape[1] / (self.tile.lanes * self.tile.steps))

    def given(self, name: str) -> Array:
        """What a call does not have is never read: the tokens stand in for it."""
        x = getattr(self.arrays, name)
        return self.arrays.x if x is None else x

    def inputs(self) -> dict[str, Array]:
        names = {"initial_ptr": "initial_state"}
        names |= {f"{name}_ptr": name for name in ("x", "weight", "bias", "order", "first", "enter")}
        return {name: self.given(field) for name, field in names.items()}

    def __call__(
        self, kernel: Any, inputs: dict[str, Array], outputs: dict[str, jax.ShapeDtypeStruct]
    ) -> dict[str, Array]:
        arrays, tile = self.arrays, self.tile
        batch, length, channels = arrays.x.shape
        launch = Launch(
            kernel=kernel,
            inputs={name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in inputs.items()},
            outputs=outputs,
            scalars={"T": length, "N": 1 if arrays.spans is None else arrays.spans.shape[1]},
            constants={
                "C": channels,
                "WIDTH": arrays.weight.shape[-1],
                "BIAS": arrays.bias is not None,
                "SILU": self.spec.activation == "silu",
                "INITIAL": arrays.initial_state is not None,
                "PACKED": arrays.order is not None,
                "MAPPED": arrays.weight.ndim == 3,
                "FAST": self.fast,
                "LANES": tile.lanes,
                "STEPS": tile.steps,
                "UNROLL": tile.unroll,
                "BLOCK_C": tile.block_c,
            },
            grid=(math.ceil(channels / tile.block_c) * self.runs * batch,),
            num_warps=tile.num_warps,
            name=f"ejkernel_eqx.convolution.{kernel.fn.__name__}",
        )
        return self.execute(launch, inputs)
