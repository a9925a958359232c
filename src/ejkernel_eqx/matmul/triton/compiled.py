"""Platform `triton`: the host side. Configurations, support, and the launches of forward and backward."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...core.platforms import kernels_unavailable
from ...dispatch import BOTH, DeviceFacts, FORWARD, Problem
from ...launch import Execute, Launcher, NOTHING, Options, result, result_like, run
from ...launch.fields import check_fields, Float32Dot
from ...launch.sizes import cdiv, padded, too_large
from ..epilogue import before_activation
from ..reference import group_of
from ..spec import columns, GroupedArrays, GroupedSpec, HALVES, INTERLEAVED, PAIR
from . import backward_kernels, forward_kernel
from .tile_sizes import GroupedTile as GroupedTile
from .tile_sizes import shared_memory, SMALLEST, tiles

OPAQUE = True
PARTS = {"forward": FORWARD, "lhs": "lhs", "rhs": BOTH}
"""The fields of a configuration that are tuned one after the other, and what decides."""
MAX_GROUPS = 1023
_KINDS = {None: 0, PAIR: 1, HALVES: 2, INTERLEAVED: 3}
_SUM = 4
_ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
_OPERANDS = {"float32": 0, "float16": 1, "bfloat16": 2}
_COLLECTED = 1024  # columns of the left side whose gradient a program adds up


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Tiles of the result, of the gradient of the left side, and of that of right sides, whose `block_m` are rows of one turn."""

    forward: GroupedTile
    lhs: GroupedTile
    rhs: GroupedTile
    float32_dot: Float32Dot = "tf32x3"
    fast_sigmoid: bool = True
    """Whether the activation uses NVIDIA's approximate instructions (error 2e-7)."""

    __post_init__ = check_fields


config_type = TritonConfig
unavailable = kernels_unavailable


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    dtypes = dict(problem.dtypes)
    if "float64" in dtypes.values():
        return "takes float32, float16 and bfloat16, not float64"
    if problem.dim("E") > MAX_GROUPS:
        return f"takes up to {MAX_GROUPS} groups, not {problem.dim('E')}"
    if dtypes["rhs"] == "float8_e4m3fn" and device.vendor == "nvidia" and device.capability < (8, 9):
        return (
            "takes right sides in float8_e4m3fn from compute capability 8.9 on, the device has "
            f"{device.compute_capability or 'none'}; float8_e5m2 and int8 it has"
        )
    return None


def default_config(problem: Problem, device: DeviceFacts) -> TritonConfig:
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[TritonConfig]:
    """Configurations worth timing, the heuristic first."""
    nvidia = device.vendor == "nvidia"
    precision = "tf32x3" if nvidia else "ieee"
    return [
        TritonConfig(forward, lhs, rhs, precision, nvidia) for forward, lhs, rhs in tiles(problem, device)
    ]


def config_unsupported(config: TritonConfig, problem: Problem, device: DeviceFacts) -> str | None:
    """Why the tiles cannot fit the device's shared memory, by an estimate; for the smallest tile, only the compiler can tell."""
    for kernel in ("forward", "lhs", "rhs"):
        tile = getattr(config, kernel)
        sizes = f"{tile.block_m}x{tile.block_n}x{tile.block_k}"
        reason = too_large(kernel, sizes, tile.num_stages, shared_memory(kernel, tile, problem), device)
        if reason is not None and tile != SMALLEST:
            return reason
    return None


def saved_axes(arrays: GroupedArrays, spec: GroupedSpec) -> dict[str, tuple[str, ...]]:
    """The products before the activation; nothing if there is none."""
    if spec.is_linear:
        return {}
    width = arrays.right.shape[-2 if spec.transpose_rhs else -1]
    column = (
        f"H{columns(width, spec)}" if spec.gated == INTERLEAVED else "N" if spec.gated == HALVES else "bN"
    )
    return {name: ("M", column) for name in ("gate", *(("up_z",) if spec.gated else ()))}


