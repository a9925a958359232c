"""Platform `triton`: the host side. Configurations, support, and the launches of forward, backward and step."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import Array

from ...core import Named
from ...core.platforms import Interpreted, kernels_unavailable
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
from ...launch.fields import Checked, Count, power_of_two, Registers, Warps, whole
from ...launch.sizes import cdiv, numbers_of, padded
from ..chunks import chunk_table
from ..spec import PART, parts_of, ScanArrays, ScanSpec
from . import backward_kernels, forward_kernels, step_kernel, summary_kernels

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
class ScanTile(Checked):
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


@dataclasses.dataclass(frozen=True)
class TritonConfig(Checked):
    """`chunk_size` tokens (a power of two) are in registers at once; the gradient keeps the state before each chunk."""

    chunk_size: Annotated[int, power_of_two(most=64)]
    forward: ScanTile
    backward: ScanTile
    step: step_kernel.StepTile


config_type = TritonConfig
unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if "float64" in dict(problem.dtypes).values():
        return "takes float32, float16 and bfloat16, not float64"
    if problem.dim("N") > MAX_STATE:
        return f"takes up to {MAX_STATE} states per channel, not N {problem.dim('N')}"
    return None


# Tiles by their warps, with a channel per lane, programs for each multiprocessor, and the fields from `unroll` on, best
# first. Limits of 128, 144 and 168 registers let 16, 14 and 12 warps run on a multiprocessor.
#
# Forward with all states of a channel in registers: the compiler by default uses few more registers and loads just before
# use; a limit makes it use as many as allowed. The warps of a program share their loads of `B` and `C`.
_LIMITED = (
    "1 12 16 168, 1 12 16 168 0 2, 1 12 16 168 0 1, 1 16 16 128 0 2, 1 16 16 128, 1 16 16 128 0 1, 2 8 16 128"
)
_PLAIN = "1 16 2, 1 16 2 0 0 2, 1 16 2 0 0 1, 1 32 16, 1 16 16"
_BACKWARD = (
    "1 16 1 0 0 2, 1 8 16 0 144 2, 1 16 16 0 144 2, 1 24 16 0 144 2, 1 16 16 208 144 2, 1 12 16 168 144 2, "
    "1 16 16 0 128 1, 1 16 16 0 144 1, 1 16 1 0 0 1, 1 8 1 0 0 2, 1 24 1 0 0 2, 1 16 1"
)
# For states of which t are processed at a time, or o.
_TURNS = (
    "1 16 t, 1 8 t, 1 32 t, 1 16 o, 1 20 o, 1 62 o, 2 8 t, 1 16 t 0 0 1, 1 16 t 0 0 2, 1 20 t 96, 1 16 t 128",
    "1 16 t, 1 8 t, 1 32 t, 1 24 t, 1 12 1 168, 1 24 1 168, 1 36 1 168, 1 16 t 0 0 1, 1 16 t 0 0 2, "
    "1 16 t 208 0 1, 1 16 1",
)


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return next(_configs(problem, device))


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first. They vary how many warps run side by side, and how long each waits for memory."""
    return list(dict.fromkeys(_configs(problem, device)))


def _configs(problem: Problem, device: DeviceFacts) -> Iterator[TritonConfig]:
    states = problem.dim("N")
    turn, other = (1, 2) if states % 2 else (2, 1)
    rows = tuple(column.replace("t", str(turn)).replace("o", str(other)) for column in _TURNS)
    if states <= _KEPT:
        is_limited = limits_registers(device) and register_limits_measured(device)
        rows = ", ".join((_LIMITED, _PLAIN) if is_limited else (_PLAIN, _LIMITED)), _BACKWARD
    for first, second in zip(*map(numbers_of, rows), strict=True):
        yield TritonConfig(16, _tile(first, device), _tile(second, device), _STEP)


def _tile(row: Any, device: DeviceFacts) -> ScanTile:
    warps, programs, *more = row
    lanes, base = 64 if device.vendor == "amd" else _LANES, device.num_multiprocessors or _MULTIPROCESSORS
    tile = ScanTile(lanes * warps, warps, base * programs, *more)
    limits = {} if device.vendor == "nvidia" else {"max_registers": 0, "summary_registers": 0}
    return dataclasses.replace(tile, **limits)


