"""Platform `triton`: the host side. Configurations, support, and the launches of forward, backward and step."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...core.platforms import kernels_unavailable
from ...dispatch import DeviceFacts, Problem
from ...launch import (
    given,
    Launcher,
    limits_registers,
    LOG2E,
    Options,
    register_limits_measured,
    result,
    result_like,
)
from ...launch.fields import check_fields, Count, power_of_two, Registers, Warps, whole
from ...launch.sizes import cdiv, padded
from ..chunks import chunk_table
from ..spec import PART, parts_of, ScanArrays, ScanSpec, StepArrays
from . import backward_kernels, forward_kernels, step_kernel

OPAQUE = True
PARTS = {"forward": "forward", "backward": "forward+backward"}
MAX_STATE = 256
_MOST_SPLITS = 32
_LANES = 32  # of a warp
_STEP = step_kernel.StepTile(128, 4)
_KEPT = 16  # states of a channel that stay in registers
_COMBINED = 128  # channels of a program that combines splits
_MULTIPROCESSORS = 132  # for a device that does not report its number


@dataclasses.dataclass(frozen=True)
class ScanTile:
    """One direction's programs: `block_i` channels each (a power of two), a sequence split into as many parts as keep them within `programs`."""

    block_i: Annotated[int, power_of_two(most=PART)]
    num_warps: Warps
    programs: Count
    unroll: Annotated[int, whole(1, 256)] = 1
    """Number of states of a channel that are processed side by side (one after another in the backward's main kernel). If it covers all of
    them, rounded up to a power of two, they stay in registers between chunks."""
    max_registers: Registers = 0
    summary_registers: Registers = 0
    """`max_registers` of the kernel that computes the effect of each split on a state; 0 for the same number."""
    prefetch: Annotated[int, whole(0, 2)] = 0
    """The arrays that a program prefetches at the start of a chunk: 1 everything that comes from global memory, which is all per-channel inputs of
    each token and the states before a chunk; 2 also `B` and `C`, which programs share."""

    __post_init__ = check_fields


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """`chunk_size` tokens (a power of two) are in registers at once; the gradient keeps the state before each chunk."""

    chunk_size: Annotated[int, power_of_two(most=64)]
    forward: ScanTile
    backward: ScanTile
    step: step_kernel.StepTile

    __post_init__ = check_fields


config_type = TritonConfig
unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if "float64" in dict(problem.dtypes).values():
        return "takes float32, float16 and bfloat16, not float64"
    if problem.dim("N") > MAX_STATE:
        return f"takes up to {MAX_STATE} states per channel, not N {problem.dim('N')}"
    return None


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    block, base = _block(device), device.num_multiprocessors or _MULTIPROCESSORS
    states = problem.dim("N")
    if states > _KEPT:
        forward = backward = ScanTile(block, 1, 16 * base, 1 + (states % 2 == 0))
    else:
        forward, backward = _forward_tiles(block, base, device)[0], _backward_tiles(block, base)[0]
    return TritonConfig(16, forward, backward, _STEP)


