"""Symbolic lengths (`jax.export`): padded to whole tiles, with a list of tiles that is built when the exported function runs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._shapes import as_value, is_symbolic
from .spec import AttentionArrays, AttentionGrads, AttentionSpec

Lengths = tuple[Any, Any]


def lengths_of(arrays: AttentionArrays) -> Lengths | None:
    """The number of queries and keys, if either is symbolic."""
    lengths = arrays.q.shape[1], arrays.k.shape[1]
    return lengths if any(map(is_symbolic, lengths)) else None


def whole(arrays: AttentionArrays, tile: Any) -> AttentionArrays:
    """The arrays padded to whole tiles; no query sees the padding."""
    if lengths_of(arrays) is None:
        return arrays
    axes = {"q": "BT", "k": "BS", "v": "BS", "bias": "BHTS", "mask": "BHTS"}
    axes |= {"q_segments": "BT", "kv_segments": "BS", "log_forget": "BSH"}
    padded = {
        name: _to_tiles(x, letters, tile, -1 if name.endswith("segments") else 0)
        for name, letters in axes.items()
        if (x := getattr(arrays, name)) is not None
    }
    rows = jax.tree.map(lambda x: _to_tiles(x, "BT", tile), arrays.rows)
    return arrays._replace(rows=rows, **padded)


def whole_rows(out: Array, lse: Array, dout: Array, dlse: Array | None, tile: Any) -> tuple[Any, ...]:
    """Results and their cotangents padded to whole tiles; padding rows have zero weights."""
    dlse = None if dlse is None else _to_tiles(dlse, "BHT", tile)
    return _to_tiles(out, "BT", tile), _to_tiles(lse, "BHT", tile, jnp.inf), _to_tiles(dout, "BT", tile), dlse


def cut(grads: AttentionGrads, arrays: AttentionArrays) -> AttentionGrads:
    """Gradients of whole tiles, cut to the original lengths of the arrays."""
    queries, keys, bias = arrays.q.shape[1], arrays.k.shape[1], grads.bias
    if bias is not None and arrays.bias is not None:
        bias = bias[:, :, : arrays.bias.shape[2], : arrays.bias.shape[3]]
    of_keys = {
        name: x[:, :keys] for name in ("k", "v", "log_forget") if (x := getattr(grads, name)) is not None
    }
    return grads._replace(q=grads.q[:, :queries], bias=bias, **of_keys)


def _to_tiles(x: Array, letters: str, tile: Any, fill: Any = 0) -> Array:
    """Padded at the end to whole tiles along `T` and `S`, the first axes having these letters, if their lengths are symbolic."""
    if not any(map(is_symbolic, x.shape)):
        return x
    widths, blocks = [(0, 0)] * x.ndim, {"T": tile.block_q, "S": tile.block_k}
    for axis, (letter, length) in enumerate(zip(letters, x.shape, strict=False)):
        if letter in blocks and is_symbolic(length):
            widths[axis] = (0, -(-length // blocks[letter]) * blocks[letter] - length)
    return jnp.pad(x, widths, constant_values=np.asarray(fill, x.dtype))


def starts(length: Any, block: int) -> Array:
    """Returns where the tiles of a padded length start."""
    return jnp.arange(length // block, dtype=jnp.int32) * block


def pairs(q_start: Any, q_fresh: Any, k_start: Any, k_fresh: Any) -> Array:
    """int32 `[pairs, 4]`: every tile of queries with every tile of keys."""
    wide = lambda x: jnp.asarray(x, jnp.int32)
    columns = [wide(q_start)[:, None], wide(k_start)[None], wide(q_fresh)[:, None], wide(k_fresh)[None]]
    every = jnp.stack(jnp.broadcast_arrays(*columns), -1)
    return every.reshape(every.shape[0] * every.shape[1], 4)


def in_window(pair: Array, block_q: int, block_k: int, spec: AttentionSpec) -> Array | None:
    """Returns whether the static window leaves anything of a pair of tiles visible; `None` without a window."""
    offset, seen = as_value(spec.offset), None
    if spec.left is not None:
        seen = pair[1] + block_k - 1 >= pair[2] + offset - spec.left
    if spec.right is not None:
        right = pair[3] <= pair[0] + block_q - 1 + offset + spec.right
        seen = right if seen is None else seen & right
    return seen
