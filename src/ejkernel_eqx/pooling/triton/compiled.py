"""Platform `triton`: the host side. Configurations, support, and the launches of forward and backward."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...core import Named
from ...core.platforms import Interpreted, kernels_unavailable
from ...dispatch import BOTH, DeviceFacts, FORWARD, Problem
from ...launch import Launcher, NOTHING, result, result_like
from ...launch.fields import Checked, Power, Warps
from ...launch.sizes import cdiv, padded
from ..spec import last_tokens, longest, num_segments, PoolArrays, PoolSpec
from ..tables import pieces_of
from ..xla import normalised, rows_at
from . import kernels

OPAQUE = True
PARTS = {"forward": FORWARD, "backward": BOTH}
"""The fields of a configuration that are tuned one after the other, and whether only the forward pass is timed."""
_REDUCTIONS = {"sum": 0, "mean": 1, "max": 2, "last": 3}
_WHOLE, _RANGES, _PARTS = range(3)


@dataclasses.dataclass(frozen=True)
class ReadTile(Checked):
    """A program reduces up to `span` tokens of `block_c` channels, `block_t` tokens at a time; all powers of two."""

    block_t: Power
    block_c: Power
    span: Power
    num_warps: Warps

    def __post_init__(self):
        super().__post_init__()
        if self.span < self.block_t:
            raise ValueError(f"ReadTile: expected block_t <= span, received {self.block_t} > {self.span}.")


@dataclasses.dataclass(frozen=True)
class WriteTile(Checked):
    """A program writes the gradients of `block_t` tokens by `block_c` channels, both powers of two."""

    block_t: Power
    block_c: Power
    num_warps: Warps


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    forward: ReadTile
    backward: WriteTile


config_type = TritonConfig
unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if problem.dtype("x") == "float64":
        return "takes float32, float16 and bfloat16, not float64"
    return None


# Bytes of a tile that a thread holds, warps, turns of a program over long segments; bytes of a written tile a thread, channels. Best first. A
# warp has 16 bytes of every channel block a thread, so that no sum crosses warps: on an H200, crossing four doubles the time of short chunks.
_TILES = (
    (64, 1, 8, 128, 256),
    (128, 1, 8, 64, 512),
    (128, 4, 4, 64, 256),
    (64, 4, 8, 128, 512),
    (128, 2, 4, 128, 1024),
    (64, 2, 8, 128, 128),
    (256, 1, 4, 64, 1024),
)
_WARPS = 4


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first."""
    return list(dict.fromkeys(_config(problem, device, *sizes) for sizes in _TILES))


