"""Platform `pallas` on TPU: configurations, support, and the host side of forward and backward."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from ...core import Named
from ...core.platforms import InterpretedPallas
from ...dispatch import BOTH, DeviceFacts, FORWARD, Problem
from ...launch.fields import Checked
from ...launch.sizes import rows_of, too_large_for_vmem
from ..epilogue import before_activation, finished
from ..spec import alike, columns, GroupedArrays, GroupedSpec, HALVES, INTERLEAVED, PAIR
from ..spec import saved_axes as saved_axes
from ..xla_products import collect
from .call import Groups, Products, products, right_gradient
from .tile import rounded
from .tile_sizes import product_of, SMALLEST, tiles, TpuTile, vmem

OPAQUE = True
PARTS = {"forward": FORWARD, "lhs": "lhs", "rhs": BOTH}
"""The fields of a configuration that are tuned one after the other, and what decides."""
KERNELS = tuple(PARTS)
MAX_GROUPS = 4096
"""Over all leading axes: the table of visits is in scalar memory."""


@dataclasses.dataclass(frozen=True)
class PallasConfig(Checked):
    """Tiles of the result, of the gradient of the left side, and of that of right sides, whose `block_m` are rows of one turn."""

    forward: TpuTile
    lhs: TpuTile
    rhs: TpuTile


config_type = PallasConfig


def unsupported(problem: Problem, device: DeviceFacts) -> str | None:
    dtypes = dict(problem.dtypes)
    if problem.flag("format"):
        return f"takes arrays and right sides in 8 bits with a scale for each column, not {dtypes['rhs']} in blocks"
    for dtype in ("float64", "float16"):
        if dtype in dtypes.values():
            return f"takes float32 and bfloat16, not {dtype}"
    groups = problem.dim("B") * problem.dim("E")
    if groups > MAX_GROUPS:
        return f"takes up to {MAX_GROUPS} groups over all leading axes, not {groups}"
    return None


def default_config(problem: Problem, device: DeviceFacts) -> PallasConfig:
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: DeviceFacts) -> list[PallasConfig]:
    """Configurations worth timing, the heuristic first."""
    return [PallasConfig(*row) for row in rows_of([tiles(kernel, problem, device) for kernel in KERNELS])]


def config_unsupported(config: PallasConfig, problem: Problem, device: DeviceFacts) -> str | None:
    """The reason why the tiles cannot fit the device's vector memory, by an estimate; for the smallest tile, only the compiler can tell."""
    for kernel in KERNELS:
        tile = getattr(config, kernel)
        sizes = f"{tile.block_m}x{tile.block_n}x{tile.block_k}"
        reason = too_large_for_vmem(kernel, sizes, vmem(kernel, tile, product_of(kernel, problem)), device)
        if reason is not None and tile != SMALLEST:
            return reason
    return None


def forward(arrays: GroupedArrays, spec: GroupedSpec, config: PallasConfig, *, save: bool = True) -> Named:
    """The result and, for an activation, the products before it in the dtype of the left side."""
    arrays = alike(arrays)
    batch, rows = arrays.lhs.shape[0], arrays.num_rows
    width = arrays.right.shape[-2 if spec.transpose_rhs else -1]
    count, dtype = columns(width, spec), arrays.lhs.dtype
    saved = dict.fromkeys(spec.saved if save else (), dtype)
    given = {"x": _flat(_taken(arrays))} | _side(arrays, "w", ("right", "scale", "bias"))
    shift = 0
    if spec.gated == PAIR:
        given |= _side(arrays, "u", ("up_right", "up_scale", "up_bias"), "up_")
    if _is_apart(spec, config.forward, count):
        linear = GroupedSpec("float32", transpose_rhs=spec.transpose_rhs)
        work = Products(given, width, {"out": jnp.float32}, linear, operand=dtype.name)
        z = products("forward", work, _groups(arrays), config.forward)["out"]
        gate, up = (z[:, :count], z[:, count:]) if spec.gated == HALVES else (z[:, 0::2], z[:, 1::2])
        results = {"out": finished(gate, up, spec).astype(spec.out_dtype)}
        results |= {name: rounded(x, dtype, spec.limit).astype(dtype) for name, x in zip(saved, (gate, up))}
    else:
        # Gate and up are halves of one matrix, given twice; the index maps shift the second.
        if spec.gated == HALVES:
            given |= _side(arrays, "u", ("right", "scale", "bias"), "up_")
            shift = count
        outputs = {"out": jnp.dtype(spec.out_dtype)} | saved
        work = Products(given, count, outputs, spec, shift, dtype.name)
        results = products("forward", work, _groups(arrays), config.forward)
    return {name: x.reshape(batch, rows, count) for name, x in results.items()}


