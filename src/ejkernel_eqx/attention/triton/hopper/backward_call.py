"""The launch of one of Hopper's backward kernels, and what stands around it: zeros where nothing is seen, and `dq` in its own dtype."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from ....launch import Launcher, NOTHING, result, result_like
from ....launch.sizes import cdiv
from ...masks import tile_table
from ...spec import AttentionArrays, AttentionSpec
from . import backward_tiles, tile_sizes


def gradients(
    launch: Launcher, arrays: AttentionArrays, spec: AttentionSpec, tile: Any, empty: Array
) -> tuple[Array, Array, Array | None, Array, Array]:
    """`dq`, `dk`, that of the keys' second part if they have one, and `dv`. With gates, instead of that part's, sums of the scores' gradients over each
    key's queries `[B, H, S]`; and last those over each tile of queries `[B, H, tiles]`. The launcher knows the cotangent of the output, and `lse` (in
    units of log2) and `delta [B, H, T]`.
    `empty [B, H, T]`: queries that see no key."""
    from .backward_kernel import hopper_backward_kernel

    (batch, queries, heads, dim), (keys, kv_heads) = arrays.q.shape, arrays.k.shape[1:3]
    do, lse, delta = (launch.arrays[name] for name in ("do", "lse", "delta"))
    q, k, v, k_rope, rotary = arrays.q, arrays.k, arrays.v, launch.arrays["k_rope"], launch.numbers["R"]
    width = tile_sizes.widths(dim, v.shape[-1], rotary)
    block_k = tile.block_k
    # The counter that tiles of keys are claimed from, and a semaphore for each tile of `dq`.
    count = cdiv(queries, tile.block_q)
    semaphores = 1 + batch * heads * count
    tiles = order = visited = None
    if arrays.rows is not None or arrays.q_segments is not None:
        # The kernel reads whole tiles. What is not seen can be anything, and 0 * NaN is NaN.
        blind = empty.swapaxes(1, 2)[..., None]
        q, do = jnp.where(blind, 0, q), jnp.where(blind, 0, do)
        seen = jnp.broadcast_to(tile_table.seen(arrays, spec).keys, (batch, keys)) != 0
        k, v = (jnp.where(seen[:, :, None, None], x, 0) for x in (k, v))
        k_rope = None if k_rope is None else jnp.where(seen[:, :, None], k_rope, 0)
        tiles = tile_table.query_tile_table(arrays, spec, tile.block_q, block_k)
        order, visited = order_of(tiles, count)
    are_alike = tiles is None and spec.left is None and spec.right is None
    gated = arrays.log_forget is not None
    past = ((0, 0), (0, 0), (0, count * tile.block_q - queries))
    results = launch(
        hopper_backward_kernel,
        tile,
        {
            "semaphores": result(semaphores, dtype=jnp.int32), "dq": result(*q.shape), "dk": result_like(k),
            "dmore": result(batch, kv_heads, keys, rotary) if rotary else NOTHING, "dv": result_like(v),
            "by_key": result(batch, heads, keys) if gated else NOTHING, "by_tile": result(batch, heads, count) if gated else NOTHING,
        },
        min(cdiv(keys, block_k) * batch * kv_heads, backward_tiles.PROGRAMS),
        {
            "q": q, "k": k, "k_rope": k_rope, "v": v, "do": do, "lse": jnp.pad(lse, past, constant_values=jnp.inf), "delta": jnp.pad(delta, past), "tiles": tiles,
            "order": order, "zeros": jnp.zeros(semaphores, jnp.int32),
        },
        aliases={"zeros": "semaphores"},
        terms=count * tile.block_q,
        D=width.first,
        R=dim - width.first,
        SHARED=rotary > 0,
        BLOCK_D=width.D,
        EVEN_K=keys % block_k == 0,
        GROUP=backward_tiles.together(queries, heads // kv_heads, width.D + width.R, are_alike),
        name="backward_kernel",
    )  # fmt: skip
    dq, by_tile = results["dq"] * spec.scale, results["by_tile"]
    if visited is not None:  # nothing was stored for the others
        dq = jnp.where(jnp.repeat(visited, tile.block_q, axis=1)[:, :queries, None, None], dq, 0)
        by_tile = jnp.where(visited[:, None], by_tile, 0) if gated else by_tile
    dmore = results["dmore"].sum(1) if rotary else results["by_key"] if gated else None
    return dq.astype(q.dtype), results["dk"], dmore, results["dv"], by_tile


def order_of(tiles: Array, count: int) -> tuple[Array, Array]:
    """The number of tiles of keys before one that see a tile of queries, `[B, tiles of keys, count]`, and whether any sees it, `[B, count]`; from
    the bounds `[B, tiles of keys, 4]` of the tiles of queries of each tile of keys."""
    m = jnp.arange(count, dtype=jnp.int32)[None, None]
    sees = (tiles[:, :, :1] <= m) & (m < tiles[:, :, 3:])
    # As a product by a triangle, exact: XLA's running sum along this axis takes 65 microseconds for 128 tiles.
    earlier = jnp.tri(tiles.shape[1], k=-1, dtype=jnp.bfloat16)
    before = jnp.einsum("nj,bjm->bnm", earlier, sees.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    return before.astype(jnp.int32), sees.any(1)
