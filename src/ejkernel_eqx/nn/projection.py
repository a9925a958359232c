"""Projections of all layers: over any number of leading axes, on any mesh, and in the right dtype."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from .._shapes import is_symbolic
from ..core.arguments import accumulator
from ..matmul import Float8Weight
from ..matmul.dense.spec import FEW_ROWS
from ..quantised import QuantizedWeight
from ..quantised.dequantise import is_quantised

Weight = Array | QuantizedWeight | Float8Weight


def project(name: str, layer: Any, x: Array, features: int) -> Array:
    """Applies the projection `layer`, called `name`, to the last axis of `x` `[..., in]`, and returns `[..., features]`.

    Exactly an `equinox.nn.Linear` is computed as one matrix product. Any other callable in its place (low-rank updates, quantised weights,
    a function) is mapped with `jax.vmap` over single vectors `[in]`, as Equinox's layers expect, unless it has a method `over_rows`. The result
    has the dtype of `x`, which the layer has cast to its compute dtype.
    """
    if type(layer) is eqx.nn.Linear:
        check_linear(name, layer, x, features)
        return product(x, layer.weight, layer.bias)
    if hasattr(layer, "over_rows"):
        return layer.over_rows(name, x, features)
    if not callable(layer):
        raise ValueError(
            f"{name}: expected an equinox.nn.Linear or a callable from a vector to a vector, received {type(layer).__name__}; write "
            "quantised or low-rank projections as an equinox.Module with a __call__."
        )
    over_last = layer
    for _ in x.shape[:-1]:
        over_last = jax.vmap(over_last)
    y: Any = over_last(x)
    expected = (*x.shape[:-1], features)
    if getattr(y, "shape", None) != expected:
        raise ValueError(
            f"{name}: expected a projection from [{x.shape[-1]}] to [{features}], received one that returns "
            f"{getattr(y, 'shape', type(y).__name__)} for {x.shape}, not {expected}; build it with the sizes of the one it replaces."
        )
    return y.astype(x.dtype)


def project_parts(
    name: str, layer: Any, x: Array, widths: Sequence[int], groups: int = 1
) -> tuple[Array, ...]:
    """The parts of a projection whose features are, for each of `groups` groups, parts of these `widths`: each `[..., groups * width]`.

    Parts of a result that other kernels read are copied. With more tokens than features it is the rows of the weight that are, and each part
    is a product of its own.
    """
    features, ends = groups * sum(widths), [*itertools.accumulate(widths)][:-1]
    weight: Any = getattr(layer, "weight", None)
    plain = type(layer) is eqx.nn.Linear and not in_float8(x, weight)
    if plain and _more_tokens(x, features) and mesh_of((x, weight)) is None:
        check_linear(name, layer, x, features)
        apart = lambda a: _parts_of(a, ends, groups, 0)
        weights = apart(weight.astype(x.dtype))
        biases = [None for _ in widths] if layer.bias is None else apart(layer.bias)
        return tuple(product(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    y = project(name, layer, x, features)
    return tuple(_parts_of(y, ends, groups, y.ndim - 1))


def project_together(layers: Mapping[str, Any], x: Array, widths: Sequence[int]) -> tuple[Array, ...]:
    """`project` of several layers by name, of these widths. Narrow ones take the time of reading `x`: with more tokens than features in all,
    those of `equinox.nn.Linear`s without biases are one product."""
    plain = all(type(layer) is eqx.nn.Linear and layer.bias is None for layer in layers.values())
    weights = [layer.weight for layer in layers.values()] if plain else []
    plain = plain and not any(in_float8(x, w) for w in weights)
    if plain and _more_tokens(x, sum(widths)) and mesh_of((x, weights)) is None:
        for (name, layer), width in zip(layers.items(), widths, strict=True):
            check_linear(name, layer, x, width)
        ends = [*itertools.accumulate(widths)][:-1]
        return tuple(
            jnp.split(product(x, jnp.concatenate([w.astype(x.dtype) for w in weights])), ends, axis=-1)
        )
    return tuple(
        project(name, layer, x, width) for (name, layer), width in zip(layers.items(), widths, strict=True)
    )


def _more_tokens(x: Array, features: int) -> bool:
    """Returns whether a call has as many tokens as features, or a number that is symbolic."""
    tokens = math.prod(x.shape[:-1])
    return is_symbolic(tokens) or tokens >= features


def _parts_of(x: Array, ends: Sequence[int], groups: int, axis: int) -> list[Array]:
    """The parts along an axis that consists of `groups` groups of them."""
    lead, rest = x.shape[:axis], x.shape[axis + 1 :]
    grouped = x.reshape(*lead, groups, x.shape[axis] // groups, *rest)
    parts = jnp.split(grouped, ends, axis=axis + 1)
    return [part.reshape(*lead, groups * part.shape[axis + 1], *rest) for part in parts]


def check_linear(name: str, layer: eqx.nn.Linear, x: Array, features: int) -> None:
    if layer.weight.shape != (features, x.shape[-1]):
        raise ValueError(
            f"{name}: expected an equinox.nn.Linear from [{x.shape[-1]}] to [{features}], received one with a weight of shape "
            f"{layer.weight.shape}; build it with the sizes of the one it replaces, and use jax.vmap over stacked layers."
        )


def project_apart(name: str, layer: Any, x: Array, features: int) -> tuple[Array, Array | None]:
    """`project` without the bias of an `equinox.nn.Linear`, and that bias, for operations that add it in a wider dtype."""
    if type(layer) is not eqx.nn.Linear:
        return project(name, layer, x, features), None
    bare = eqx.tree_at(lambda linear: linear.bias, layer, None, is_leaf=lambda leaf: leaf is None)
    return project(name, bare, x, features), layer.bias


multiplied_by: Any = jax.make_user_context(None)
"""`multiplied_by(matmul)` is a context in which a [`Matmul`][ejkernel_eqx.Matmul] multiplies few rows, and many by quantised weights. A model opens
it round a layer in calls with a cache: in a step of few tokens the time is that of reading the weights."""


def are_few(x: Array) -> bool:
    """Returns whether the time of a projection of these rows is that of reading its weights."""
    count = math.prod(x.shape[:-1])
    return not is_symbolic(count) and count <= FEW_ROWS


def in_float8(x: Array, weight: Any) -> bool:
    """Returns whether a weight multiplies these rows in float8: many rows, and a weight that asks for it, a quantised one on no explicit mesh."""
    if getattr(weight, "float8_rows", None) is None or are_few(x):
        return False
    return isinstance(weight, Float8Weight) or mesh_of((x, weight)) is None


def are_multiplied(x: Array, weights: Sequence[Any]) -> bool:
    """Returns whether a [`Matmul`][ejkernel_eqx.Matmul] multiplies rows by these weights: by arrays, or by quantised ones of one format. On several
    devices the compiler splits weights whose rows share scales better than the kernel, and makes floats of them first."""
    if any(in_float8(x, w) for w in weights):
        return False
    if not any(map(is_quantised, weights)):
        return True
    forms = {w.format if is_quantised(w) and not w.transposed else None for w in weights}
    form = forms.pop()
    if forms or form is None:
        return False
    return jax.device_count() == 1 or form.block[0] == 1


def in_dtype(weight: Weight, dtype: Any) -> Any:
    """The weight of a `Matmul`: an array in this dtype, or quantised as it is."""
    return weight if is_quantised(weight) else weight.astype(dtype)


def product(x: Array, weight: Weight, bias: Array | None = None, dtype: Any = None) -> Array:
    """`x` `[..., in]` times the rows of `weight` `[out, in]`, on any mesh: `[..., out]` in `dtype`, by default that of `x`, to which weight and
    bias are cast."""
    matmul: Any = multiplied_by.value
    if (
        matmul is not None
        and dtype is None
        and (are_few(x) or is_quantised(weight))
        and are_multiplied(x, [weight])
        and mesh_of((x, weight)) is None
    ):
        return matmul(x, in_dtype(weight, x.dtype), biases=(bias,))
    if dtype is None and in_float8(x, weight):
        mesh = mesh_of((x, weight))
        return _product(None, None, x, weight, bias) if mesh is None else _float8_over(mesh, x, weight, bias)
    operands = [a.astype(x.dtype) for a in (x, weight, bias) if a is not None]
    mesh = mesh_of(operands)
    return _product(dtype, None, *operands) if mesh is None else _over_mesh(mesh, dtype, *operands)


def _product(
    dtype: Any,
    out: NamedSharding | None,
    x: Array,
    weight: Weight,
    bias: Array | None = None,
) -> Array:
    axes = (((x.ndim - 1,), (1,)), ((), ()))
    if isinstance(weight, QuantizedWeight | Float8Weight):
        y = weight.float8_rows(x, weight)
    else:
        y = lax.dot_general(x, weight, axes, preferred_element_type=dtype, out_sharding=out)
    if bias is None:
        return y
    # The result is that of an addition in the dtype of y. The gradient of the bias, a sum over all rows, is taken in float32.
    wide = accumulator(y.dtype)
    return (y.astype(wide) + lax.expand_dims(bias.astype(wide), range(y.ndim - 1))).astype(y.dtype)


# Compiled: outside `jit`, only compiled functions accept arrays on the mesh together with others that are not.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _over_mesh(mesh: Any, dtype: Any, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """The product if shardings are part of the types: laid out as `x` along the leading axes and as the weight's rows along the last.
    A mesh axis that splits the contracted axis becomes a sum over devices; one that would split both the leading axes and the rows
    stays with `x`, as in training with parameters sharded over the devices of the batch."""
    # Arrays on no mesh are replicated on this one, and so are their gradients.
    x, weight = (on_mesh(mesh, a) for a in (x, weight))
    lead = jax.typeof(x).sharding.spec[:-1]
    taken = {axis for entry in lead for axis in mesh_axes(entry)}
    rows = tuple(axis for axis in mesh_axes(jax.typeof(weight).sharding.spec[0]) if axis not in taken) or None
    bias = None if bias is None else reshard(bias, mesh, (rows,))
    return _product(dtype, NamedSharding(mesh, PartitionSpec(*lead, rows)), x, weight, bias)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _float8_over(mesh: Any, x: Array, weight: Float8Weight, bias: Array | None) -> Array:
    """The product in float8 on an explicit mesh. Each device multiplies its rows by the whole weight, as in training with parameters sharded over the
    devices of the batch."""
    x, array = on_mesh(mesh, x), on_mesh(mesh, jnp.asarray(weight.array))
    *lead, last = jax.typeof(x).sharding.spec
    axes_in = lambda entries: {axis for entry in entries for axis in mesh_axes(entry)}
    wide = lambda entries: sorted(axis for axis in axes_in(entries) - axes_in(lead) if mesh.shape[axis] > 1)
    split = [("features", wide([last])), ("a weight", wide(jax.typeof(array).sharding.spec))]
    if received := [f"{name} split by {', '.join(axes)}" for name, axes in split if axes]:
        raise ValueError(
            f"x: expected rows split by every axis of the mesh that splits the weight, which is multiplied in float8 (with_float8_training), and no "
            f"features split, received {' and '.join(received)}; split rows by it, leave it out, or call ejx.with_float8_training(model, False)."
        )
    weight = eqx.tree_at(lambda weight: weight.array, weight, reshard(array, mesh, ()))
    bias = None if bias is None else reshard(bias, mesh, ())
    return _product(None, None, reshard(x, mesh, (*lead, None)), weight, bias)


def mesh_of(arrays: Any) -> Any:
    """The explicit mesh in the types of the arrays themselves, whatever the context; without one, `None`."""
    for x in jax.tree.leaves(arrays):
        if isinstance(x, Array) and (mesh := jax.typeof(x).sharding.mesh).explicit_axes:
            return mesh
    return None


def is_shared(x: Array) -> bool:
    """Returns whether several devices have the same part of `x`, as the types on an explicit mesh say."""
    sharding = jax.typeof(x).sharding
    split = {axis for entry in sharding.spec for axis in mesh_axes(entry)}
    return any(sharding.mesh.shape[axis] > 1 for axis in set(sharding.mesh.explicit_axes) - split)


def on_mesh(mesh: Any, x: Array) -> Array:
    """The array, replicated if it was on no mesh."""
    return reshard(x, mesh, ()) if jax.typeof(x).sharding.mesh.empty else x


def reshard(x: Array, mesh: Any, spec: tuple[Any, ...]) -> Array:
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))


def mesh_axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def compute_dtype_of(chosen: str | None, projections: Any, *inputs: Any) -> Any:
    """The chosen dtype; without one, the promoted dtype of the inputs and of the weights of every `equinox.nn.Linear` in `projections`."""
    if chosen is not None:
        return jnp.dtype(chosen)
    is_linear = lambda node: isinstance(node, eqx.nn.Linear)
    found = jax.tree.leaves(projections, is_leaf=is_linear)
    weights = [w for node in found if is_linear(node) if _is_wide(w := node.weight)]
    return promoted(*weights, *inputs)


def leading_axes_of(projections: Any) -> int:
    """The number of leading axes of stacked layers."""
    is_linear = lambda node: isinstance(node, eqx.nn.Linear)
    found = jax.tree.leaves(projections, is_leaf=is_linear)
    return next((node.weight.ndim - 2 for node in found if is_linear(node)), 0)


def stored_dtype_of(chosen: str | None, projections: Any) -> Any:
    """The dtype of what a layer stores between calls: the chosen one, or else the promoted dtype of its projections' weights."""
    if chosen is not None:
        return jnp.dtype(chosen)
    leaves = jax.tree.leaves(projections, is_leaf=is_quantised)
    return promoted(*(leaf for leaf in leaves if _is_wide(leaf)))


def _is_wide(leaf: Any) -> bool:
    """Returns whether a leaf is a floating-point array of at least 16 bits, so neither quantised nor a key."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > 1


def promoted(*arrays: Any) -> Any:
    """The promoted dtype of arrays, independent of how JAX is configured to promote dtypes; float32 of none."""
    dtypes = [x.dtype for x in arrays] or [jnp.float32]
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)
