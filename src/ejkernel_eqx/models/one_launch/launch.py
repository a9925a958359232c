"""The host side of a layer in one launch."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from ...launch import Launcher, result, result_like, run
from . import kernel

PROGRAMS, WARPS, LAST = 128, 8, 5
TILE_ROWS, CHUNK, BLOCK_K, MOST_SPLITS = 8, 256, 32, 16
"""Rows and features of a tile of weights, of which a warp has whole rows; keys of a tile; programs for the keys of a head."""
MOST_AHEAD = 12
"""The most tiles of a weight that are loaded while a program waits."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a layer is: features, of the MLP, heads of queries and of keys, features of a head."""

    embed: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int

    @property
    def projected(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim


@dataclasses.dataclass(frozen=True)
class LayerTile:
    """`splits` of the keys of the sequence."""

    splits: int
    num_warps: int = WARPS
    num_stages: int = 1


def tile_of(sizes: Sizes, keys: int, programs: int = PROGRAMS, warps: int = WARPS) -> LayerTile | None:
    """The tile for places for so many keys; `None` if the programs cannot share the layer equally."""
    features = (sizes.embed, sizes.heads * sizes.dim, sizes.hidden)
    if sizes.dim & (sizes.dim - 1) or any(x % CHUNK for x in features) or sizes.heads * sizes.dim % programs:
        return None
    # The rows of weights of a program are of queries, of keys or of values alone.
    columns = (sizes.projected, sizes.embed, sizes.hidden)
    if any(n % (TILE_ROWS * programs) for n in columns) or sizes.kv_heads * sizes.dim % (
        sizes.projected // programs
    ):
        return None
    splits = min(programs // sizes.kv_heads, MOST_SPLITS, -(-keys // BLOCK_K))
    return LayerTile(1 << (splits.bit_length() - 1), warps) if splits else None


def launch_layer(
    arrays: Mapping[str, Any],
    sizes: Sizes,
    tile: LayerTile,
    numbers: Mapping[str, Any],
    programs: int = PROGRAMS,
    by_phase: bool = False,
) -> tuple[Array, Array, Array]:
    """The output, the keys and the values. `by_phase`: as a launch for each phase, without barriers, for an interpreter."""
    x, k, v = (arrays[name] for name in ("x", "k", "v"))
    features = sizes.projected + sizes.embed + sizes.hidden + sizes.heads * sizes.dim
    outputs = {"new_k": result_like(k), "new_v": result_like(v), "new_row": result(features, dtype=x.dtype)}
    outputs |= {"new_parts": result(sizes.heads * tile.splits * (sizes.dim + 1)), "out": result_like(x)}
    known = dict(numbers) | {
        "E": sizes.embed,
        "F": sizes.hidden,
        "HQ": sizes.heads,
        "HK": sizes.kv_heads,
        "D": sizes.dim,
    }
    known |= {
        "PROGRAMS": programs,
        "BK": BLOCK_K,
        "S": tile.splits,
        "TR": TILE_ROWS,
        "KS": CHUNK,
        "MOST": MOST_AHEAD,
    }
    aliases = {"k": "new_k", "v": "new_v"}
    # The counter is zero again after each launch.
    kept = {"row": None, "parts": None, "count": jnp.zeros(32, jnp.int32)}
    launch = Launcher("models", dict(arrays) | kept, known, x)
    if not by_phase:
        made = launch(kernel.layer_kernel, tile, outputs, programs, aliases=aliases, FIRST=0, LAST=LAST)
        return made["out"], made["new_k"], made["new_v"]
    made = {
        "new_k": k,
        "new_v": v,
        "new_row": jnp.zeros(outputs["new_row"].shape, x.dtype),
        "new_parts": jnp.zeros(outputs["new_parts"].shape),
    }
    for phase in range(LAST + 1):
        again = {name.removeprefix("new_"): made[name] for name in ("new_k", "new_v", "new_row", "new_parts")}
        both = aliases | {"row": "new_row", "parts": "new_parts"}
        described, inputs = launch.launch(
            kernel.layer_kernel, tile, outputs, programs, again, aliases=both, FIRST=phase, LAST=phase
        )
        made = {name.removesuffix("_ptr"): a for name, a in run(described, inputs, interpret=True).items()}
    return made["out"], made["new_k"], made["new_v"]
