"""From tokens to features and from features to logits, on any mesh."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from ..nn.projection import mesh_axes, reshard


def explicit_mesh(tree: Any) -> Any:
    """The mesh whose axes are part of the types of some array; without one, `None`."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def embed(table: Array, tokens: Array) -> Array:
    """The rows `[..., E]` of the table `[vocabulary, E]`; on an explicit mesh laid out as the tokens, with all features on each device."""
    mesh = explicit_mesh((table, tokens))
    return table[tokens] if mesh is None else _embed_on(mesh, table, tokens)


# Compiled, as the products of `nn.projection`: outside of `jit` only a compiled function takes arrays on a mesh together with others.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _embed_on(mesh: Any, table: Array, tokens: Array) -> Array:
    table, tokens = (_on(mesh, x) for x in (table, tokens))
    spec = PartitionSpec(*jax.typeof(tokens).sharding.spec, None)
    return table.at[tokens].get(out_sharding=NamedSharding(mesh, spec))


def logits_of(weight: Array, x: Array) -> Array:
    """Float32 `[..., vocabulary]`; on an explicit mesh laid out as `x` and, along the vocabulary, as the rows of the weight."""
    weight, mesh = weight.astype(x.dtype), explicit_mesh((weight, x))
    return _logits(None, weight, x) if mesh is None else _logits_on(mesh, weight, x)


def _logits(out: Any, weight: Array, x: Array) -> Array:
    axes = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, weight, axes, preferred_element_type=jnp.float32, out_sharding=out)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _logits_on(mesh: Any, weight: Array, x: Array) -> Array:
    weight, x = (_on(mesh, a) for a in (weight, x))
    lead = jax.typeof(x).sharding.spec[:-1]
    taken = {axis for entry in lead for axis in mesh_axes(entry)}
    rows = tuple(axis for axis in mesh_axes(jax.typeof(weight).sharding.spec[0]) if axis not in taken)
    return _logits(NamedSharding(mesh, PartitionSpec(*lead, rows or None)), weight, x)


def _on(mesh: Any, x: Array) -> Array:
    return reshard(x, mesh, ()) if jax.typeof(x).sharding.mesh.empty else x