def forward(
    arrays: GroupedArrays,
    spec: GroupedSpec,
    config: TritonConfig,
    *,
    save: bool = True,
    execute: Execute = run,
) -> dict[str, Array]:
    """The result and, for an activation, the products before it in the dtype of the left side."""
    arrays = _alike(arrays)
    batch, inner = arrays.lhs.shape[0], arrays.lhs.shape[-1]
    width = arrays.right.shape[-2 if spec.transpose_rhs else -1]
    out = (batch, arrays.num_rows, columns(width, spec))
    save = save and not spec.is_linear
    saved = result(*out, dtype=arrays.lhs.dtype)
    outputs = {
        "out": result(*out, dtype=jnp.dtype(spec.out_dtype)),
        "gate": saved if save else NOTHING,
        "up_z": saved if save and spec.gated else NOTHING,
    }
    launch = _launcher(arrays, config, execute)
    results = _grouped(
        launch,
        config.forward,
        outputs,
        K=inner,
        W=width,
        N=out[-1],
        KIND=_KINDS[spec.gated],
        TRANSPOSED=spec.transpose_rhs,
        GATHERED=arrays.rows is not None,
        BIAS=arrays.bias is not None,
        UP_BIAS=arrays.up_bias is not None,
        SCALE=arrays.stored is not None,
        ACTIVATION=_ACTIVATIONS[spec.activation],
        ALPHA=spec.alpha,
        LIMIT=spec.limit or 0.0,
        UP_SHIFT=spec.up_shift,
        SAVE=save,
        name="forward_kernel",
    )
    kept = ("out", *(("gate",) if save else ()), *(("up_z",) if save and spec.gated else ()))
    return {name: results[name] for name in kept}


def backward(
    arrays: GroupedArrays,
    spec: GroupedSpec,
    config: TritonConfig,
    saved: dict[str, Array],
    cotangents: dict[str, Array],
    *,
    execute: Execute = run,
) -> dict[str, Array]:
    """All gradients; those of right sides and biases are summed over all rows by one program."""
    arrays = _alike(arrays)
    dz, du = before_activation(cotangents["out"], saved, spec, arrays.lhs.dtype)
    grads = {"lhs": _left_gradient(arrays, spec, config, dz, du, execute)}
    grads |= _right_gradients(arrays, spec, config, dz, ("rhs", "bias"), execute)
    if du is not None:
        grads |= _right_gradients(arrays, spec, config, du, ("up", "up_bias"), execute)
    return grads


def _left_gradient(
    arrays: GroupedArrays,
    spec: GroupedSpec,
    config: TritonConfig,
    dz: Array,
    du: Array | None,
    execute: Execute,
) -> Array:
    """`dz right^T`, plus that of the up side: the same kernel with the right sides transposed."""
    batch, length, inner = arrays.lhs.shape
    if arrays.scale is not None:
        group = group_of(arrays.sizes, arrays.num_rows)
        dz = _times_scale(dz, arrays.scale, group)
        du = None if du is None or arrays.up_scale is None else _times_scale(du, arrays.up_scale, group)
    launch = _launcher(arrays, config, execute).knowing({"lhs": dz, "other_lhs": du}, L=arrays.num_rows)
    width = dz.shape[-1]
    out = result(batch, arrays.num_rows, inner, dtype=arrays.lhs.dtype)
    results = _grouped(
        launch,
        config.lhs,
        {"out": out, "gate": NOTHING, "up_z": NOTHING},
        K=width,
        W=inner,
        N=inner,
        KIND=0 if du is None else _SUM,
        TRANSPOSED=not spec.transpose_rhs,
        GATHERED=False,
        BIAS=False,
        UP_BIAS=False,
        SCALE=False,
        ACTIVATION=0,
        ALPHA=1.0,
        LIMIT=0.0,
        UP_SHIFT=0.0,
        SAVE=False,
        name="left_kernel",
    )
    taken = results["out"]
    if arrays.rows is None:
        return taken
    order, starts = _taken_by(arrays, length)
    programs = batch * length * cdiv(inner, _block(inner))
    return launch(
        backward_kernels.collect_kernel,
        Options(4),
        {"dlhs": result_like(arrays.lhs)},
        programs,
        {"taken": taken, "order": order, "starts": starts},
        L=length,
        K=inner,
        BLOCK_K=_block(inner),
    )["dlhs"]


def _block(inner: int) -> int:
    return min(_COLLECTED, padded(inner))


def _taken_by(arrays: GroupedArrays, length: int) -> tuple[Array, Array]:
    """The rows of the result in the order of the rows that they take, `[B, M]`, and where those of each begin, `[B, L + 1]`."""
    assert arrays.rows is not None
    place = jnp.arange(arrays.num_rows, dtype=jnp.int32)[None]
    real = place < arrays.sizes.sum(-1, keepdims=True, dtype=jnp.int32)
    taken = jnp.where(real, jnp.clip(arrays.rows, 0, length - 1), length)
    order = jnp.argsort(taken, -1, stable=True)
    ordered = jnp.take_along_axis(taken, order, -1)
    every = jnp.arange(length + 1, dtype=jnp.int32)
    starts = jax.vmap(lambda row: jnp.searchsorted(row, every))(ordered)
    return order.astype(jnp.int32), starts.astype(jnp.int32)


