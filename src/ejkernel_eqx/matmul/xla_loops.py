"""The two products of `xla_products.py` as loops over tiles of rows whose length depends on the sizes, and JAX's own on TPU."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._shapes import is_symbolic
from ..core.arguments import accumulator
from ..parallel import match_varying
from ..quantised.dequantise import is_quantised


@dataclasses.dataclass(frozen=True)
class Form:
    """The options of a product.

    - `dtype`: of the result. `operand`: the dtype that tiles are multiplied in.
    - `transposed`: whether matrices of groups are `[N, K]`, those that are given and those that are made.
    - `block`: rows of a tile.
    - `own`: the number of leading axes, the first ones, that the matrices have; a product of groups is summed over the others.
    """

    dtype: str
    operand: str
    transposed: bool
    block: int
    own: int = 0


def rows(x: Array, w: Any, sizes: Array, index: Array | None, form: Form) -> Array:
    lead = x.ndim - 2
    count = sizes.shape[-1] if lead else None
    call = functools.partial(_of_one, form=form, most=count)
    for axis in reversed(range(lead)):
        call = jax.vmap(call, in_axes=(0, 0 if axis < form.own else None, 0, None if index is None else 0))
    return call(x, w, sizes, index)


def _of_one(x: Array, w: Any, sizes: Array, index: Array | None, form: Form, most: int | None) -> Array:
    length = x.shape[0] if index is None else index.shape[0]
    columns = w.shape[1] if form.transposed else w.shape[2]
    block, spare = _block(length, form.block)
    x, index = (_longer(x, spare), None) if index is None else (x, _longer(index, spare))
    starts, ends, tiles = _tiles(sizes, block)
    over = ((1,), (1 if form.transposed else 0,))

    def tile(number: Any, out: Array) -> Array:
        group = jnp.minimum(jnp.sum(tiles <= number, dtype=jnp.int32), sizes.shape[0] - 1)
        before = jnp.where(group > 0, tiles[group - 1], 0)
        start = starts[group] + (number - before) * block
        at = jnp.minimum(start, length + spare - block)
        product = _dot(_taken(x, index, at, block), w[group], over, form.operand)
        row = at + jnp.arange(block, dtype=jnp.int32)
        mine = (row >= start) & (row < ends[group])
        old = lax.dynamic_slice_in_dim(out, at, block)
        new = jnp.where(mine[:, None], product.astype(out.dtype), old)
        return lax.dynamic_update_slice_in_dim(out, new, at, 0)

    out = match_varying(jnp.zeros((length + spare, columns), form.dtype), (x, w, sizes))
    # Mapped, a number of tiles that depends on the sizes would have to be agreed on by all rows.
    bound = tiles[-1] if most is None else jnp.asarray(length, jnp.int32)
    if most is not None:  # at least as many as any sizes of groups take
        bound = bound // block + jnp.minimum(bound, most)
    return lax.fori_loop(jnp.zeros_like(bound), bound, tile, out)[:length]


def groups(x: Array, y: Array, sizes: Array, index: Array | None, form: Form) -> Array:
    lead = sizes.shape[:-1]
    own, shared = lead[: form.own], math.prod(lead[form.own :])
    merge: Any = lambda a, n: None if a is None else a.reshape((-1, shared, *a.shape[a.ndim - n :]))
    x, y, sizes, index = merge(x, 2), merge(y, 2), merge(sizes, 1), merge(index, 1)
    count, length = sizes.shape[-1], y.shape[2]
    block, spare = _block(length, form.block)
    pad = lambda a: _longer(a, spare, 2)
    x, y, index = (pad(x), pad(y), None) if index is None else (x, pad(y), pad(index))
    ends = jnp.cumsum(sizes, -1, dtype=jnp.int32)
    shape = (y.shape[-1], x.shape[-1]) if form.transposed else (x.shape[-1], y.shape[-1])
    varying = functools.partial(match_varying, like=(x, y, sizes))

    def group(number: Any, out: Array) -> Array:
        batch, e = number // count, number % count

        def row(b: Any, sum: Array) -> Array:
            pick: Any = lambda a: None if a is None else a[batch, b]
            end, size = ends[batch, b, e], sizes[batch, b, e]
            one_x, one_y, one_index = pick(x), pick(y), pick(index)

            def tile(i: Any, sum: Array) -> Array:
                start = end - size + i * block
                at = jnp.minimum(start, length + spare - block)
                place = at + jnp.arange(block, dtype=jnp.int32)
                mine = ((place >= start) & (place < end))[:, None]
                # Both, as rows of no group may be NaN.
                left = jnp.where(mine, _taken(one_x, one_index, at, block), 0)
                right = jnp.where(mine, lax.dynamic_slice_in_dim(one_y, at, block), 0)
                left, right = (right, left) if form.transposed else (left, right)
                return sum + _dot(left, right, ((0,), (0,)), form.operand)

            return lax.fori_loop(jnp.zeros_like(size), -(-size // block), tile, sum)

        zeros = varying(jnp.zeros(shape, accumulator(jnp.dtype(form.operand))))
        sum = lax.fori_loop(0, shared, row, zeros) if shared != 1 else row(0, zeros)
        return lax.dynamic_update_index_in_dim(out, sum.astype(out.dtype), number, 0)

    out = varying(jnp.zeros((math.prod(own) * count, *shape), form.dtype))
    return lax.fori_loop(0, out.shape[0], group, out).reshape(*own, count, *shape)


# How a TPU computes them: JAX's own products, which it has kernels for


def rows_on_tpu(x: Array, w: Any, sizes: Array, index: Array | None, form: Form) -> Array:
    if not _is_plain(sizes, (w,), form):
        return rows(x, w, sizes, index, form)
    x = x if index is None else jnp.take(x, index, axis=0, mode="clip")
    w = jnp.swapaxes(w, 1, 2) if form.transposed else w
    out = lax.ragged_dot(
        x.astype(form.operand), w, sizes, precision="highest", preferred_element_type=_wide(form)
    )
    return jnp.where(_in_groups(sizes, x.shape[0]), out, 0).astype(form.dtype)


def groups_on_tpu(x: Array, y: Array, sizes: Array, index: Array | None, form: Form) -> Array:
    if not _is_plain(sizes, (), form):
        return groups(x, y, sizes, index, form)
    x = x if index is None else jnp.take(x, index, axis=0, mode="clip")
    real = _in_groups(sizes, y.shape[0])
    x, y = (jnp.where(real, a, 0).astype(form.operand) for a in (x, y))
    over = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    left, right = (y, x) if form.transposed else (x, y)
    out = lax.ragged_dot_general(
        left, right, sizes, over, precision="highest", preferred_element_type=_wide(form)
    )
    return out.astype(form.dtype)


def _is_plain(sizes: Array, matrices: tuple[Any, ...], form: Form) -> bool:
    """Returns whether there are no leading axes, no symbols, and nothing would be converted as a whole."""
    known = not any(is_symbolic(n) for n in sizes.shape)
    arrays = not any(map(is_quantised, matrices))
    return sizes.ndim == 1 and known and arrays and all(w.dtype.name == form.operand for w in matrices)


def _in_groups(sizes: Array, length: Any) -> Array:
    """`[length, 1]`: the rows before the end of the last group."""
    return (jnp.arange(length, dtype=jnp.int32) < jnp.sum(sizes, dtype=jnp.int32))[:, None]


def _wide(form: Form) -> Any:
    return accumulator(jnp.dtype(form.operand))


def _block(length: Any, block: int) -> tuple[int, int]:
    """The rows of a tile, and how many have to be added for a tile to fit in."""
    return (block, block) if is_symbolic(length) else (min(block, length), 0)


def _longer(x: Array, spare: int, axis: int = 0) -> Array:
    return jnp.pad(x, [(0, spare if i == axis else 0) for i in range(x.ndim)]) if spare else x


def _tiles(sizes: Array, block: int) -> tuple[Array, Array, Array]:
    """The start and the end of each group, and the number of tiles up to its own."""
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    return ends - sizes, ends, jnp.cumsum(-(-sizes // block), dtype=jnp.int32)


def _taken(x: Array, index: Array | None, at: Array, block: int) -> Array:
    if index is None:
        return lax.dynamic_slice_in_dim(x, at, block)
    return jnp.take(x, lax.dynamic_slice_in_dim(index, at, block), axis=0, mode="clip")


def _dot(a: Array, b: Any, over: Any, operand: str) -> Array:
    a, b, wide = a.astype(operand), b.astype(operand), accumulator(jnp.dtype(operand))
    return lax.dot_general(a, b, (over, ((), ())), precision="highest", preferred_element_type=wide)