def backward(
    arrays: GroupedArrays, spec: GroupedSpec, config: PallasConfig, saved: Named, cotangents: Named
) -> Named:
    """All gradients; those of right sides and biases are summed over all rows, in their order."""
    arrays = alike(arrays)
    dz, du = before_activation(cotangents["out"], saved, spec, arrays.lhs.dtype)
    grads = {"lhs": _left_gradient(arrays, spec, config.lhs, dz, du)}
    for names, d in ((("rhs", "bias"), dz), (("up", "up_bias"), du)):
        if d is not None:
            grads |= _right_gradients(arrays, spec, config.rhs, d, names)
    return grads


def _left_gradient(
    arrays: GroupedArrays, spec: GroupedSpec, tile: TpuTile, dz: Array, du: Array | None
) -> Array:
    """`dz right^T`, plus that of the up side: the same kernel with the right sides transposed."""
    batch, length, inner = arrays.lhs.shape
    dtype, rows = arrays.lhs.dtype, arrays.num_rows
    given = {"x": _flat(dz)} | _side(arrays, "w", ("right", "", ""))
    scales = {"row_scale": arrays.scale}
    if du is not None:
        given |= {"y": _flat(du)} | _side(arrays, "u", ("up_right", "", ""))
        scales |= {"other_row_scale": arrays.up_scale}
    given |= {name: x.reshape(-1, x.shape[-1]) for name, x in scales.items() if x is not None}
    linear = GroupedSpec(dtype.name, transpose_rhs=not spec.transpose_rhs)
    work = Products(given, inner, {"out": dtype}, linear, operand=dtype.name)
    taken = products("lhs", work, _groups(arrays), tile)["out"].reshape(batch, rows, inner)
    return collect(taken, arrays.rows, arrays.sizes, length)


def _right_gradients(
    arrays: GroupedArrays, spec: GroupedSpec, tile: TpuTile, dz: Array, names: tuple[str, str]
) -> Named:
    """The gradients of a right side and its bias, of those that the call has."""
    right, bias = (getattr(arrays, name) for name in names)
    groups, operand, dz = _groups(arrays), arrays.lhs.dtype.name, _flat(dz)
    results = {}
    if right is not None:
        x = _flat(_taken(arrays))
        made = right_gradient("rhs", x, dz, groups, tile, operand, spec.transpose_rhs, right.dtype)
        results[names[0]] = made.reshape(right.shape)
    if bias is not None:
        # The product with a column of ones, eight of which a TPU multiplies at once.
        ones = jnp.ones((dz.shape[0], 8), dz.dtype)
        made = right_gradient("bias", ones, dz, groups, tile, operand, False, jnp.float32)
        results[names[1]] = made[:, 0].reshape(bias.shape)
    return results


def _taken(arrays: GroupedArrays) -> Array:
    """The rows of the left side `[B, M, K]`, gathered if they are to be: a TPU's kernel loads whole tiles of rows that follow one another."""
    if arrays.rows is None:
        return arrays.lhs
    index = jnp.clip(arrays.rows, 0, arrays.lhs.shape[1] - 1)
    return jnp.take_along_axis(arrays.lhs, index[..., None], 1)


def _groups(arrays: GroupedArrays) -> Groups:
    return Groups(arrays.sizes, arrays.num_rows, arrays.right.ndim == 4)


def _flat(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _side(arrays: GroupedArrays, name: str, fields: tuple[str, str, str], prefix: str = "") -> Named:
    """A right side, its scales and its bias, by the kernel's names, for all matrices `[G, ...]`."""
    matrix, scale, bias = (getattr(arrays, field) if field else None for field in fields)
    assert matrix is not None
    results = {name: matrix.reshape(-1, *matrix.shape[-2:])}
    for kind, x in (("scale", scale), ("bias", bias)):
        if x is not None:
            results[f"{prefix}{kind}"] = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    return results


def _is_apart(spec: GroupedSpec, tile: TpuTile, count: int) -> bool:
    """Returns whether gate and up are taken apart after the kernel: it has columns of both in one tile."""
    block = min(tile.block_n, count)
    whole = count % block == 0 and block % 128 == 0
    return spec.gated == INTERLEAVED or (spec.gated == HALVES and not whole)


_TILE = TpuTile(16, 128, 128)
interpreted = InterpretedPallas(__name__, PallasConfig(_TILE, _TILE, _TILE))
"""The same kernels, simulated on the host with small tiles: platform `pallas-interpret`."""
