"""The two products of grouped rows that everything else in plain XLA is made of, as operations that JAX differentiates.

With `x` and `y` of as many rows, groups of sizes `n_g` that follow one another, and a matrix for each group,

    rows(x, w)[r] = x[r] w[g]             for row r of group g, 0 past the last group
    groups(x, y)[g] = x_g^T y_g           summed over the rows of group g

Each is linear in either operand, and the transposes of both are again such products. So JAX differentiates them in both modes and any number of
times, though each is a loop whose length depends on the sizes. Rows are computed in tiles that start where their group does. A tile loads its
group's matrix alone, so the work follows the groups that have rows. `x` may be taken by an index: its rows are gathered tile by tile.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import jaxpr_as_fun, Primitive
from jax.interpreters import ad, batching, mlir

from .._broadcast import like
from .._sizes import is_symbolic
from ..core.arguments import accumulator
from ..parallel import match_varying

_rows_p = Primitive("ejkernel_grouped_rows")
_groups_p = Primitive("ejkernel_grouped_groups")


@dataclasses.dataclass(frozen=True)
class Form:
    """What a product is like.

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


def rows(x: Array, w: Array, sizes: Array, index: Array | None, form: Form) -> Array:
    """`[*, M, N]` of `x [*, M, K]` (`[*, L, K]` with `index [*, M]`), `w [E, K, N]` and `sizes [*, E]`."""
    form = dataclasses.replace(form, own=w.ndim - 3)
    return _bind(_rows_p, _rows, (x, w), sizes, index, form)


def groups(x: Array, y: Array, sizes: Array, index: Array | None, form: Form) -> Array:
    """`[E, K, N]` of `x [*, M, K]`, `y [*, M, N]` and `sizes [*, E]`, after the leading axes that it has of its own."""
    return _bind(_groups_p, _groups, (x, y), sizes, index, form)


def collect(rows: Array, index: Array | None, sizes: Array, length: Any) -> Array:
    """The sums `[*, L, K]` of the rows `[*, M, K]` that were taken from each of `length` rows."""
    if index is None:
        return rows
    past = jnp.sum(sizes, -1, dtype=sizes.dtype, keepdims=True) <= like(
        jnp.arange(index.shape[-1], dtype=sizes.dtype), sizes
    )
    index = jnp.where(past, length, index)

    def add(rows: Array, index: Array) -> Array:
        zeros = match_varying(jnp.zeros((length, rows.shape[-1]), accumulator(rows.dtype)), rows)
        return zeros.at[index].add(rows.astype(zeros.dtype), mode="drop").astype(rows.dtype)

    for _ in range(rows.ndim - 2):
        add = jax.vmap(add)
    return add(rows, index)


# How they are computed


def _rows(x: Array, w: Array, sizes: Array, index: Array | None, form: Form) -> Array:
    lead = x.ndim - 2
    count = sizes.shape[-1] if lead else None
    call = functools.partial(_rows_of_one, form=form, most=count)
    for axis in reversed(range(lead)):
        call = jax.vmap(call, in_axes=(0, 0 if axis < form.own else None, 0, None if index is None else 0))
    return call(x, w, sizes, index)


def _rows_of_one(
    x: Array, w: Array, sizes: Array, index: Array | None, form: Form, most: int | None
) -> Array:
    length = x.shape[0] if index is None else index.shape[0]
    columns = w.shape[1] if form.transposed else w.shape[2]
    block, spare = _block(length, form.block)
    x, index = (_longer(x, spare), None) if index is None else (x, _longer(index, spare))
    starts, ends, tiles = _tiles(sizes, block)

    def tile(number: Any, out: Array) -> Array:
        group = jnp.minimum(jnp.sum(tiles <= number, dtype=jnp.int32), sizes.shape[0] - 1)
        before = jnp.where(group > 0, tiles[group - 1], 0)
        start = starts[group] + (number - before) * block
        at = jnp.minimum(start, length + spare - block)
        product = _dot(
            _taken(x, index, at, block), w[group], ((1,), (1 if form.transposed else 0,)), form.operand
        )
        row = at + jnp.arange(block, dtype=jnp.int32)
        mine = (row >= start) & (row < ends[group])
        old = lax.dynamic_slice_in_dim(out, at, block)
        return lax.dynamic_update_slice_in_dim(
            out, jnp.where(mine[:, None], product.astype(out.dtype), old), at, 0
        )

    out = match_varying(jnp.zeros((length + spare, columns), form.dtype), (x, w, sizes))
    # Mapped, a number of tiles that depends on the sizes would have to be agreed on by all rows.
    bound = tiles[-1] if most is None else _bound(length, block, most)
    return lax.fori_loop(jnp.zeros_like(bound), bound, tile, out)[:length]


def _groups(x: Array, y: Array, sizes: Array, index: Array | None, form: Form) -> Array:
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


def _block(length: Any, block: int) -> tuple[int, int]:
    """The rows of a tile, and how many have to be added for a tile to fit in."""
    return (block, block) if is_symbolic(length) else (min(block, length), 0)


def _longer(x: Array, spare: int, axis: int = 0) -> Array:
    return jnp.pad(x, [(0, spare if i == axis else 0) for i in range(x.ndim)]) if spare else x