def _times_scale(dz: Array, scale: Array, group: Array) -> Array:
    """`dz` times the scales `[E, W]` or, mapped, `[B, E, W]` of each row's group."""
    last = scale.shape[-2] - 1
    group = jnp.minimum(group, last)
    per_row = jnp.take_along_axis(scale, group[..., None], -2) if scale.ndim == 3 else scale[group]
    return (dz.astype(jnp.float32) * per_row).astype(dz.dtype)


def _right_gradients(
    arrays: GroupedArrays,
    spec: GroupedSpec,
    config: TritonConfig,
    dz: Array,
    names: tuple[str, str],
    execute: Execute,
) -> dict[str, Array]:
    """The gradients of a right side and its bias, of those that the call has."""
    right, bias = (getattr(arrays, name) for name in names)
    if right is None and bias is None:
        return {}
    batch, count = arrays.sizes.shape
    mapped = arrays.right.ndim == 4
    inner, width = arrays.lhs.shape[-1], dz.shape[-1]
    lead = (batch,) if mapped else ()
    most = arrays.sizes if mapped else arrays.sizes.sum(0)
    tile, launch = config.rhs, _launcher(arrays, config, execute)
    down = 1 if right is None else cdiv(inner, tile.block_k)
    results = launch(
        backward_kernels.right_kernel,
        tile,
        {
            "dright": NOTHING if right is None else result_like(right),
            "dbias": NOTHING if bias is None else result(*lead, count, width),
        },
        (batch if mapped else 1) * count * down * cdiv(width, tile.block_n),
        {"dz": dz, "order": jnp.argsort(-most, -1).astype(jnp.int32)},
        K=inner,
        W=width,
        B=batch,
        TRANSPOSED=spec.transpose_rhs,
        GATHERED=arrays.rows is not None,
        MATRIX=right is not None,
        DOWN=down,
        BIAS=bias is not None,
    )
    found = {names[0]: (right, "dright"), names[1]: (bias, "dbias")}
    return {name: results[made] for name, (x, made) in found.items() if x is not None}


def _grouped(
    launch: Launcher, tile: GroupedTile, outputs: dict[str, jax.ShapeDtypeStruct], **numbers: Any
) -> dict[str, Array]:
    batch, rows, width = outputs["out"].shape
    count = int(launch.numbers["E"])
    # Rows past the last group are tiles too.
    most = rows // tile.block_m + min(count + 1, rows)
    programs = batch * most * cdiv(width, tile.block_n)
    return launch(forward_kernel.grouped_kernel, tile, outputs, programs, TILES=most, **numbers)


def _alike(arrays: GroupedArrays) -> GroupedArrays:
    """Right sides, biases and scales, all with a leading axis or all without."""
    names = ("rhs", "bias", "up", "up_bias", "stored", "scale", "up_stored", "up_scale")
    given = {name: x for name in names if (x := getattr(arrays, name)) is not None}
    cores = {name: 3 if name in ("rhs", "up", "stored", "up_stored") else 2 for name in given}
    if all(x.ndim == cores[name] for name, x in given.items()):
        return arrays
    batch = arrays.lhs.shape[0]
    whole = {n: x if x.ndim > cores[n] else jnp.broadcast_to(x, (batch, *x.shape)) for n, x in given.items()}
    return arrays._replace(**whole)


def _launcher(arrays: GroupedArrays, config: TritonConfig, execute: Execute) -> Launcher:
    """What the kernels of one call share."""
    count = arrays.sizes.shape[-1]
    numbers = {
        "M": arrays.num_rows,
        "L": arrays.lhs.shape[1],
        "E": count,
        "MAPPED": arrays.right.ndim == 4,
        "FAST": config.fast_sigmoid,
        "OPERAND": _OPERANDS[arrays.lhs.dtype.name],
        "PRECISION": config.float32_dot,
        "BLOCK_E": padded(count + 1),
    }
    named = arrays._asdict() | {"right": arrays.right, "up": arrays.up_right, "other_lhs": None}
    return Launcher("matmul", named, numbers, arrays.lhs, execute)
