"""Platform `triton`: the host side. Configurations, support, and the launches of forward and backward."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from ..._take import take_along
from ...core import Named
from ...core.platforms import Interpreted, kernels_unavailable
from ...dispatch import BOTH, DeviceFacts, FORWARD, Problem
from ...launch import given, Launcher, result, result_like
from ...launch.fields import Checked, Power, Warps
from ...launch.sizes import cdiv, padded
from ..spec import as_called, ConvArrays, ConvSpec, merged, merged_results
from ..xla import entering, final_state, take_rows, valid
from . import kernels

OPAQUE = True
PARTS = {"forward": FORWARD, "backward": BOTH}
"""The fields of a configuration that are tuned one after the other, and whether only the forward pass is timed."""
MAX_WIDTH = 8


@dataclasses.dataclass(frozen=True)
class ConvTile(Checked):
    """A program's tile: `lanes` runs of `steps` tokens, `unroll` of which are loaded together, by `block_c` channels; all powers of two."""

    steps: Power
    unroll: Power
    lanes: Power
    block_c: Power
    num_warps: Warps

    def __post_init__(self):
        super().__post_init__()
        if self.unroll > self.steps:
            raise ValueError(f"ConvTile: expected unroll <= steps, received {self.unroll} > {self.steps}.")


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    forward: ConvTile
    backward: ConvTile
    fast_sigmoid: bool = True
    """Whether the activation uses NVIDIA's approximate instructions (error 2e-7)."""


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
    pairs = ([_fitted(ConvTile(*size), problem, device) for size in sizes] for sizes in zip(*_TILES))
    fast = device.vendor == "nvidia"
    return list(dict.fromkeys(TritonConfig(*pair, fast_sigmoid=fast) for pair in pairs))


