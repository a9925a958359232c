"""Platform `triton`: the host side. Configurations, support, and the launches of forward, backward and step."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...core.platforms import kernels_unavailable
from ...dispatch import DeviceFacts, Problem
from ...launch import Launch, limits_registers, register_limits_measured, run
from ..chunks import chunk_table
from ..spec import PART, parts_of, ScanArrays, ScanSpec, StepArrays
from . import backward_kernels, forward_kernels, step_kernel

OPAQUE = True
PARTS = {"forward": "forward", "backward": "forward+backward"}
MAX_STATE = 256
_LOG2E = 1.4426950408889634
_MOST_SPLITS = 32
_LANES = 32  # of a warp
_STEP = step_kernel.StepTile(128, 4)
_KEPT = 16  # states of a channel that stay in registers
_COMBINED = 128  # channels of a program that combines what splits do
_MULTIPROCESSORS = 132  # of a device that does not say


def _is_power(x: Any, low: int, high: int) -> bool:
    return isinstance(x, int) and low <= x <= high and not x & (x - 1)


@dataclasses.dataclass(frozen=True)
class ScanTile:
    """One direction's programs: `block_i` channels each (a power of two), a sequence split into as many parts as keep them within `programs`."""

    block_i: int
    num_warps: int
    programs: int
    unroll: int = 1
    """States of a channel that are worked on side by side (by the backward's main kernel one after another). All of them, counted up to a
    power of two, stay in registers from chunk to chunk."""
    max_registers: int = 0
    """Registers a thread may have, 0 for the compiler's choice; without effect on jax-triton before 0.4."""
    summary_registers: int = 0
    """The same for the kernel that finds what each split does to a state, 0 for `max_registers`."""
    prefetch: int = 0
    """What a program, at the start of a chunk, has brought near to it before it is needed: 1 what comes from far, which is all that channels
    have at each token, and the states before a chunk; 2 also `B` and `C`, which programs share."""

    def __post_init__(self):
        if not _is_power(self.block_i, 1, PART):
            raise ValueError(
                f"ScanTile.block_i: expected a power of two up to {PART}, received {self.block_i!r}."
            )
        if not _is_power(self.num_warps, 1, 16) or not isinstance(self.programs, int) or self.programs < 1:
            raise ValueError(
                f"ScanTile: expected num_warps 1, 2, 4, 8 or 16 and programs >= 1, received {self.num_warps!r} and {self.programs!r}."
            )
        for name in ("unroll", "max_registers", "summary_registers", "prefetch"):
            least, most = int(name == "unroll"), {"prefetch": 2, "unroll": 256}.get(name, 255)
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise ValueError(
                    f"ScanTile.{name}: expected an int from {least} to {most}, received {value!r}."
                )


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """`chunk_size` tokens (a power of two) are in the registers at once; the gradient keeps the state before each chunk."""

    chunk_size: int
    forward: ScanTile
    backward: ScanTile
    step: step_kernel.StepTile

    def __post_init__(self):
        if not _is_power(self.chunk_size, 1, 64):
            raise ValueError(
                f"TritonConfig.chunk_size: expected a power of two up to 64, received {self.chunk_size!r}."
            )


config_type = TritonConfig


unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    if "float64" in dict(problem.dtypes).values():
        return "takes float32, float16 and bfloat16, not float64"
    if problem.dim("N") > MAX_STATE:
        return f"takes up to {MAX_STATE} states a channel, not N {problem.dim('N')}"
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
    """Channels of a warp, one a lane."""
    return 64 if device.vendor == "amd" else 32


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first: what changes how many warps run side by side, and how long each waits for memory."""
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


# Where all states of a channel fit its registers, best first. Limits of 128, 144 and 168 let 16, 14 and 12 warps run on a multiprocessor.


def _unlimited(tile: ScanTile) -> ScanTile:
    return dataclasses.replace(tile, max_registers=0, summary_registers=0)


def _forward_tiles(block: int, base: int, device: DeviceFacts) -> list[ScanTile]:
    """With all states in registers the compiler, left alone, takes few more and loads just before use: a limit makes it take as many."""
    limited = [
        *(ScanTile(block, 1, 12 * base, _KEPT, 168, 0, near) for near in (0, 2, 1)),
        *(ScanTile(block, 1, 16 * base, _KEPT, 128, 0, near) for near in (2, 0, 1)),
        # The warps of a program share what they load of `B` and `C`.
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
    """Where the states of a channel are worked on a few at a time."""
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


Execute = Callable[[Launch, dict[str, Array]], dict[str, Array]]
Arrays = dict[str, Array]


class _Chunks(NamedTuple):
    """How the sequences of a call lie in chunks, of which every row of the batch has `count`.

    `bounds` `[sequences, 3]`: first row of tokens, the row after the last, first chunk. `rows` `[chunks, L]`: the row of each token of a
    chunk, past the end where there is none. Both `None` without packed sequences: the rows of the batch are cut alike.
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
        return _Chunks(size, batch, math.ceil(length / size), batch)
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


