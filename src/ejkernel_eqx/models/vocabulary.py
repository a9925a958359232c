"""From tokens to features and from features to logits, on any mesh."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from ..nn.projection import mesh_axes, mesh_of, on_mesh, product


def embed(table: Array, tokens: Array) -> Array:
    """The rows `[..., E]` of the table `[vocabulary, E]`; on an explicit mesh laid out as the tokens, with all features on each device."""
    mesh = mesh_of((table, tokens))
    return table[tokens] if mesh is None else _embed_on(mesh, table, tokens)


# Compiled, as the products of `nn.projection`: outside of `jit` only a compiled function takes arrays on a mesh together with others.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _embed_on(mesh: Any, table: Array, tokens: Array) -> Array:
    table, tokens = (on_mesh(mesh, x) for x in (table, tokens))
    lead = jax.typeof(tokens).sharding.spec
    rows, features = jax.typeof(table).sharding.spec
    # What the devices that share the tokens have of the features is gathered before: else the compiler would gather those of all tokens.
    taken = {axis for entry in lead for axis in mesh_axes(entry)}
    apart = tuple(axis for axis in mesh_axes(features) if axis not in taken) or None
    table = jax.sharding.reshard(table, NamedSharding(mesh, PartitionSpec(rows, apart)))
    spec = PartitionSpec(*lead, None)
    return table.at[tokens].get(out_sharding=NamedSharding(mesh, spec))


def logits_of(weight: Array, x: Array) -> Array:
    """Float32 `[..., vocabulary]`; on an explicit mesh laid out as `x` and, along the vocabulary, as the rows of the weight."""
    return product(x, weight, dtype=jnp.float32)
