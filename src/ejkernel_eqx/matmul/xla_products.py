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
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import jaxpr_as_fun, Primitive
from jax.interpreters import ad, batching, mlir

from .._broadcast import like
from ..core.arguments import accumulator
from ..parallel import match_varying
from . import xla_loops
from .xla_loops import Form as Form

_rows_p = Primitive("ejkernel_grouped_rows")
_groups_p = Primitive("ejkernel_grouped_groups")


def rows(x: Array, w: Any, sizes: Array, index: Array | None, form: Form) -> Array:
    """`[*, M, N]` of `x [*, M, K]` (`[*, L, K]` with `index [*, M]`), `w [E, K, N]`, an array or a quantised weight, and `sizes [*, E]`."""
    form = dataclasses.replace(form, own=w.ndim - 3)
    return _bind(_rows_p, xla_loops.rows, x, w, sizes, index, form)


def groups(x: Array, y: Array, sizes: Array, index: Array | None, form: Form) -> Array:
    """`[E, K, N]` of `x [*, M, K]`, `y [*, M, N]` and `sizes [*, E]`, after the leading axes that it has of its own."""
    return _bind(_groups_p, xla_loops.groups, x, y, sizes, index, form)


def collect(rows: Array, index: Array | None, sizes: Array, length: Any) -> Array:
    """The sums `[*, L, K]` of the rows `[*, M, K]` that were taken from each of `length` rows."""
    if index is None:
        return rows
    row = like(jnp.arange(index.shape[-1], dtype=sizes.dtype), sizes)
    # Rows past the last group are sent past the end, where the sum drops them.
    index = jnp.where(row < jnp.sum(sizes, -1, dtype=sizes.dtype, keepdims=True), index, length)

    def add(rows: Array, index: Array) -> Array:
        # The sum is in the wide dtype and rounded once, as many rows may take the same one.
        zeros = match_varying(jnp.zeros((length, rows.shape[-1]), accumulator(rows.dtype)), rows)
        return zeros.at[index].add(rows.astype(zeros.dtype), mode="drop").astype(rows.dtype)

    for _ in range(rows.ndim - 2):
        add = jax.vmap(add)
    return add(rows, index)


# What JAX needs to know of them


def _bind(
    primitive: Primitive,
    function: Callable[..., Array],
    *arguments: Any,
) -> Array:
    *arrays, form = arguments
    operands, tree = jax.tree.flatten(tuple(arrays))  # of a quantised weight, its parts
    operands = match_varying(operands, operands)
    plain = lambda *operands: [function(*tree.unflatten(operands), form)]
    jaxpr = jax.make_jaxpr(plain)(*operands)
    (result,) = primitive.bind(*operands, jaxpr=jaxpr, form=form, tree=tree)
    return result


def _run(*operands: Array, jaxpr: Any, form: Form, tree: Any) -> list[Array]:
    return jaxpr_as_fun(jaxpr)(*operands)


def _run_on_tpu(function: Callable[..., Array]) -> Callable[..., list[Array]]:
    return lambda *operands, jaxpr, form, tree: [function(*tree.unflatten(operands), form)]


def _jvp(
    product: Callable[..., Array], operands: Any, tangents: Any, *, jaxpr: Any, form: Form, tree: Any
) -> tuple[Any, Any]:
    x, y, sizes, index = tree.unflatten(operands)
    parts = [
        product(*pair, sizes, index, form)
        for pair, t in (((tangents[0], y), tangents[0]), ((x, tangents[1]), tangents[1]))
        if not isinstance(t, ad.Zero)
    ]
    out = product(x, y, sizes, index, form)
    return [out], [sum(parts[1:], parts[0]) if parts else ad.Zero(jax.typeof(out).to_tangent_aval())]


def _transpose(
    of_second: Callable[..., Array], cotangents: Any, *operands: Any, jaxpr: Any, form: Form, tree: Any
) -> list[Any]:
    """The transpose of a product. `of_second`: the product that the cotangent of the second operand is."""
    (cotangent,), (x, y, sizes, index) = cotangents, tree.unflatten(operands)
    results: list[Any] = [None] * len(operands)
    # A result that nothing reads costs no product.
    if isinstance(cotangent, ad.Zero):
        return results
    if ad.is_undefined_primal(x):
        # A cotangent has the dtype of its operand, whatever that of the result.
        back = dataclasses.replace(form, dtype=x.aval.dtype.name, transposed=not form.transposed)
        moved, matrices = (cotangent, y) if of_second is groups else (y, cotangent)
        results[0] = collect(rows(moved, matrices, sizes, None, back), index, sizes, x.aval.shape[-2])
    if ad.is_undefined_primal(y):
        results[1] = of_second(x, cotangent, sizes, index, dataclasses.replace(form, dtype=y.aval.dtype.name))
    return results


def _map(
    product: Callable[..., Array], operands: Any, axes: Any, *, jaxpr: Any, form: Form, tree: Any
) -> tuple[Any, Any]:
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    own = form.own + (product is groups)
    seconds = range(1, 1 + len(jax.tree.leaves(tree.unflatten(operands)[1])))
    mapped = own > 0 or any(axes[i] is not None for i in seconds)
    front = [
        _in_front(x, axis, size, whole=i not in seconds or mapped)
        for i, (x, axis) in enumerate(zip(operands, axes, strict=True))
    ]
    return [product(*tree.unflatten(front), dataclasses.replace(form, own=own))], [0]


def _in_front(x: Array, axis: int | None, size: int, whole: bool) -> Array:
    if axis is not None:
        return jnp.moveaxis(x, axis, 0)
    return jnp.broadcast_to(x, (size, *x.shape)) if whole else x


for _primitive, _product, _other, _tpu in (
    (_rows_p, rows, groups, xla_loops.rows_on_tpu),
    (_groups_p, groups, rows, xla_loops.groups_on_tpu),
):
    _primitive.multiple_results = True
    _primitive.def_impl(_run)
    _primitive.def_abstract_eval(lambda *_, jaxpr, form, tree: jaxpr.out_avals)
    mlir.register_lowering(_primitive, mlir.lower_fun(_run, multiple_results=True))
    mlir.register_lowering(
        _primitive, mlir.lower_fun(_run_on_tpu(_tpu), multiple_results=True), platform="tpu"
    )
    ad.primitive_jvps[_primitive] = functools.partial(_jvp, _product)
    ad.primitive_transposes[_primitive] = functools.partial(_transpose, _other)
    batching.primitive_batchers[_primitive] = functools.partial(_map, _product)