def forward(
    arrays: ScanArrays, spec: ScanSpec, config: TritonConfig, *, save: bool = True, execute: Execute = run
) -> Arrays:
    """`out`, `final_state`, and with `save` the `states [B, chunks, N, I]` before every chunk."""
    call = _Call(arrays, spec, config.chunk_size, config.forward, execute)
    x, shape = arrays.x, call.state_shape
    slots = call.chunks.batch * call.chunks.count if save else shape[0] * call.splits
    call.enter("summary", ("x", "dt", "a", "b"), call.inputs["initial"], **call.turns)
    results = call(
        forward_kernels.forward_kernel,
        ("x", "dt", "a", "b", "c", "d", "z", "bias", "entering"),
        {
            "out_ptr": jax.ShapeDtypeStruct(x.shape, x.dtype),
            "final_ptr": jax.ShapeDtypeStruct(shape, jnp.float32),
            "states_ptr": jax.ShapeDtypeStruct((slots, *shape[1:]), jnp.float32),
        },
        SKIP=arrays.D is not None,
        GATE=arrays.z is not None,
        ENTERS=call.inputs["entering"] is not None,
        **call.turns,
        D_STRIDE=call.stride(arrays.D, 1),
        SAVE=save,
    )
    out = {"out": results["out_ptr"], "final_state": call.state(results["final_ptr"], spec.state_dtype)}
    if save:
        out["states"] = results["states_ptr"].reshape((x.shape[0], -1, *shape[1:]))
    return out


