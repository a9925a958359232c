"""The one place where a layer multiplies by weights: any projection over any number of leading axes, on any mesh, and in which dtype."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec


def project(name: str, layer: Any, x: Array, features: int) -> Array:
    """`layer`, the projection called `name`, over the last axis of `x` `[..., in]`: `[..., features]`.

    An `equinox.nn.Linear` and nothing else is one product of matrices. Whatever else stands in its place (low-rank updates, quantised
    weights, a function) is called with one vector `[in]` at a time under `jax.vmap`, as Equinox's layers are. The dtype is that of `x`,
    which the layer has brought to the one it computes in.
    """
    if type(layer) is eqx.nn.Linear:
        if layer.weight.shape != (features, x.shape[-1]):
            raise ValueError(
                f"{name}: expected an equinox.nn.Linear from [{x.shape[-1]}] to [{features}], received one with a weight of shape "
                f"{layer.weight.shape}; build it with the sizes of the one it replaces, and jax.vmap over stacked layers."
            )
        return _linear(layer, x)
    if not callable(layer):
        raise ValueError(
            f"{name}: expected an equinox.nn.Linear or a callable from a vector to a vector, received {type(layer).__name__}; a quantised "
            "or low-rank projection is an equinox.Module with a __call__."
        )
    over_last = layer
    for _ in x.shape[:-1]:
        over_last = jax.vmap(over_last)
    y: Any = over_last(x)
    expected = (*x.shape[:-1], features)
    if getattr(y, "shape", None) != expected:
        raise ValueError(
            f"{name}: expected a projection from [{x.shape[-1]}] to [{features}], received one that gives "
            f"{getattr(y, 'shape', type(y).__name__)} for {x.shape}, not {expected}; build it with the sizes of the one it replaces."
        )
    return y.astype(x.dtype)


def project_apart(name: str, layer: Any, x: Array, features: int) -> tuple[Array, Array | None]:
    """`project`, with the bias of an `equinox.nn.Linear` apart, for an operation that adds it in a wider dtype."""
    if type(layer) is not eqx.nn.Linear:
        return project(name, layer, x, features), None
    bare = eqx.tree_at(lambda linear: linear.bias, layer, None, is_leaf=lambda leaf: leaf is None)
    return project(name, bare, x, features), layer.bias


def _linear(linear: eqx.nn.Linear, x: Array) -> Array:
    operands = [a.astype(x.dtype) for a in (x, linear.weight, linear.bias) if a is not None]
    meshes = [mesh for a in operands if (mesh := jax.typeof(a).sharding.mesh).explicit_axes]
    return _over_mesh(meshes[0], *operands) if meshes else _product(None, *operands)


def _product(out: NamedSharding | None, x: Array, weight: Array, bias: Array | None = None) -> Array:
    y = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), out_sharding=out)
    return y if bias is None else y + lax.expand_dims(bias, range(y.ndim - 1))


# Compiled, since outside of `jit` only a compiled function takes arrays that are on the mesh together with others that are not.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _over_mesh(mesh: Any, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """The product where shardings are part of the types: laid out as `x` along its leading axes and as the weight's rows along the last.
    An axis of the mesh that splits what is summed over becomes a sum over devices; one that would split both the leading axes and the
    rows stays with `x`, as in training with parameters split over the batch's devices."""
    # What is on no mesh is whole on this one, so that its gradient is too.
    x, weight = (reshard(a, mesh, ()) if jax.typeof(a).sharding.mesh.empty else a for a in (x, weight))
    lead = jax.typeof(x).sharding.spec[:-1]
    taken = {axis for entry in lead for axis in mesh_axes(entry)}
    rows = tuple(axis for axis in mesh_axes(jax.typeof(weight).sharding.spec[0]) if axis not in taken) or None
    bias = None if bias is None else reshard(bias, mesh, (rows,))
    return _product(NamedSharding(mesh, PartitionSpec(*lead, rows)), x, weight, bias)


def reshard(x: Array, mesh: Any, spec: tuple[Any, ...]) -> Array:
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))


def mesh_axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def compute_dtype_of(chosen: str | None, projections: Any, *inputs: Any) -> Any:
    """The chosen dtype; without one, what the inputs and the weights of the `equinox.nn.Linear`s in `projections` promote to."""
    if chosen is not None:
        return jnp.dtype(chosen)
    is_linear = lambda node: isinstance(node, eqx.nn.Linear)
    found = jax.tree.leaves(projections, is_leaf=is_linear)
    weights = [w for node in found if is_linear(node) if _is_wide(w := node.weight)]
    return _promoted(weights, inputs)


def leading_axes_of(projections: Any) -> int:
    """How many axes stacked layers have in front of those of one."""
    is_linear = lambda node: isinstance(node, eqx.nn.Linear)
    found = jax.tree.leaves(projections, is_leaf=is_linear)
    return next((node.weight.ndim - 2 for node in found if is_linear(node)), 0)


def stored_dtype_of(chosen: str | None, projections: Any) -> Any:
    """What a layer keeps between calls: the chosen dtype; without one, what its projections' weights promote to."""
    if chosen is not None:
        return jnp.dtype(chosen)
    return _promoted([leaf for leaf in jax.tree.leaves(projections) if _is_wide(leaf)], ())


def _is_wide(leaf: Any) -> bool:
    """Whether an array is one of numbers to compute with, neither quantised nor a key."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > 1


def _promoted(weights: Any, inputs: Any) -> Any:
    dtypes = [x.dtype for x in (*weights, *inputs)] or [jnp.float32]
    # The rule holds whatever JAX is told to do with operands of two dtypes.
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)
