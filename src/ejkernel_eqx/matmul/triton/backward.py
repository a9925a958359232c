"""The host side of the backward: the gradients of the left side, of right sides and biases."""

import jax
import jax.numpy as jnp
from jax import Array

from ..._take import take_along
from ...core import Named
from ...launch import NOTHING, Options, result, result_like
from ...launch.sizes import cdiv, padded
from ..epilogue import before_activation
from ..spec import alike, GroupedArrays, GroupedSpec
from . import backward_kernels
from .call import grouped, launcher, stored_numbers, TritonConfig
from .hopper.call import right_gradient
from .hopper.tile_sizes import check
from .tile_sizes import GroupedTile

_SUM = 4
_BIAS_TILE = GroupedTile(64, 128, 16, 4, 3)
"""Of the gradient of a bias alone, beside Hopper's kernel."""
_COLLECTED = 1024  # columns of the left side whose gradient a program adds up


def backward(
    arrays: GroupedArrays, spec: GroupedSpec, config: TritonConfig, saved: Named, cotangents: Named
) -> Named:
    """All gradients; those of right sides and biases are summed over all rows by one program."""
    arrays = alike(arrays)
    check(("lhs", "rhs"), config, arrays, spec)
    dz, du = before_activation(cotangents["out"], saved, spec, arrays.lhs.dtype)
    grads = {"lhs": _left_gradient(arrays, spec, config, dz, du)}
    grads |= _right_gradients(arrays, spec, config, dz, ("rhs", "bias"))
    if du is not None:
        grads |= _right_gradients(arrays, spec, config, du, ("up", "up_bias"))
    return grads


def _left_gradient(
    arrays: GroupedArrays,
    spec: GroupedSpec,
    config: TritonConfig,
    dz: Array,
    du: Array | None,
) -> Array:
    """`dz right^T`, plus that of the up side: the same kernel with the right sides transposed."""
    batch, length, inner = arrays.lhs.shape
    # The left sides are the cotangents: they have a row for each row of the result, gathered or not.
    launch = launcher(arrays, config).knowing({"lhs": dz, "other_lhs": du}, L=arrays.num_rows)
    width = dz.shape[-1]
    out = result(batch, arrays.num_rows, inner, dtype=arrays.lhs.dtype)
    results = grouped(
        launch,
        config.lhs,
        {"out": out, "gate": NOTHING, "up_z": NOTHING},
        K=width,
        W=inner,
        N=inner,
        KIND=0 if du is None else _SUM,
        TRANSPOSED=not spec.transpose_rhs,
        ROW_SCALE=arrays.stored is not None,
        **stored_numbers(arrays, spec),
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
    # Rows past the last group take a row past the end, and so sort behind all others.
    taken = jnp.where(real, jnp.clip(arrays.rows, 0, length - 1), length)
    # A stable sort keeps the rows of a sum in their order, so that it is the same in every run.
    order = jnp.argsort(taken, -1, stable=True)
    ordered = take_along(taken, order, -1)
    every = jnp.arange(length + 1, dtype=jnp.int32)
    starts = jax.vmap(lambda row: jnp.searchsorted(row, every))(ordered)
    return order.astype(jnp.int32), starts.astype(jnp.int32)


def _right_gradients(
    arrays: GroupedArrays, spec: GroupedSpec, config: TritonConfig, dz: Array, names: tuple[str, str]
) -> Named:
    """The gradients of a right side and its bias, of those that the call has."""
    right, bias = (getattr(arrays, name) for name in names)
    tile, launch = config.rhs, launcher(arrays, config)
    grads: Named = {}
    if tile.hopper_programs:
        if right is not None:
            grads = {names[0]: right_gradient(launch, tile, arrays, dz, right, spec.transpose_rhs)}
        # Hopper's kernel has no bias: what is left for Triton's is the bias alone.
        right, tile = None, _BIAS_TILE
    if right is None and bias is None:
        return grads
    batch, count = arrays.sizes.shape
    mapped = arrays.right.ndim == 4
    inner, width = arrays.lhs.shape[-1], dz.shape[-1]
    lead = (batch,) if mapped else ()
    # Matrices that leading axes share have the rows of all of them.
    most = arrays.sizes if mapped else arrays.sizes.sum(0)
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
    made = {names[0]: (right, "dright"), names[1]: (bias, "dbias")}
    return grads | {name: results[of] for name, (x, of) in made.items() if x is not None}