def _config(
    problem: Problem, device: DeviceFacts, read: int, warps: int, turns: int, written: int, width: int
) -> TritonConfig:
    itemsize, channels = jnp.dtype(problem.dtype("x")).itemsize, padded(problem.dim("C"), 1)
    most, packed = problem.dim("L"), bool(problem.flag("packed"))
    # The largest values are kept with their tokens: twice the registers. On AMD masks take scalar registers too.
    is_max = problem.flag("reduction") == "max"
    held = read // (4 if device.vendor == "amd" else 2) if is_max else read
    block_c = min(channels, 32 * warps * 16 // itemsize)
    block_t = max(1, min(32 * warps * held // itemsize // block_c, padded(most, 1), 128))
    # Tokens with segments of their own read as much as they write.
    written = written // 2 if packed or problem.flag("masked") or most < 16 else written
    backward = _tile(32 * _WARPS * written // itemsize, width, channels, most)
    # Long segments are shared by programs, so that there are four waves of 32 warps a multiprocessor, but parts stay few.
    rows = problem.dim("B") * cdiv(problem.dim("C"), block_c) * problem.dim("T")
    span, enough = max(64, block_t * turns), 128 // warps * max(device.num_multiprocessors, 1)
    while span > max(block_t, 64) and rows < span * enough:
        span //= 2
    if not packed or problem.flag("chunked"):
        while rows >= 2 * span * enough and span < most:
            span *= 2
        span = max(block_t, min(span, padded(most, 1)))
    return TritonConfig(
        ReadTile(block_t, block_c, span, _warps(block_t * block_c, held // itemsize, warps)),
        WriteTile(*backward, _warps(backward[0] * backward[1], written // itemsize)),
    )


def _tile(elements: int, width: int, channels: int, most: int) -> tuple[int, int]:
    """Tokens and channels of a written tile of at most so many elements, with no more tokens than a segment has and more channels instead."""
    width = min(channels, max(width, min(elements // padded(most, 1), 2048)))
    return max(1, min(elements // width, padded(most, 1), 128)), width


def _warps(elements: int, each: int, most: int = _WARPS) -> int:
    return max(1, min(most, elements // (32 * max(each, 1))))


def forward(arrays: PoolArrays, spec: PoolSpec, config: TritonConfig, *, save: bool = True) -> Named:
    """The results; for the gradient of a maximum also the token of each, for that of a norm the results before it."""
    needs_tokens = save and spec.reduction == "max"
    if spec.reduction == "last":
        results = {"out": rows_at(arrays.x, last_tokens(arrays, spec)).astype(jnp.float32)}
    else:
        results = _reduced(arrays, spec, config.forward, needs_tokens)
    saved = {"arg": results["arg"]} if needs_tokens else {}
    if spec.normalize and save:
        saved["pooled"] = results["out"]
    return {"out": normalised(results["out"], spec).astype(arrays.x.dtype), **saved}


def backward(
    arrays: PoolArrays, spec: PoolSpec, config: TritonConfig, saved: Named, cotangents: Named
) -> Named:
    """The gradient of `x`."""
    dout, tile = cotangents["out"], config.backward
    if spec.normalize:
        _, pull = jax.vjp(lambda pooled: normalised(pooled, spec), saved["pooled"])
        (dout,) = pull(dout.astype(jnp.float32))
    batch, length, channels = arrays.x.shape
    segments, most = num_segments(arrays, spec), longest(arrays, spec)
    is_shared = arrays.segment is None and most >= tile.block_t
    tiles = segments * cdiv(most, tile.block_t) if is_shared else cdiv(length, tile.block_t)
    launch = _launcher(arrays, spec).knowing({"dout": dout, "arg": saved.get("arg")})
    programs = batch * tiles * cdiv(channels, tile.block_c)
    outputs = {"dx": result_like(arrays.x)}
    grads = launch(kernels.write_kernel, tile, outputs, programs, TILES=tiles, SHARED=is_shared)
    return {"x": grads["dx"]}


def _reduced(arrays: PoolArrays, spec: PoolSpec, tile: ReadTile, tokens: bool) -> Named:
    """The results `out [B, S, C]` before any norm and, if wanted, the token of each maximum, `arg`."""
    batch, length, channels = arrays.x.shape
    segments, blocks = num_segments(arrays, spec), cdiv(channels, tile.block_c)
    launch = _launcher(arrays, spec).knowing({}, ARG=tokens)
    wide = jnp.float32 if spec.normalize else arrays.x.dtype

    def outputs(count: int, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        arg = result(batch, count, channels, dtype=jnp.int32) if tokens else NOTHING
        return {"out": result(batch, count, channels, dtype=dtype), "arg": arg}

    if arrays.begin is not None and arrays.end is not None and spec.chunk is None:
        parts = pieces_of(arrays.begin, arrays.end, length, tile.span)._asdict()
        pieces, per, table = parts["owner"].shape[1], 0, _PARTS
    else:
        per = cdiv(longest(arrays, spec), tile.span)
        pieces, table, parts = segments * per, _WHOLE if arrays.begin is None else _RANGES, {}
    launch = launch.knowing(parts, PIECES=pieces, PER=per, TABLE=table)
    is_final, programs = per == 1, batch * pieces * blocks
    dtype = wide if is_final else jnp.float32
    results = launch(kernels.read_kernel, tile, outputs(pieces, dtype), programs, FINAL=is_final)
    if is_final:
        return results
    part = {"part": results["out"], "token": results["arg"]}
    combine = _combining(per or cdiv(pieces, segments), channels)
    programs = batch * segments * cdiv(channels, combine.block_c)
    return launch(kernels.combine_kernel, combine, outputs(segments, wide), programs, part)


def _combining(parts: int, channels: int) -> WriteTile:
    """The tile for segments of about so many parts: of many, few channels, so that programs are many and short."""
    rows = min(64, padded(parts, 1))
    width = min(256, 2048 // rows, padded(channels, 1))
    return WriteTile(rows, width, _warps(rows * width, 16))


def _launcher(arrays: PoolArrays, spec: PoolSpec) -> Launcher:
    """The arguments that the kernels of one call share."""
    numbers = {
        "T": arrays.x.shape[1],
        "S": num_segments(arrays, spec),
        "L": longest(arrays, spec),
        "C": arrays.x.shape[2],
        "REDUCTION": _REDUCTIONS[spec.reduction],
        "HOLES": spec.holes,
        "ORDERED": arrays.order is not None,
        "COUNTED": arrays.segment is not None,
    }
    absent = dict.fromkeys(("owner", "first", "number"))
    return Launcher("pooling", arrays._asdict() | absent, numbers, arrays.x)


interpreted = Interpreted(__name__, TritonConfig(ReadTile(2, 16, 4, 4), WriteTile(4, 16, 4)))
"""The same kernels on the host, with tiles for small arrays: platform `triton-interpret`."""