def _block(device: DeviceFacts) -> int:
    """Channels of a warp, one per lane."""
    return 64 if device.vendor == "amd" else 32


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first. They vary how many warps run side by side, and how long each waits for memory."""
    heuristic, block = default_config(problem, device), _block(device)
    base = device.num_multiprocessors or _MULTIPROCESSORS
    if problem.dim("N") <= _KEPT:
        pairs = zip(_forward_tiles(block, base, device), _backward_tiles(block, base), strict=True)
    else:
        pairs = _in_turns(block, base, heuristic.forward.unroll)
    if device.vendor != "nvidia":
        pairs = ((_unlimited(first), _unlimited(second)) for first, second in pairs)
    tiles = dict.fromkeys([(heuristic.forward, heuristic.backward), *pairs])
    return [dataclasses.replace(heuristic, forward=first, backward=second) for first, second in tiles]


# For problems whose states of a channel all fit in registers, best first. Limits of 128, 144 and 168 let 16, 14 and 12 warps run on a
# multiprocessor.


def _unlimited(tile: ScanTile) -> ScanTile:
    return dataclasses.replace(tile, max_registers=0, summary_registers=0)


def _forward_tiles(block: int, base: int, device: DeviceFacts) -> list[ScanTile]:
    """Tiles of the forward. With all states in registers, the compiler by default uses few more registers and loads just before use; a limit makes it
    use as many as allowed."""
    limited = [
        *(ScanTile(block, 1, 12 * base, _KEPT, 168, 0, near) for near in (0, 2, 1)),
        *(ScanTile(block, 1, 16 * base, _KEPT, 128, 0, near) for near in (2, 0, 1)),
        # The warps of a program share their loads of `B` and `C`.
        ScanTile(2 * block, 2, 8 * base, _KEPT, 128),
    ]
    plain = [
        *(ScanTile(block, 1, 16 * base, 2, 0, 0, near) for near in (0, 2, 1)),
        *(ScanTile(block, 1, n * base, _KEPT) for n in (32, 16)),
    ]
    is_limited = limits_registers(device) and register_limits_measured(device)
    return limited + plain if is_limited else plain + limited


def _backward_tiles(block: int, base: int) -> list[ScanTile]:
    return [
        ScanTile(block, 1, 16 * base, 1, 0, 0, 2),
        *(ScanTile(block, 1, n * base, _KEPT, 0, 144, 2) for n in (8, 16, 24)),
        ScanTile(block, 1, 16 * base, _KEPT, 208, 144, 2),
        ScanTile(block, 1, 12 * base, _KEPT, 168, 144, 2),
        ScanTile(block, 1, 16 * base, _KEPT, 0, 128, 1),
        ScanTile(block, 1, 16 * base, _KEPT, 0, 144, 1),
        ScanTile(block, 1, 16 * base, 1, 0, 0, 1),
        *(ScanTile(block, 1, n * base, 1, 0, 0, 2) for n in (8, 24)),
        ScanTile(block, 1, 16 * base),
    ]


def _in_turns(block: int, base: int, turn: int) -> Iterator[tuple[ScanTile, ScanTile]]:
    """Tiles for problems whose states of a channel are processed a few at a time."""
    forward = [
        *(ScanTile(block, 1, n * base, turn) for n in (8, 32)),
        *(ScanTile(block, 1, n * base, 3 - turn) for n in (16, 20, 62)),
        ScanTile(2 * block, 2, 8 * base, turn),
        *(ScanTile(block, 1, 16 * base, turn, 0, 0, near) for near in (1, 2)),
        ScanTile(block, 1, 20 * base, turn, 96),
        ScanTile(block, 1, 16 * base, turn, 128),
    ]
    backward = [
        *(ScanTile(block, 1, n * base, turn) for n in (8, 32, 24)),
        *(ScanTile(block, 1, n * base, 1, 168) for n in (12, 24, 36)),
        *(ScanTile(block, 1, 16 * base, turn, 0, 0, near) for near in (1, 2)),
        ScanTile(block, 1, 16 * base, turn, 208, 0, 1),
        ScanTile(block, 1, 16 * base, 1),
    ]
    return zip(forward, backward, strict=True)


Arrays = dict[str, Array]


class _Chunks(NamedTuple):
    """The division of a call's sequences into chunks, of which every row of the batch has `count`.

    `bounds` `[sequences, 3]`: first row of tokens, the row after the last, first chunk. `rows` `[chunks, L]`: the row of each token of a
    chunk, past the end if there is none. Both are `None` without packed sequences, when all rows of the batch are split alike.
    """

    size: int
    batch: int
    count: int
    sequences: int
    bounds: Array | None = None
    rows: Array | None = None


def _chunks_of(arrays: ScanArrays, size: int) -> _Chunks:
    batch, length = arrays.x.shape[:2]
    if arrays.offsets is None:
        return _Chunks(size, batch, cdiv(length, size), batch)
    table = jax.vmap(lambda offsets: chunk_table(offsets, length, size))(arrays.offsets)
    rows, count = jnp.arange(batch, dtype=jnp.int32)[:, None], table.rows.shape[1]
    tokens = arrays.offsets + length * rows
    bounds = jnp.stack([tokens[:, :-1], tokens[:, 1:], table.first + count * rows], axis=-1)
    of_tokens = jnp.where(table.rows < length, table.rows + length * rows[..., None], batch * length)
    sequences = batch * (arrays.offsets.shape[-1] - 1)
    return _Chunks(size, batch, count, sequences, bounds.reshape((-1, 3)), of_tokens.reshape((-1, size)))


def _to_chunks(x: Array, chunks: _Chunks) -> Array:
    """`B` or `C` `[B, T, G, N]` as float32 `[G, chunks, N, L]`, zero past the tokens."""
    batch, length, groups, states = x.shape
    x = x.astype(jnp.float32)
    if chunks.rows is not None:
        x = x.reshape((batch * length, groups, states))
        x = x.at[chunks.rows].get(mode="fill", fill_value=0.0)
    else:
        x = jnp.pad(x, ((0, 0), (0, chunks.count * chunks.size - length), (0, 0), (0, 0)))
        x = x.reshape((batch * chunks.count, chunks.size, groups, states))
    return jnp.transpose(x, (2, 0, 3, 1))


def _from_chunks(x: Array, chunks: _Chunks, length: int) -> Array:
    """`[P, G, chunks, N, L]` as `[B, P, T, G, N]`."""
    parts, groups, _, states, size = x.shape
    x = jnp.transpose(x, (2, 4, 0, 1, 3))  # [chunks, L, P, G, N]
    if chunks.rows is not None:
        flat = jnp.zeros((chunks.batch * length, parts, groups, states), x.dtype)
        x = flat.at[chunks.rows].set(x, mode="drop").reshape((chunks.batch, length, parts, groups, states))
    else:
        x = x.reshape((chunks.batch, chunks.count * size, parts, groups, states))[:, :length]
    return jnp.moveaxis(x, 2, 1)


def forward(arrays: ScanArrays, spec: ScanSpec, config: TritonConfig, *, save: bool = True) -> Arrays:
    """`out`, `final_state`, and with `save` the `states [B, chunks, N, I]` before every chunk."""
    call = _Call(arrays, spec, config.chunk_size, config.forward)
    x, shape, initial = arrays.x, call.state_shape, call.launch.arrays["initial"]
    slots = call.chunks.batch * call.chunks.count if save else shape[0] * call.splits
    entering = call.entering(forward_kernels.summary_kernel, initial)
    outputs = {"out": result_like(x), "final": result(*shape), "states": result(slots, *shape[1:])}
    inputs, numbers = {"entering": entering}, {"ENTERS": entering is not None, "SAVE": save}
    kernel, programs = forward_kernels.forward_kernel, call.programs(call.splits)
    results = call.launch(kernel, call.options, outputs, programs, inputs, **numbers)
    out = {"out": results["out"], "final_state": call.state(results["final"], spec.state_dtype)}
    if save:
        out["states"] = results["states"].reshape((x.shape[0], -1, *shape[1:]))
    return out


def backward(
    arrays: ScanArrays,
    spec: ScanSpec,
    config: TritonConfig,
    saved: Arrays,
    cotangents: Arrays,
) -> Arrays:
    """The gradient of every float array; bitwise repeatable, as every sum has a fixed order."""
    call = _Call(arrays, spec, config.chunk_size, config.backward)
    x, shape, chunks = arrays.x, call.state_shape, call.chunks
    (batch, length, channels), groups = x.shape, arrays.B.shape[-2]
    dout = {"dout": cotangents["out"]}
    final = call.states_in(cotangents["final_state"])
    entering = call.entering(backward_kernels.backward_summary_kernel, final, dout, reverse=True)
    rows, blocks = shape[0] * call.splits, call.blocks // groups
    per_channel, per_state = result(rows, channels), result(rows, *shape[1:])
    projection = (groups, chunks.batch * chunks.count, shape[1], 2 * chunks.size)
    outputs = {
        "dx": result_like(x),
        "ddt": result_like(arrays.dt),
        "dz": result(1, dtype=x.dtype) if arrays.z is None else result_like(arrays.z),
        "dprojection": result(blocks, *projection),
        "dinitial": result(*shape),
        **dict.fromkeys(("dd", "dbias"), per_channel),
        **dict.fromkeys(("da", "carry"), per_state),
    }
    inputs = dout | {"states": saved["states"].reshape((-1, *shape[1:])), "entering": entering}
    kernel, programs = backward_kernels.backward_kernel, call.programs(call.splits)
    results = call.launch(kernel, call.options, outputs, programs, inputs)
    parts = parts_of(channels, groups)
    projections = results["dprojection"].reshape((parts, blocks // parts, *projection)).sum(1)
    size = chunks.size
    over_splits = lambda partial: partial.reshape((batch, -1, *partial.shape[1:])).sum(1)
    grads = {
        "x": results["dx"],
        "dt": results["ddt"],
        "A": jnp.swapaxes(over_splits(results["da"]), -1, -2),
        # The contribution of each block of channels to the projections that it shares.
        "B": _from_chunks(projections[..., :size], chunks, length).sum(1),
        "C": _from_chunks(projections[..., size:], chunks, length).sum(1),
    }
    if arrays.D is not None:
        grads["D"] = over_splits(results["dd"])
    if arrays.z is not None:
        grads["z"] = results["dz"]
    if arrays.dt_bias is not None:
        grads["dt_bias"] = over_splits(results["dbias"])
    if arrays.initial_state is not None:
        grads["initial_state"] = call.state(results["dinitial"], "float32")
    return grads


class _Call:
    """One call: how its channels and tokens are distributed, its states in the kernels' layout, and the arguments of all kernels."""

    def __init__(self, arrays: ScanArrays, spec: ScanSpec, size: int, tile: ScanTile):
        self.arrays, self.tile = arrays, tile
        self.options = Options(tile.num_warps, 1, tile.max_registers)
        self.chunks = chunks = _chunks_of(arrays, size)
        (batch, length, channels), groups, states = arrays.x.shape, arrays.B.shape[-2], arrays.A.shape[-1]
        group = channels // groups
        self.blocks = groups * cdiv(group, tile.block_i)
        self.state_shape = chunks.sequences, states, channels
        wanted = tile.programs // (chunks.sequences * self.blocks)
        self.splits = max(1, min(wanted, cdiv(length, size), _MOST_SPLITS))
        f32 = lambda x: None if x is None else x.astype(jnp.float32)
        named = arrays._asdict() | {
            "a": jnp.swapaxes(arrays.A.astype(jnp.float32) * LOG2E, -1, -2),
            "b": _to_chunks(arrays.B, chunks),
            "c": _to_chunks(arrays.C, chunks),
            "d": f32(arrays.D),
            "bias": f32(arrays.dt_bias),
            "initial": None if arrays.initial_state is None else self.states_in(arrays.initial_state),
            "bounds": chunks.bounds,
        }
        log2 = lambda count: (count - 1).bit_length()
        tokens = {"T": length, "L": size, "LEVELS": log2(size), "CHUNKS": batch * chunks.count, "zero": 0}
        sequences = {"SEQUENCES": chunks.sequences // batch, "SPLITS": self.splits}
        sizes = {"I": channels, "N": states, "STATE_LEVELS": log2(states)}
        blocks = {"GROUP": group, "GROUP_BLOCKS": self.blocks // groups, "BLOCKS": self.blocks}
        options = {"BI": tile.block_i, "UNROLL": tile.unroll, "PREFETCH": tile.prefetch}
        numbers = {
            **(tokens | sequences | sizes | blocks | options),
            "LANE_LEVELS": log2(min(tile.block_i, _LANES)),
            "SOFTPLUS": spec.softplus,
            "EVEN": chunks.bounds is None and length % size == 0 and group % tile.block_i == 0,
            **step_kernel.strides(A=arrays.A, BIAS=arrays.dt_bias, D=arrays.D),
            **given(BIAS=arrays.dt_bias, SKIP=arrays.D, GATE=arrays.z),
            **given(SEGMENTS=arrays.starts, TABLE=chunks.bounds),
        }
        self.launch = Launcher("selective_scan", named, numbers, arrays.x)

    def states_in(self, x: Array) -> Array:
        """States `[..., I, N]` in the kernels' layout."""
        return jnp.swapaxes(x.astype(jnp.float32), -1, -2).reshape(self.state_shape)

    def state(self, x: Array, dtype: str) -> Array:
        """States of the kernels in the caller's layout."""
        x = jnp.swapaxes(x, -1, -2).astype(dtype)
        if self.arrays.offsets is None:
            return x
        return x.reshape((self.chunks.batch, -1, *x.shape[1:]))

    def programs(self, splits: int) -> int:
        return self.chunks.sequences * splits * self.blocks

    def entering(
        self, summary: Any, first: Array | None, arrays: Arrays | None = None, *, reverse: bool = False
    ) -> Array | None:
        """The state that enters each split, or the gradient of the one that leaves it; `None` if there is none."""
        if self.splits == 1:
            return first
        sequences, states, channels = self.state_shape
        rows = sequences * self.splits
        per_channel, per_state = result(rows, channels), result(rows, states, channels)
        registers = self.tile.summary_registers or self.tile.max_registers
        options = dataclasses.replace(self.options, max_registers=registers)
        outputs, programs = {"local": per_state, "total": per_channel}, self.programs(self.splits - 1)
        inputs = {"first": first, **self.launch(summary, options, outputs, programs, arrays)}
        # The effects of all splits, one after the other.
        block = min(_COMBINED, padded(channels, 1))
        programs = sequences * states * cdiv(channels, block)
        numbers = {"BLOCK": block, "FIRST": first is not None, "REVERSE": reverse}
        numbers |= {"name": "backward_combine_kernel" if reverse else ""}
        kernel, outputs = forward_kernels.combine_kernel, {"entering": per_state}
        return self.launch(kernel, Options(4), outputs, programs, inputs, **numbers)["entering"]


def step(arrays: StepArrays, spec: ScanSpec, config: TritonConfig) -> tuple[Array, Array]:
    """`out [*, B, I]` in the dtype of `x` and the states (the whole pool)."""
    return step_kernel.step(arrays, spec, config.step)