def _tiles(sizes: Array, block: int) -> tuple[Array, Array, Array]:
    """Where each group starts and ends, and the number of tiles up to its own."""
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    return ends - sizes, ends, jnp.cumsum(-(-sizes // block), dtype=jnp.int32)


def _bound(length: Any, block: int, count: int) -> Array:
    """At least as many tiles as any sizes of groups take."""
    most = jnp.asarray(length, jnp.int32)
    return most // block + jnp.minimum(most, count)


def _taken(x: Array, index: Array | None, at: Array, block: int) -> Array:
    if index is None:
        return lax.dynamic_slice_in_dim(x, at, block)
    return jnp.take(x, lax.dynamic_slice_in_dim(index, at, block), axis=0, mode="clip")


def _dot(a: Array, b: Array, over: Any, operand: str) -> Array:
    wide = accumulator(jnp.dtype(operand))
    a, b = a.astype(operand), b.astype(operand)
    return lax.dot_general(a, b, (over, ((), ())), precision="highest", preferred_element_type=wide)


# What JAX needs to know of them


def _bind(
    primitive: Primitive,
    function: Callable[..., Array],
    two: tuple[Array, Array],
    sizes: Array,
    index: Array | None,
    form: Form,
) -> Array:
    operands = (*two, sizes) if index is None else (*two, sizes, index)
    operands = match_varying(operands, operands)
    plain = lambda x, y, sizes, index=None: [function(x, y, sizes, index, form)]
    jaxpr = jax.make_jaxpr(plain)(*operands)
    (result,) = primitive.bind(*operands, jaxpr=jaxpr, form=form)
    return result


def _run(*operands: Array, jaxpr: Any, form: Form) -> list[Array]:
    return jaxpr_as_fun(jaxpr)(*operands)


def _split(operands: Any) -> tuple[Any, Any, Any, Any]:
    x, y, sizes, *index = operands
    return x, y, sizes, index[0] if index else None


def _jvp(
    product: Callable[..., Array], operands: Any, tangents: Any, *, jaxpr: Any, form: Form
) -> tuple[Any, Any]:
    x, y, sizes, index = _split(operands)
    parts = [
        product(*pair, sizes, index, form)
        for pair, t in (((tangents[0], y), tangents[0]), ((x, tangents[1]), tangents[1]))
        if not isinstance(t, ad.Zero)
    ]
    out = product(x, y, sizes, index, form)
    return [out], [sum(parts[1:], parts[0]) if parts else ad.Zero(jax.typeof(out).to_tangent_aval())]


def _transpose_rows(cotangents: Any, *operands: Any, jaxpr: Any, form: Form) -> list[Any]:
    (cotangent,), (x, w, sizes, index) = cotangents, _split(operands)
    found: list[Any] = [None] * len(operands)
    if isinstance(cotangent, ad.Zero):
        return found
    if ad.is_undefined_primal(x):
        back = dataclasses.replace(form, dtype=x.aval.dtype.name, transposed=not form.transposed)
        found[0] = collect(rows(cotangent, w, sizes, None, back), index, sizes, x.aval.shape[-2])
    if ad.is_undefined_primal(w):
        found[1] = groups(x, cotangent, sizes, index, dataclasses.replace(form, dtype=w.aval.dtype.name))
    return found


def _transpose_groups(cotangents: Any, *operands: Any, jaxpr: Any, form: Form) -> list[Any]:
    (cotangent,), (x, y, sizes, index) = cotangents, _split(operands)
    found: list[Any] = [None] * len(operands)
    if isinstance(cotangent, ad.Zero):
        return found
    if ad.is_undefined_primal(x):
        back = dataclasses.replace(form, dtype=x.aval.dtype.name, transposed=not form.transposed)
        found[0] = collect(rows(y, cotangent, sizes, None, back), index, sizes, x.aval.shape[-2])
    if ad.is_undefined_primal(y):
        found[1] = rows(x, cotangent, sizes, index, dataclasses.replace(form, dtype=y.aval.dtype.name))
    return found


def _map_rows(operands: Any, axes: Any, *, jaxpr: Any, form: Form) -> tuple[Any, Any]:
    size = _mapped_size(operands, axes)
    front = [
        _in_front(x, axis, size, whole=i != 1 or form.own > 0)
        for i, (x, axis) in enumerate(zip(operands, axes, strict=True))
    ]
    return [rows(*_split(front), form)], [0]


def _map_groups(operands: Any, axes: Any, *, jaxpr: Any, form: Form) -> tuple[Any, Any]:
    size = _mapped_size(operands, axes)
    front = [_in_front(x, axis, size, whole=True) for x, axis in zip(operands, axes, strict=True)]
    return [groups(*_split(front), dataclasses.replace(form, own=form.own + 1))], [0]


def _mapped_size(operands: Any, axes: Any) -> int:
    return next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)


def _in_front(x: Array, axis: int | None, size: int, whole: bool) -> Array:
    if axis is not None:
        return jnp.moveaxis(x, axis, 0)
    return jnp.broadcast_to(x, (size, *x.shape)) if whole else x


for _primitive, _product, _transpose, _map in (
    (_rows_p, rows, _transpose_rows, _map_rows),
    (_groups_p, groups, _transpose_groups, _map_groups),
):
    _primitive.multiple_results = True
    _primitive.def_impl(_run)
    _primitive.def_abstract_eval(lambda *_, jaxpr, form: jaxpr.out_avals)
    mlir.register_lowering(_primitive, mlir.lower_fun(_run, multiple_results=True))
    ad.primitive_jvps[_primitive] = functools.partial(_jvp, _product)
    ad.primitive_transposes[_primitive] = _transpose
    batching.primitive_batchers[_primitive] = _map