def backward(
    arrays: ScanArrays,
    spec: ScanSpec,
    config: TritonConfig,
    saved: Arrays,
    cotangents: Arrays,
    *,
    execute: Execute = run,
) -> Arrays:
    """The gradient of every float array; bitwise repeatable, as every sum has one fixed order."""
    call = _Call(arrays, spec, config.chunk_size, config.backward, execute)
    x, shape, chunks = arrays.x, call.state_shape, call.chunks
    (batch, length, channels), groups = x.shape, arrays.B.shape[-2]
    call.inputs |= {
        "dout": cotangents["out"],
        "states": saved["states"].reshape((-1, *shape[1:])),
    }
    call.enter(
        "backward_summary",
        ("dt", "a", "c", "z", "dout"),
        call.states_in(cotangents["final_state"]),
        GATE=arrays.z is not None,
        **call.turns,
    )
    rows, blocks = shape[0] * call.splits, call.blocks // groups
    n_chunks, states, size = chunks.batch * chunks.count, shape[1], chunks.size
    per_channel = jax.ShapeDtypeStruct((rows, channels), jnp.float32)
    per_state = jax.ShapeDtypeStruct((rows, *shape[1:]), jnp.float32)
    results = call(
        backward_kernels.backward_kernel,
        ("x", "dt", "a", "b", "c", "d", "z", "bias", "states", "dout", "entering"),
        {
            "dx_ptr": jax.ShapeDtypeStruct(x.shape, x.dtype),
            "ddt_ptr": jax.ShapeDtypeStruct(x.shape, arrays.dt.dtype),
            "dz_ptr": jax.ShapeDtypeStruct((1,), x.dtype)
            if arrays.z is None
            else jax.ShapeDtypeStruct(x.shape, arrays.z.dtype),
            "dprojection_ptr": jax.ShapeDtypeStruct(
                (blocks, groups, n_chunks, states, 2 * size), jnp.float32
            ),
            "da_ptr": per_state,
            "dd_ptr": per_channel,
            "dbias_ptr": per_channel,
            "dinitial_ptr": jax.ShapeDtypeStruct(shape, jnp.float32),
            "carry_ptr": per_state,
        },
        SKIP=arrays.D is not None,
        GATE=arrays.z is not None,
        D_STRIDE=call.stride(arrays.D, 1),
        LANE_LEVELS=min(call.tile.block_i, _LANES).bit_length() - 1,
    )
    parts = parts_of(channels, groups)

    projections = results["dprojection_ptr"]
    projections = projections.reshape((parts, blocks // parts, *projections.shape[1:])).sum(1)

    def over_splits(partial: Array) -> Array:
        return partial.reshape((batch, -1, *partial.shape[1:])).sum(1)

    grads = {
        "x": results["dx_ptr"],
        "dt": results["ddt_ptr"],
        "A": jnp.swapaxes(over_splits(results["da_ptr"]), -1, -2),
        # What each block of channels gives to the projections that it shares.
        "B": _from_chunks(projections[..., :size], chunks, length).sum(1),
        "C": _from_chunks(projections[..., size:], chunks, length).sum(1),
    }
    if arrays.D is not None:
        grads["D"] = over_splits(results["dd_ptr"])
    if arrays.z is not None:
        grads["z"] = results["dz_ptr"]
    if arrays.dt_bias is not None:
        grads["dt_bias"] = over_splits(results["dbias_ptr"])
    if arrays.initial_state is not None:
        grads["initial_state"] = call.state(results["dinitial_ptr"], "float32")
    return grads


class _Call:
    """Launches kernels of one call: makes the operands, scalars and constants that all of them share."""

    def __init__(self, arrays: ScanArrays, spec: ScanSpec, size: int, tile: ScanTile, execute: Execute):
        self.arrays, self.spec, self.tile, self.execute = arrays, spec, tile, execute
        self.chunks = chunks = _chunks_of(arrays, size)
        channels, groups = arrays.x.shape[-1], arrays.B.shape[-2]
        self.group = channels // groups
        self.blocks = groups * math.ceil(self.group / tile.block_i)
        self.states = arrays.A.shape[-1]
        longest = math.ceil(arrays.x.shape[1] / size)
        wanted = tile.programs // (chunks.sequences * self.blocks)
        self.splits = max(1, min(wanted, longest, _MOST_SPLITS))
        f32 = lambda x: None if x is None else x.astype(jnp.float32)
        self.inputs: dict[str, Array | None] = {
            "x": arrays.x,
            "dt": arrays.dt,
            "a": jnp.swapaxes(arrays.A.astype(jnp.float32) * _LOG2E, -1, -2),
            "b": _to_chunks(arrays.B, chunks),
            "c": _to_chunks(arrays.C, chunks),
            "d": f32(arrays.D),
            "z": arrays.z,
            "bias": f32(arrays.dt_bias),
            "initial": None if arrays.initial_state is None else self.states_in(arrays.initial_state),
            "starts": arrays.starts,
            "bounds": chunks.bounds,
        }

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.chunks.sequences, self.states, self.arrays.x.shape[-1]

    def states_in(self, x: Array) -> Array:
        """States `[..., I, N]` as the kernels have them."""
        return jnp.swapaxes(x.astype(jnp.float32), -1, -2).reshape(self.state_shape)

    def state(self, x: Array, dtype: str) -> Array:
        """States of the kernels as the call has them."""
        x = jnp.swapaxes(x, -1, -2).astype(dtype)
        if self.arrays.offsets is None:
            return x
        return x.reshape((self.chunks.batch, -1, *x.shape[1:]))

    @property
    def turns(self) -> dict[str, int]:
        """How the states of a channel are gone through."""
        return {"UNROLL": self.tile.unroll, "STATE_LEVELS": (self.states - 1).bit_length()}

    @staticmethod
    def stride(x: Array | None, rank: int) -> int:
        """Between the rows of the batch, of a parameter of this rank."""
        return 0 if x is None or x.ndim == rank else math.prod(x.shape[1:])

    def enter(self, name: str, operands: tuple[str, ...], first: Array | None, **constants: Any) -> None:
        """Adds the state that enters each split, or the gradient of the one that leaves it, to the inputs; `None` for none."""
        self.inputs["entering"] = first
        if self.splits == 1:
            return
        sequences, states, channels = self.state_shape
        rows, is_forward = sequences * self.splits, name == "summary"
        kernel = forward_kernels.summary_kernel if is_forward else backward_kernels.backward_summary_kernel
        summaries = self(
            kernel,
            (*operands, "bias"),
            {
                "local_ptr": jax.ShapeDtypeStruct((rows, states, channels), jnp.float32),
                "total_ptr": jax.ShapeDtypeStruct((rows, channels), jnp.float32),
            },
            fewer=1,
            max_registers=self.tile.summary_registers or self.tile.max_registers,
            **constants,
        )
        given = {"a_ptr": self.inputs["a"], "first_ptr": first, **summaries}
        given |= {"starts_ptr": self.inputs["starts"], "bounds_ptr": self.inputs["bounds"]}
        inputs = {name: self.arrays.x if x is None else x for name, x in given.items()}
        block = min(_COMBINED, 1 << (channels - 1).bit_length())
        launch = Launch(
            kernel=forward_kernels.combine_kernel,
            inputs={name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in inputs.items()},
            outputs={"entering_ptr": jax.ShapeDtypeStruct((rows, states, channels), jnp.float32)},
            scalars={
                "T": self.arrays.x.shape[1],
                "SPLITS": self.splits,
                "SEQUENCES": sequences // self.chunks.batch,
            },
            constants={
                "I": channels,
                "N": states,
                "L": self.chunks.size,
                "BLOCK": block,
                "A_STRIDE": self.stride(self.arrays.A, 2),
                "FIRST": first is not None,
                "REVERSE": not is_forward,
                "SEGMENTS": self.arrays.starts is not None,
                "TABLE": self.chunks.bounds is not None,
            },
            grid=(sequences * states * math.ceil(channels / block),),
            num_warps=4,
            name=f"ejkernel_eqx.selective_scan.{'' if is_forward else 'backward_'}combine_kernel",
        )
        self.inputs["entering"] = self.execute(launch, inputs)["entering_ptr"]

    def __call__(
        self,
        kernel: Any,
        operands: tuple[str, ...],
        outputs: dict[str, jax.ShapeDtypeStruct],
        *,
        fewer: int = 0,
        max_registers: int | None = None,
        **constants: Any,
    ) -> Arrays:
        """What a call does not have is never read: `x` stands in for it."""
        given = {f"{name}_ptr": self.inputs[name] for name in (*operands, "starts", "bounds")}
        inputs = {name: self.arrays.x if x is None else x for name, x in given.items()}
        arrays, chunks, tile = self.arrays, self.chunks, self.tile
        batch, length, channels = arrays.x.shape
        launch = Launch(
            kernel=kernel,
            inputs={name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in inputs.items()},
            outputs=outputs,
            scalars={
                "T": length,
                "SPLITS": self.splits,
                "CHUNKS": batch * chunks.count,
                "SEQUENCES": chunks.sequences // batch,
                "zero": 0,
            },
            constants={
                "I": channels,
                "N": self.states,
                "GROUP": self.group,
                "GROUP_BLOCKS": self.blocks // arrays.B.shape[-2],
                "BLOCKS": self.blocks,
                "BI": tile.block_i,
                "LEVELS": chunks.size.bit_length() - 1,
                "A_STRIDE": self.stride(arrays.A, 2),
                "BIAS_STRIDE": self.stride(arrays.dt_bias, 1),
                "BIAS": arrays.dt_bias is not None,
                "SOFTPLUS": self.spec.softplus,
                "SEGMENTS": arrays.starts is not None,
                "TABLE": chunks.bounds is not None,
                "EVEN": chunks.bounds is None
                and length % chunks.size == 0
                and self.group % tile.block_i == 0,
                "PREFETCH": tile.prefetch,
                **constants,
            },
            grid=(chunks.sequences * (self.splits - fewer) * self.blocks,),
            num_warps=tile.num_warps,
            num_stages=1,
            max_registers=tile.max_registers if max_registers is None else max_registers,
            name=f"ejkernel_eqx.selective_scan.{kernel.fn.__name__}",
        )
        return self.execute(launch, inputs)


def step(
    arrays: StepArrays, spec: ScanSpec, config: TritonConfig, *, execute: Execute = run
) -> tuple[Array, Array]:
    """`out [*, B, I]` in the dtype of `x` and the states (the whole pool)."""
    return step_kernel.step(arrays, spec, config.step, execute=execute)
