"""Symbolic lengths (`jax.export`): padded to whole tiles, with a list of tiles that is built when the exported function runs."""

from typing import Any

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
    q, s = tile.block_q, tile.block_k
    scores = ((2, q), (3, s))
    sides = {"q": ((1, q),), "k": ((1, s),), "v": ((1, s),), "bias": scores, "mask": scores}
    sides |= {"q_segments": ((1, q),), "kv_segments": ((1, s),)}
    padded: dict[str, Any] = {}
    for name, own in sides.items():
        padded[name] = getattr(arrays, name)
        for axis, block in own if padded[name] is not None else ():
            padded[name] = _to_tiles(padded[name], axis, block, -1 if name.endswith("segments") else 0)
    if arrays.rows is not None:
        padded["rows"] = arrays.rows._make(_to_tiles(x, 1, q) for x in arrays.rows)
    return arrays._replace(**padded)


def whole_rows(
    out: Array, lse: Array, dout: Array, dlse: Array | None, tile: Any
) -> tuple[Array, Array, Array, Array | None]:
    """Results and their cotangents padded to whole tiles; padding rows have zero weights."""
    q = tile.block_q
    dlse = None if dlse is None else _to_tiles(dlse, 2, q)
    return _to_tiles(out, 1, q), _to_tiles(lse, 2, q, jnp.inf), _to_tiles(dout, 1, q), dlse


def cut(grads: AttentionGrads, arrays: AttentionArrays) -> AttentionGrads:
    """Gradients of whole tiles, cut to the original lengths of the arrays."""
    queries, keys, bias = arrays.q.shape[1], arrays.k.shape[1], grads.bias
    if bias is not None and arrays.bias is not None:
        bias = bias[:, :, : arrays.bias.shape[2], : arrays.bias.shape[3]]
    return grads._replace(q=grads.q[:, :queries], k=grads.k[:, :keys], v=grads.v[:, :keys], bias=bias)


def _to_tiles(x: Array, axis: int, block: int, fill: Any = 0) -> Array:
    """Padded at the end to whole blocks if the length is symbolic."""
    length = x.shape[axis]
    if not is_symbolic(length):
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -(-length // block) * block - length)
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
