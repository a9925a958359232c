"""The launch of Hopper's forward kernel. It is in Gluon, which is imported when it is first launched."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from ....launch import Launcher, result
from ....launch.sizes import cdiv, padded
from ...masks import tile_table
from ...masks.tile_shape import Shape
from ...spec import AttentionArrays, AttentionSpec
from . import lists, tile_sizes
from .schedule import schedule


def attended(
    launch: Launcher, arrays: AttentionArrays, spec: AttentionSpec, tile: Any, group: int
) -> tuple[Array, Array]:
    """`out [B, T, H, V]`, `lse [B, H, T]`."""
    if spec.listed:
        return _attended_by_lists(launch, arrays, spec, tile, group)
    from .forward_kernel import hopper_forward_kernel

    (batch, queries, heads, dim), (keys, values) = arrays.q.shape, (arrays.k.shape[1], arrays.v.shape[-1])
    ragged = arrays.rows is not None or arrays.q_segments is not None
    v, tiles = arrays.v, None
    left, right = (-1 if side is None else side for side in (spec.left, spec.right))
    if ragged:
        # The kernel reads whole tiles. Values that no query may see can be anything, and 0 * NaN is NaN.
        seen = jnp.broadcast_to(tile_table.seen(arrays, spec).keys, (batch, keys)) != 0
        v = jnp.where(seen[:, :, None, None], v, 0)
        tiles = tile_table.key_tile_table(arrays, spec, tile.block_q, tile.block_k)
    sinks = None if arrays.sinks is None else jnp.broadcast_to(arrays.sinks, (batch, heads))
    programs = min(tile.hopper_programs, cdiv(queries, tile.block_q) * batch * heads)
    table = schedule(batch * heads, queries, keys, spec.offset, left, right, tile.block_q, tile.block_k, group, programs, ragged)  # fmt: skip
    results = launch(
        hopper_forward_kernel,
        tile,
        {
            "out": result(batch, queries, heads, values, dtype=arrays.q.dtype),
            "lse": result(batch, heads, queries),
        },
        programs,
        {"v": v, "sinks": sinks, "tiles": tiles, "schedule": jnp.asarray(table)},
        B=batch,
        SINKS=arrays.sinks is not None,
        BLOCK_D=padded(dim, tile_sizes.NARROWEST),
        BLOCK_V=padded(values, tile_sizes.NARROWEST),
        EVEN_K=keys % tile.block_k == 0,
        GUARD=ragged or left >= 0 or right >= 0,
        IN_PLACE=tile_sizes.stores_in_place(tile, padded(dim, tile_sizes.NARROWEST)),
        name="forward_kernel",
    )
    return results["out"], results["lse"]


def _attended_by_lists(
    launch: Launcher, arrays: AttentionArrays, spec: AttentionSpec, tile: Any, group: int
) -> tuple[Array, Array]:
    from .listed_kernel import listed_forward_kernel

    (batch, queries, heads, dim), (keys, values) = arrays.q.shape, (arrays.k.shape[1], arrays.v.shape[-1])
    shape = Shape(queries, keys, tile.block_q, tile.block_k)
    programs = min(tile.hopper_programs, shape.grid[0] * batch * heads)
    listed = lists.listed(arrays, spec, shape, group, programs)
    # The kernel reads whole tiles, as above.
    seen = lists.seen_keys(arrays, spec, shape)
    results = launch(
        listed_forward_kernel,
        tile,
        {
            "out": result(batch, queries, heads, values, dtype=arrays.q.dtype),
            "lse": result(batch, heads, queries),
        },
        programs,
        {
            "v": arrays.v if seen is None else jnp.where(seen[..., None], arrays.v, 0),
            "sinks": None if arrays.sinks is None else jnp.broadcast_to(arrays.sinks, (batch, heads)),
            "list": listed.entries,
            "pattern": listed.patterns,
            "bits": listed.bits,
            "schedule": jnp.asarray(listed.schedule),
        },
        B=batch,
        SINKS=arrays.sinks is not None,
        BITS=0 if listed.bits is None else listed.bits.shape[-1],
        BLOCK_D=padded(dim, tile_sizes.NARROWEST),
        BLOCK_V=padded(values, tile_sizes.NARROWEST),
        name="forward_kernel",
    )
    return results["out"], results["lse"]