def _fitted(tile: ConvTile, problem: Problem, device: DeviceFacts) -> ConvTile:
    """The tile with at most the existing channels, using more lanes instead, and with runs short enough for four programs per multiprocessor."""
    spare = max(1, tile.block_c // padded(problem.dim("C")))
    tile = dataclasses.replace(tile, block_c=tile.block_c // spare, lanes=tile.lanes * spare)

    def programs(steps: int) -> int:
        runs = cdiv(problem.dim("T"), steps * tile.lanes)
        return problem.dim("B") * runs * cdiv(problem.dim("C"), tile.block_c)

    steps = tile.steps
    # Shorter runs give more programs, but one may not be shorter than what it loads at once.
    while steps > max(tile.unroll, 8) and programs(steps) < 4 * device.num_multiprocessors:
        steps //= 2
    return dataclasses.replace(tile, steps=steps)


def forward(arrays: ConvArrays, spec: ConvSpec, config: TritonConfig, *, save: bool = True) -> Named:
    """The results; nothing is saved."""
    arrays, tile = merged(arrays, spec), _with_heads(config.forward, spec)
    launch, programs = _launcher(_alike(arrays), spec, tile, config.fast_sigmoid)
    results = launch(kernels.forward_kernel, tile, {"out": result_like(arrays.x)}, programs)
    return as_called(results | {"final_state": final_state(arrays)}, spec)


def backward(
    arrays: ConvArrays, spec: ConvSpec, config: TritonConfig, saved: Named, cotangents: Named
) -> Named:
    """All gradients; those of weight and bias are per batch row and summed in a fixed order."""
    arrays, tile = _alike(merged(arrays, spec)), _with_heads(config.backward, spec)
    cotangents = merged_results(cotangents, spec)
    launch, programs = _launcher(arrays, spec, tile, config.fast_sigmoid)
    batch, length, channels = arrays.x.shape
    width = arrays.weight.shape[-1]
    dout, dfinal = cotangents["out"], cotangents["final_state"]
    # Each program writes sums of its own, so that gradients need no atomics and repeat exactly.
    runs = cdiv(length, tile.lanes * tile.steps)
    outputs = {"dx": result_like(arrays.x), "partial": result(batch, runs, width + 1, channels)}
    results = launch(kernels.backward_kernel, tile, outputs, programs, {"dout": dout, "dfinal": dfinal})
    sums = results["partial"].sum(1)  # [B, W + 1, C]
    grads = {"x": results["dx"], "weight": jnp.swapaxes(sums[:, :width], 1, 2)}
    if arrays.bias is not None:
        grads["bias"] = sums[:, width]
    if arrays.initial_state is not None:
        grads["initial_state"] = _initial_gradient(arrays, spec, dout, dfinal)
    return as_called(grads, spec)


def _with_heads(tile: ConvTile, spec: ConvSpec) -> ConvTile:
    """The tile with at least the channels of a head."""
    return dataclasses.replace(tile, block_c=max(tile.block_c, spec.norm_size or 1))


def _initial_gradient(arrays: ConvArrays, spec: ConvSpec, dout: Array, dfinal: Array) -> Array:
    """The parts from the first `W - 1` tokens of each sequence, and from its final state if it has fewer: a few rows, in XLA."""
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
        flat = jnp.minimum(at, length - 1).reshape(at.shape[0], -1)
        tokens = flat if places is None else take_along(places.order, flat, -1)
        return jnp.where(real, take_rows(x, tokens).reshape(initial.shape).astype(jnp.float32), 0.0)

    weight, behind = arrays.weight.astype(jnp.float32), head(arrays.x)
    bias = None if arrays.bias is None else arrays.bias.astype(jnp.float32)
    mapped = (0, None if bias is None else 0) if weight.ndim == 3 else (None, None)

    def outputs(initial: Array) -> Array:
        def of_row(initial: Array, behind: Array, weight: Array, bias: Array | None) -> Array:
            return valid(jnp.concatenate([initial, behind], -2), weight, bias, spec)

        return jax.vmap(of_row, in_axes=(0, 0, *mapped))(initial, behind, weight, bias)

    (grad,) = jax.vjp(outputs, initial.astype(jnp.float32))[1](head(dout))
    # The part of the initial state that remains in the final one has moved up by the length.
    size = enter_end - enter_first
    stays = (enter_first == first) & (enter_end == end) & (near >= size)
    moved = jnp.take_along_axis(dfinal, jnp.maximum(near - size, 0)[..., None], -2).astype(jnp.float32)
    return grad + jnp.where(stays[..., None], moved, 0.0)


def _alike(arrays: ConvArrays) -> ConvArrays:
    """Weight and bias, both with a leading axis or both without."""
    weight, bias, batch = arrays.weight, arrays.bias, arrays.x.shape[0]
    if bias is None or weight.ndim == bias.ndim + 1:
        return arrays
    if weight.ndim == 3:
        return arrays._replace(bias=jnp.broadcast_to(bias, (batch, *bias.shape)))
    return arrays._replace(weight=jnp.broadcast_to(weight, (batch, *weight.shape)))


def _launcher(arrays: ConvArrays, spec: ConvSpec, tile: ConvTile, fast: bool) -> tuple[Launcher, int]:
    """The arguments that the kernels of one call share, and the number of programs of each."""
    batch, length, channels = arrays.x.shape
    numbers = {
        "T": length,
        "N": 1 if arrays.spans is None else arrays.spans.shape[1],
        "C": channels,
        "WIDTH": arrays.weight.shape[-1],
        "SILU": spec.activation == "silu",
        "NORM": spec.norm_size or 0,
        "MAPPED": arrays.weight.ndim == 3,
        "FAST": fast,
        **given(BIAS=arrays.bias, INITIAL=arrays.initial_state, PACKED=arrays.order),
    }
    launcher = Launcher(
        "convolution", arrays._asdict() | {"initial": arrays.initial_state}, numbers, arrays.x
    )
    programs = cdiv(channels, tile.block_c) * cdiv(length, tile.lanes * tile.steps) * batch
    return launcher, programs


_SMALL = ConvTile(4, 2, 2, 16, 4), ConvTile(4, 4, 2, 16, 4)
interpreted = Interpreted(__name__, TritonConfig(*_SMALL, fast_sigmoid=False))
"""The same kernels on the host, with tiles for small arrays: platform `triton-interpret`."""
