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
    (batch, queries, heads, dim), values, rotary = arrays.q.shape, arrays.v.shape[-1], launch.numbers["R"]
    width = tile_sizes.widths(dim, values, rotary)
    # Persistent programs: no more than there are tiles of queries.
    programs = min(tile.hopper_programs, cdiv(queries, tile.block_q) * batch * heads * width.PARTS)
    # Whether tiles of keys may be hidden, wholly or partly.
    hides = spec.listed or spec.ranged or arrays.rows is not None or arrays.q_segments is not None
    outputs = {
        "out": result(batch, queries, heads, values, dtype=arrays.q.dtype),
        "lse": result(batch, heads, queries),
    }
    if spec.listed:
        kernel, tables, numbers = _by_lists(arrays, spec, tile, group, programs)
    else:
        kernel, tables, numbers = _by_tiles(launch, arrays, spec, tile, group, programs, width)
        numbers |= dict(
            GUARD=hides,
            D=width.first,
            R=dim - width.first,
            BLOCK_R=width.R,
            SHARED=rotary > 0,
            PARTS=width.PARTS,
        )
        outputs = {"claims": result(1, dtype=jnp.int32), **outputs}
    results = launch(
        kernel,
        tile,
        outputs,
        programs,
        tables,
        BLOCK_D=width.D,
        BLOCK_V=width.V,
        RESCALE_THRESHOLD=tile_sizes.rescale_threshold(width.D, spec.logits_soft_cap, hides),
        name="forward_kernel",
        **numbers,
    )
    return results["out"], results["lse"]


_Parts = tuple[Any, dict[str, Any], dict[str, Any]]
"""A kernel, and the arrays and numbers that it alone takes."""


def _by_tiles(
    launch: Launcher,
    arrays: AttentionArrays,
    spec: AttentionSpec,
    tile: Any,
    group: int,
    programs: int,
    width: Any,
) -> _Parts:
    """The kernel that goes from tile to tile of queries: by a schedule, or, if only the device knows what tiles see, as it claims them."""
    from .forward_kernel import hopper_forward_kernel

    (batch, queries, heads, _), keys = arrays.q.shape, arrays.k.shape[1]
    in_place = tile_sizes.stores_in_place(tile, width)
    numbers: dict[str, Any] = dict(EVEN_K=keys % tile.block_k == 0, IN_PLACE=in_place)
    if arrays.rows is not None or arrays.q_segments is not None:
        # No schedule: the counter that programs claim tiles from is an output that begins as the zero of `bounds`.
        tables = {"schedule": None, **bounds(launch, arrays, spec, tile)}
        return hopper_forward_kernel, tables, numbers | {"aliases": {"no_claims": "claims"}}
    left, right = (-1 if side is None else side for side in (spec.left, spec.right))
    table = schedule(batch * heads * width.PARTS, queries, keys, spec.offset, left, right, tile.block_q, tile.block_k, group, programs)  # fmt: skip
    absent = dict.fromkeys(("tiles", "kinds", "first", "past", "marks", "no_claims"))
    return hopper_forward_kernel, {"schedule": jnp.asarray(table), **absent}, numbers


def _by_lists(arrays: AttentionArrays, spec: AttentionSpec, tile: Any, group: int, programs: int) -> _Parts:
    """The kernel that goes from entry to entry of lists."""
    from .listed_kernel import listed_forward_kernel

    shape = Shape(arrays.q.shape[1], arrays.k.shape[1], tile.block_q, tile.block_k)
    table, entries, patterns, bits = lists.listed(arrays, spec, shape, group, programs)
    # The kernel reads whole tiles. What is not seen can be anything, and 0 * NaN is NaN.
    seen = lists.seen_keys(arrays, spec, shape)
    v = arrays.v if seen is None else jnp.where(seen[..., None], arrays.v, 0)
    tables = {"v": v, "list": entries, "pattern": patterns, "bits": bits, "schedule": jnp.asarray(table)}
    return listed_forward_kernel, tables, {"BITS": 0 if bits is None else bits.shape[-1]}


def bounds(launch: Launcher, arrays: AttentionArrays, spec: AttentionSpec, tile: Any) -> dict[str, Array]:
    """Tables that only the device knows: the bounds of each tile of queries; `marks` of keys, negative if no query sees the key, whose value can then be
    anything, and the segment if there are any, of whole tiles; and a counter of the tiles that are claimed."""
    from .bounds_kernel import key_bounds_kernel

    (batch, queries), keys = arrays.q.shape[:2], arrays.k.shape[1]
    marks: Any = arrays.kv_segments
    if arrays.rows is not None or not spec.sees_itself:
        seen = tile_table.seen(arrays, spec).keys != 0
        marks = jnp.where(seen, 0 if marks is None else marks, -1)
    # Behind the last key no segment matches, and no search goes on.
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
