"""Few queries over many keys: the compressed and the sliding branch by the kernels for pages, which split the keys of a query over programs and
read each key once for all heads of a group. The keys of a row are a page."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from ...dispatch import Problem
from ...paged.core import problem_of
from ...paged.spec import PagedArrays, PagedSpec
from ..problems import COMPRESSED, shapes_of, spec_of
from ..spec import compressed_ranges, NativeArrays, NativeSpec, positions

MOST_QUERIES = 8
"""With more of them, tiles of softmax attention's kernels read a key less often."""


def serves(arrays: NativeArrays) -> bool:
    return arrays.begin is None and arrays.q.shape[1] <= MOST_QUERIES


@functools.lru_cache(maxsize=256)
def of_branch(problem: Problem, name: str) -> Problem:
    """The problem of attention over pages that a branch is."""
    spec, found = spec_of(problem), []

    def look(arrays: NativeArrays) -> None:
        found.append(problem_of("ragged_paged_attention", *call_of(name, arrays, spec)))

    jax.eval_shape(look, shapes_of(problem))
    return found[0]


def call_of(name: str, arrays: NativeArrays, spec: NativeSpec) -> tuple[PagedArrays, PagedSpec]:
    """A branch as attention over pages: each query is a sequence with one query."""
    batch, length, heads, dim = arrays.q.shape
    last = jnp.broadcast_to(positions(arrays, spec), (batch, length))
    k, v, end, left = arrays.k, arrays.v, last + 1, spec.window - 1
    if name == COMPRESSED:
        k, v, left = arrays.compressed_k, arrays.compressed_v, None
        end = jnp.broadcast_to(compressed_ranges(arrays, spec)[1], (batch, length))
    tokens = batch * length
    numbers = jnp.arange(tokens, dtype=jnp.int32)[None]
    zeros = jnp.zeros_like(numbers)
    paged = PagedArrays(
        q=arrays.q.reshape(1, tokens, heads, dim),
        k=k,
        v=v,
        page_table=numbers[..., None] // length,
        q_start=numbers,
        q_len=zeros + 1,
        kv_len=jnp.minimum(end, k.shape[1]).reshape(1, tokens),
        kv_start=zeros,
    )
    return paged, PagedSpec(spec.scale, left=left, return_lse=True)


def by_row(results: dict[str, Array], batch: int) -> tuple[Array, Array]:
    """`out [B, T, H, V]` and `lse [B, H, T]`."""
    out, lse = (results[name].reshape(batch, -1, *results[name].shape[2:]) for name in ("out", "lse"))
    return out, jnp.swapaxes(lse, 1, 2)
