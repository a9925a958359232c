"""The host side of the choice: the weights of compressed keys, then the blocks with the largest, for some queries at a time."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from ...launch import Launcher, LOG2E, Options, result
from ...launch.sizes import cdiv, padded
from ..spec import compressed_ranges, most_blocks, NativeArrays, NativeSpec, of_sequence, places
from . import choice_kernels, kernels
from .tiles import SelectionTile

_BYTES = 2**28  # of weights of compressed keys at a time
_MANY_BLOCKS = 1024  # to choose from


def choose(
    launch: Launcher, arrays: NativeArrays, spec: NativeSpec, tile: SelectionTile, lse: Array
) -> Array:
    """The blocks of each query, `[B, T, K, n]`; `lse [B, H, T]` is that of the compressed branch."""
    (batch, length), heads = arrays.q.shape[:2], arrays.k.shape[2]
    start, end = compressed_ranges(arrays, spec)
    tables = {"start": start, "end": end, "place": places(arrays, spec), "base": of_sequence(arrays.base)}
    tables = {name: jnp.broadcast_to(x, (batch, length)) for name, x in tables.items()}
    keys = arrays.compressed_k.shape[1]
    launch = launch.knowing(tables | {"k": arrays.compressed_k, "lse": lse * LOG2E}, C=keys)
    tile = dataclasses.replace(tile, block_q=min(tile.block_q, padded(length)))
    sizes = batch, length, heads, keys, most_blocks(arrays, spec)
    return chosen_by(kernels.importance_kernel, tile, launch, sizes, spec, tile.block_q)


def chosen_by(kernel: Any, tile: Any, launch: Launcher, sizes: Any, spec: NativeSpec, block_q: int) -> Array:
    """The blocks of each query by the weights of compressed keys, which `kernel` computes for `block_q` queries a program: for some queries at a
    time, as the weights `[B, K, count, C]` are in memory. `sizes` are `B, T, K, C, M`; `launch` knows where compressed keys `start` and
    `end`, the `place` of a query in its sequence, and the `base` of its blocks, `[B, T]` each."""
    batch, length, heads, keys, blocks = sizes
    multiple = max(block_q, 64)
    size = max(multiple, _BYTES // max(1, 4 * batch * heads * keys) // multiple * multiple)
    columns = padded(blocks, 1)
    rows = max(1, min(8, 1024 // columns))  # of a warp, whose lanes compare faster than warps do
    shared = {"M": blocks, "BLOCK": spec.block, "BLOCK_M": columns}
    chosen = []
    for chunk in range(0, length, size):
        count = min(size, length - chunk)
        own = shared | {"chunk": chunk, "length": count}
        outputs = {"chosen": result(batch, heads, count, spec.count, dtype=jnp.int32)}
        programs = cdiv(keys, tile.block_k) * cdiv(count, block_q) * heads * batch
        weights = {"importance": result(batch, heads, count, keys)}
        given = launch(kernel, tile, weights, programs, chunk=chunk, length=count)
        if columns >= _MANY_BLOCKS and spec.block == spec.span == spec.stride:
            programs, groups = count * heads * batch, choice_kernels.GROUPS.value
            outputs["peaks"] = result(batch, heads, count, groups, dtype=jnp.int32)
            found = launch(choice_kernels.choose_one_kernel, Options(1, 1), outputs, programs, given, **own)
        else:
            programs, tile = cdiv(count, rows) * heads * batch, Options(min(8, max(1, columns // 2048)), 1)
            own |= {"PER": spec.block // spec.stride, "REACH": spec.span // spec.stride, "ROWS": rows}
            found = launch(choice_kernels.choose_kernel, tile, outputs, programs, given, **own)
        chosen.append(jnp.moveaxis(found["chosen"], 1, 2))
    return jnp.concatenate(chosen, 1)
