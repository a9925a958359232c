"""The embedding of tokens and the logits of features, on any mesh."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from .._values import check_known, checked, checks_traced
from ..core.copies import copied
from ..dispatch import Backend, place_of_calls
from ..nn.arguments import check_tokens, read_array
from ..nn.projection import mesh_axes, mesh_of, on_mesh, product
from ..quantised import QuantizedWeight
from .layer import real_of


def embed(table: Array | QuantizedWeight, tokens: Array) -> Array:
    """The rows `[..., E]` of the table `[vocabulary, E]`. On an explicit mesh they are split as the tokens are, with all features on each device.
    Gradients of equal tokens are summed in float32."""
    mesh = mesh_of((table, tokens))
    if isinstance(table, QuantizedWeight):
        return table[tokens] if mesh is None else _numbers_on(mesh, table, tokens)
    if mesh is not None:
        return _embed_on(mesh, table, tokens)
    return _embed_few(table, tokens) if _are_few(table, tokens) else copied(_rows, table, tokens)


def _rows(table: Array, tokens: Array) -> Array:
    return table[tokens]


_FEW_WORDS, _MANY_TOKENS = 512, 4096


def _are_few(table: Array, tokens: Array) -> bool:
    """Returns whether many tokens share each row of the table, on a GPU. Then the gradient of a row would be summed token by token, by many writes to
    the same memory. A product with a one-hot matrix has the same result and is faster. In 16 bits its forward pass is exact."""
    few = table.shape[0] <= _FEW_WORDS and table.dtype.itemsize == 2 and tokens.size >= _MANY_TOKENS
    return few and place_of_calls()[0] is Backend.GPU


def _embed_few(table: Array, tokens: Array) -> Array:
    words = table.shape[0]
    # As in the index of an array, negative tokens count from the end, and those past the end become the last one.
    tokens = jnp.clip(jnp.where(tokens < 0, tokens + words, tokens), 0, words - 1)
    return product(jax.nn.one_hot(tokens, words, dtype=table.dtype), table.T)


# This is compiled like the products of `nn.projection`: outside of `jit`, only a compiled function takes arrays on a mesh together with others.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _embed_on(mesh: Any, table: Array, tokens: Array) -> Array:
    table, tokens = (on_mesh(mesh, x) for x in (table, tokens))
    lead = jax.typeof(tokens).sharding.spec
    rows, features = jax.typeof(table).sharding.spec
    # Devices that have the same tokens gather their parts of the table first. Otherwise the compiler would gather the features of all tokens.
    taken = {axis for entry in lead for axis in mesh_axes(entry)}
    apart = tuple(axis for axis in mesh_axes(features) if axis not in taken) or None
    table = jax.sharding.reshard(table, NamedSharding(mesh, PartitionSpec(rows, apart)))
    sharding = NamedSharding(mesh, PartitionSpec(*lead, None))
    return copied(lambda table, tokens: table.at[tokens].get(out_sharding=sharding), table, tokens)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _numbers_on(mesh: Any, table: QuantizedWeight, tokens: Array) -> Array:
    """The rows of a quantised table. The compiler moves the codes between devices, since there is no gradient to them."""
    table, tokens = jax.tree.map(lambda x: on_mesh(mesh, x), (table, tokens))
    sharding = NamedSharding(mesh, PartitionSpec(*jax.typeof(tokens).sharding.spec, None))
    by_compiler: Any = jax.sharding.auto_axes(lambda table, tokens: table[tokens], out_sharding=sharding)
    return by_compiler(table, tokens)


def check_rows(tokens: Any, rows: Mapping[str, Any]) -> None:
    """Checks the tokens `[..., T]` of a call and the arrays with one entry for each token."""
    tokens = read_array("tokens", tokens, "integers", "[..., T]")
    if tokens.ndim < 1:
        raise ValueError(
            "tokens: expected integers [..., T], received a single one; give it an axis of time."
        )
    for name, kind in _KINDS.items():
        check_tokens(name, rows.get(name), kind, "tokens", tokens[..., None])


_KINDS = {"padding_mask": "booleans", "segment_ids": "integers", "token_types": "integers"}


def in_vocabulary(tokens: Any, size: int, rows: dict[str, Any]) -> Array:
    """The tokens, after a check that all of them are in the vocabulary. Padding may have any value."""
    array, real = jnp.asarray(tokens), real_of(rows)
    if real is not None and real.shape != array.shape:
        return array  # the layers say so
    outside = lambda x: (x < 0) | (x >= size)

    def checked_tokens(array: Array, given: Any) -> Array:
        return checked(
            array,
            given,
            outside,
            lambda found: (
                f"tokens: expected numbers from 0 to {size - 1}, words of the model's vocabulary, received {found}; use the tokenizer of this "
                "model, and a padding_mask where there is no token."
            ),
            show=lambda values: str(values[outside(values)][0]),
        )

    def check(given: Any) -> None:
        tokens, rows = given
        real = real_of(rows)
        checked_tokens(jnp.asarray(tokens), np.asarray(tokens) if real is None else np.where(real, tokens, 0))

    if check_known((tokens, rows), check) or not checks_traced():
        return array
    array = array if real is None else jnp.where(real, array, 0)
    return checked_tokens(array, array)


def logits_of(weight: Array | QuantizedWeight, x: Array) -> Array:
    """The float32 logits `[..., vocabulary]`. On an explicit mesh they are split as `x` is and, along the vocabulary, as the rows of the weight."""
    return product(x, weight, dtype=jnp.float32)