class _Chunks:
    """The division of a call's sequences into chunks, of which every row of the batch has `count`.

    `bounds` `[sequences, 3]`: first row of tokens, the row after the last, first chunk. `rows` `[chunks, L]`: the row of each token of a
    chunk, past the end if there is none. Both are `None` without packed sequences, when all rows of the batch are split alike.
    """

    def __init__(self, arrays: ScanArrays, size: int):
        self.batch, self.length = batch, length = arrays.x.shape[:2]
        self.size, self.count, self.sequences = size, cdiv(length, size), batch
        self.bounds: Any = None
        self.rows: Any = None
        if arrays.offsets is not None:
            table = jax.vmap(lambda offsets: chunk_table(offsets, length, size))(arrays.offsets)
            rows, self.count = jnp.arange(batch, dtype=jnp.int32)[:, None], table.rows.shape[1]
            tokens, first = arrays.offsets + length * rows, table.first + self.count * rows
            self.sequences = batch * (arrays.offsets.shape[-1] - 1)
            self.bounds = jnp.stack([tokens[:, :-1], tokens[:, 1:], first], axis=-1).reshape((-1, 3))
            taken = jnp.where(table.rows < length, table.rows + length * rows[..., None], batch * length)
            self.rows = taken.reshape((-1, size))

    def take(self, x: Array) -> Array:
        """`B` or `C` `[B, T, G, N]` as float32 `[G, chunks, N, L]`, zero past the tokens."""
        x, last = x.astype(jnp.float32), x.shape[2:]
        if self.rows is not None:
            x = x.reshape((-1, *last)).at[self.rows].get(mode="fill", fill_value=0.0)
        else:
            x = jnp.pad(x, ((0, 0), (0, self.count * self.size - self.length), (0, 0), (0, 0)))
            x = x.reshape((-1, self.size, *last))
        return jnp.transpose(x, (2, 0, 3, 1))

    def give(self, x: Array) -> Array:
        """The inverse of `take`, `[B, T, G, N]` in float32."""
        x = jnp.transpose(x, (1, 3, 0, 2))  # [chunks, L, G, N]
        if self.rows is None:
            return x.reshape((self.batch, -1, *x.shape[2:]))[:, : self.length]
        flat = jnp.zeros((self.batch * self.length, *x.shape[2:]), x.dtype)
        return flat.at[self.rows].set(x, mode="drop").reshape((self.batch, self.length, *x.shape[2:]))


def forward(arrays: ScanArrays, spec: ScanSpec, config: TritonConfig, *, save: bool = True) -> Named:
    """`out`, `final_state`, and with `save` the `states [B, chunks, N, I]` before every chunk."""
    call = _Call(arrays, spec, config.chunk_size, config.forward)
    x, shape = arrays.x, call.state_shape
    slots = call.chunks.batch * call.chunks.count if save else shape[0] * call.splits
    entering = call.entering(call.launch.arrays["initial"])
    outputs = {"out": result_like(x), "final": result(*shape), "states": result(slots, *shape[1:])}
    inputs, numbers = {"entering": entering}, {"ENTERS": entering is not None, "SAVE": save}
    kernel, programs = forward_kernels.forward_kernel, call.programs(call.splits)
    results = call.launch(kernel, call.options, outputs, programs, inputs, **numbers)
    out = {"out": results["out"], "final_state": call.state(results["final"], spec.state_dtype)}
    return out | ({"states": results["states"].reshape((x.shape[0], -1, *shape[1:]))} if save else {})


