"""The launch of Hopper's forward kernel. It is in Gluon, which is imported when it is first launched."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from ....launch import Launcher, Options, result
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
    left, right = (-1 if side is None else side for side in (spec.left, spec.right))
    hides = ragged or left >= 0 or right >= 0
    programs = min(tile.hopper_programs, cdiv(queries, tile.block_q) * batch * heads)
    if ragged:
        launch = launch.knowing(bounds(launch, arrays, spec, tile))
        tables: dict[str, Any] = {"schedule": None}
    else:
        table = schedule(batch * heads, queries, keys, spec.offset, left, right, tile.block_q, tile.block_k, group, programs)  # fmt: skip
        tables = {
            "schedule": jnp.asarray(table),
            **dict.fromkeys(("tiles", "kinds", "first", "past", "marks", "no_claims")),
        }
    sinks = None if arrays.sinks is None else jnp.broadcast_to(arrays.sinks, (batch, heads))
    results = launch(
        hopper_forward_kernel,
        tile,
        {
            "claims": result(1, dtype=jnp.int32),
            "out": result(batch, queries, heads, values, dtype=arrays.q.dtype),
            "lse": result(batch, heads, queries),
        },
        programs,
        {"sinks": sinks, **tables},
        aliases={"no_claims": "claims"} if ragged else None,
        B=batch,
        SINKS=arrays.sinks is not None,
        BLOCK_D=padded(dim, tile_sizes.NARROWEST),
        BLOCK_V=padded(values, tile_sizes.NARROWEST),
        EVEN_K=keys % tile.block_k == 0,
        GUARD=hides,
        RESCALE_THRESHOLD=tile_sizes.rescale_threshold(dim, spec.logits_soft_cap, hides),
        IN_PLACE=tile_sizes.stores_in_place(tile, padded(dim, tile_sizes.NARROWEST)),
        name="forward_kernel",
    )
    return results["out"], results["lse"]


def bounds(launch: Launcher, arrays: AttentionArrays, spec: AttentionSpec, tile: Any) -> dict[str, Array]:
    """Tables that only the device knows: the bounds of each tile of queries; `marks` of keys, negative if no query sees the key, whose value can then be
    anything, and the segment if there are any, of whole tiles; and a counter of the tiles that are claimed."""
    from .bounds_kernel import key_bounds_kernel

    (batch, queries), keys = arrays.q.shape[:2], arrays.k.shape[1]
    marks: Any = arrays.kv_segments
    if arrays.rows is not None or not spec.sees_itself:
        seen = tile_table.seen(arrays, spec).keys != 0
        marks = jnp.where(seen, 0 if marks is None else marks, -1)
    past = cdiv(keys, tile.block_k) * tile.block_k - keys
    marks = jnp.broadcast_to(marks, (batch, keys)).astype(jnp.int32)
    marks = jnp.pad(marks, ((0, 0), (0, past)), constant_values=jnp.iinfo(jnp.int32).max)
    count = cdiv(queries, tile.block_q)
    results = launch(
        key_bounds_kernel,
        Options(8),
        {
            "tiles": result(batch, count, 4, dtype=jnp.int32),
            "kinds": result(batch, count, dtype=jnp.int32),
            "first": result(batch, queries, dtype=jnp.int32),
            "past": result(batch, queries, dtype=jnp.int32),
            "no_claims": result(1, dtype=jnp.int32),
        },
        batch * count,
        {"marks": marks},
        BLOCK_Q=tile.block_q,
        BLOCK_K=tile.block_k,
        MOST=padded(tile.block_q),
        STEPS=keys.bit_length(),
    )
    return {"marks": marks, **results}


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
        RESCALE_THRESHOLD=tile_sizes.rescale_threshold(dim, spec.logits_soft_cap, True),
        BLOCK_D=padded(dim, tile_sizes.NARROWEST),
        BLOCK_V=padded(values, tile_sizes.NARROWEST),
        name="forward_kernel",
    )
    return results["out"], results["lse"]
