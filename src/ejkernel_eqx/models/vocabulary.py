"""From tokens to features and from features to logits, on any mesh."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from ..nn.projection import mesh_of, on_mesh, product


def embed(table: Array, tokens: Array) -> Array:
    """The rows `[..., E]` of the table `[vocabulary, E]`; on an explicit mesh laid out as the tokens, with all features on each device."""
    mesh = mesh_of((table, tokens))
    return table[tokens] if mesh is None else _embed_on(mesh, table, tokens)


# Compiled, as the products of `nn.projection`: outside of `jit` only a compiled function takes arrays on a mesh together with others.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _embed_on(mesh: Any, table: Array, tokens: Array) -> Array:
    table, tokens = (on_mesh(mesh, x) for x in (table, tokens))
    # Features of the few rows that are kept on other devices are gathered before, or the compiler would gather those of all tokens.
    table = jax.sharding.reshard(
        table, NamedSharding(mesh, PartitionSpec(jax.typeof(table).sharding.spec[0], None))
    )
    spec = PartitionSpec(*jax.typeof(tokens).sharding.spec, None)
    return table.at[tokens].get(out_sharding=NamedSharding(mesh, spec))


def logits_of(weight: Array, x: Array) -> Array:
    """Float32 `[..., vocabulary]`; on an explicit mesh laid out as `x` and, along the vocabulary, as the rows of the weight."""
    return product(x, weight, dtype=jnp.float32)