def backward(
    arrays: ScanArrays, spec: ScanSpec, config: TritonConfig, saved: Named, cotangents: Named
) -> Named:
    """The gradient of every float array; bitwise repeatable, as every sum has a fixed order."""
    call = _Call(arrays, spec, config.chunk_size, config.backward)
    x, shape, chunks = arrays.x, call.state_shape, call.chunks
    (batch, _, channels), groups = x.shape, arrays.B.shape[-2]
    entering = call.entering(call.states_in(cotangents["final_state"]), cotangents["out"])
    rows, blocks = shape[0] * call.splits, call.blocks // groups
    projection = (groups, chunks.batch * chunks.count, shape[1], 2 * chunks.size)
    outputs = {
        "dx": result_like(x),
        "ddt": result_like(arrays.dt),
        "dz": result(1, dtype=x.dtype) if arrays.z is None else result_like(arrays.z),
        "dprojection": result(blocks, *projection),
        "dinitial": result(*shape),
        **dict.fromkeys(("dd", "dbias"), result(rows, channels)),
        **dict.fromkeys(("da", "carry"), result(rows, *shape[1:])),
    }
    inputs = {"states": saved["states"].reshape((-1, *shape[1:])), "entering": entering}
    inputs |= {"dout": cotangents["out"]}
    kernel, programs = backward_kernels.backward_kernel, call.programs(call.splits)
    results = call.launch(kernel, call.options, outputs, programs, inputs)
    # The contribution of each block of channels to the projections that it shares, first within parts of the channels.
    parts = parts_of(channels, groups)
    projections = results["dprojection"].reshape((parts, blocks // parts, *projection)).sum(1).sum(0)
    of_reads, of_writes = projections[..., chunks.size :], projections[..., : chunks.size]
    over_splits = lambda partial: partial.reshape((batch, -1, *partial.shape[1:])).sum(1)
    grads = {
        "x": results["dx"],
        "dt": results["ddt"],
        "A": jnp.swapaxes(over_splits(results["da"]), -1, -2),
        "B": chunks.give(of_writes),
        "C": chunks.give(of_reads),
        "D": over_splits(results["dd"]),
        "z": results["dz"],
        "dt_bias": over_splits(results["dbias"]),
        "initial_state": call.state(results["dinitial"], "float32"),
    }
    return {name: x for name, x in grads.items() if getattr(arrays, name) is not None}


class _Call:
    """One call: how its channels and tokens are distributed, its states in the kernels' layout, and the arguments of all kernels."""

    def __init__(self, arrays: ScanArrays, spec: ScanSpec, size: int, tile: ScanTile):
        self.arrays, self.tile = arrays, tile
        self.options = Options(tile.num_warps, 1, tile.max_registers)
        self.chunks = chunks = _Chunks(arrays, size)
        (batch, length, channels), groups, states = arrays.x.shape, arrays.B.shape[-2], arrays.A.shape[-1]
        group = channels // groups
        self.blocks = groups * cdiv(group, tile.block_i)
        self.state_shape = chunks.sequences, states, channels
        wanted = tile.programs // (chunks.sequences * self.blocks)
        self.splits = max(1, min(wanted, cdiv(length, size), _MOST_SPLITS))
        f32 = lambda x: None if x is None else x.astype(jnp.float32)
        named = arrays._asdict() | {
            "a": jnp.swapaxes(arrays.A.astype(jnp.float32) * LOG2E, -1, -2),
            "b": chunks.take(arrays.B),
            "c": chunks.take(arrays.C),
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

    def entering(self, first: Array | None, dout: Array | None = None) -> Array | None:
        """The state that enters each split or, with the gradient of the outputs, the gradient of the one that leaves it; `None` if there is none."""
        if self.splits == 1:
            return first
        sequences, states, channels = self.state_shape
        rows, reverse = sequences * self.splits, dout is not None
        per_channel, per_state = result(rows, channels), result(rows, states, channels)
        registers = self.tile.summary_registers or self.tile.max_registers
        options = dataclasses.replace(self.options, max_registers=registers)
        outputs, programs = {"local": per_state, "total": per_channel}, self.programs(self.splits - 1)
        named = lambda kernel: {"REVERSE": reverse, "name": f"backward_{kernel}" if reverse else ""}
        kernel, inputs = summary_kernels.summary_kernel, {"dout": dout}
        effects = self.launch(kernel, options, outputs, programs, inputs, **named("summary_kernel"))
        # The effects of all splits, one after the other.
        block = min(_COMBINED, padded(channels, 1))
        programs = sequences * states * cdiv(channels, block)
        numbers = {"BLOCK": block, "FIRST": first is not None, **named("combine_kernel")}
        kernel, inputs = summary_kernels.combine_kernel, {"first": first, **effects}
        outputs = {"entering": per_state}
        return self.launch(kernel, Options(4), outputs, programs, inputs, **numbers)["entering"]


step = step_kernel.step


_SMALL = ScanTile(32, 1, 6, unroll=2), ScanTile(32, 1, 6), step_kernel.StepTile(4, 1)
interpreted = Interpreted(__name__, TritonConfig(8, *_SMALL))
"""The same kernels on the host, with tiles for small arrays: platform `triton-interpret`."""
