"""A loop over chunks of tokens, and the products of matrices in it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._shapes import is_symbolic
from ..core.arguments import accumulator
from ..parallel import match_varying

Named = dict[str, Array]


def over_chunks(
    chunk: Callable[[Named], tuple[Named, Named, Named]], tokens: Named, size: int, learned: Named
) -> tuple[Named, Named, Named]:
    """`chunk(tokens)` of at most `size` tokens at a time. It returns two groups of results of its tokens, and the gradients of the `learned` arrays
    as sums over them, in float32 or wider.

    `tokens`: arrays `[B, M, N, ...]`; a chunk has one axis in place of three. The chunks are filled up with labels of -1, and zeros otherwise.
    """
    lead = tokens["labels"].shape
    flat = {name: x.reshape(-1, *x.shape[3:]) for name, x in tokens.items()}
    count = flat["labels"].shape[0]
    chunks = -(-count // size)
    is_known = not is_symbolic(count)
    if is_known and chunks <= 1:
        results, of_tokens, sums = chunk(flat)
    else:
        # Chunk i has the tokens i, i + chunks, ..., so that each has some of every device's if the tokens are split over devices. Of a symbolic
        # number of tokens, JAX knows that whole chunks divide it.
        filled = -count % chunks if is_known else chunks * size - count

        def parts_of(name: str, x: Array) -> Array:
            fill = -1 if name == "labels" else 0
            x = jnp.pad(x, [(0, filled)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
            return jnp.moveaxis(x.reshape(-1, chunks, *x.shape[1:]), 1, 0)

        def body(sums: Any, tokens: Any) -> Any:
            *results, more = chunk(dict(tokens))
            return jax.tree.map(jnp.add, sums, more), tuple(results)

        parts = {name: parts_of(name, x) for name, x in flat.items()}
        zeros = {name: jnp.zeros(x.shape, accumulator(x.dtype)) for name, x in learned.items()}
        sums, each = lax.scan(body, match_varying(zeros, parts), parts)
        whole = lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])[:count]
        results, of_tokens = jax.tree.map(whole, each)
    split = lambda named: {name: x.reshape(*lead, *x.shape[1:]) for name, x in named.items()}
    return split(results), split(of_tokens), sums


def logits_of(x: Array, weight: Array, bias: Array | None, dtype: Any) -> Array:
    """`[N, V]`, from features `[N, E]` and a weight `[V, E]` of one dtype."""
    logits = product(x, weight, ((1,), (1,)), dtype)
    return logits if bias is None else logits + bias.astype(dtype)[None]


def product(a: Array, b: Array, axes: Any, dtype: Any) -> Array:
    precision = None if a.dtype.itemsize < 4 else lax.Precision.HIGHEST
    return lax.dot_general(a, b, (axes, ((), ())), precision=precision, preferred_element_type=dtype)
